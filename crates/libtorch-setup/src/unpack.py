"""Unpacks the chosen files of a wheel; see python.rs for arguments and exit codes."""

import errno
import fnmatch
import json
import os
import sys
import zipfile

CHUNK_BYTES = 4 << 20


def main(wheel, folder, patterns):
    patterns = json.loads(patterns)
    unused, done = set(patterns), 0
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            matching = [it for it in patterns if fnmatch.fnmatchcase(entry.filename, it)]
            if entry.is_dir() or not matching:
                continue
            unused.difference_update(matching)
            name = entry.filename
            if name.startswith("/") or ".." in name.split("/"):
                raise ValueError(f"{name} would lie outside of the install")
            target = os.path.join(folder, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.open(entry) as source, open(target, "wb") as sink:
                while chunk := source.read(CHUNK_BYTES):
                    sink.write(chunk)
                    done += len(chunk)
                    print(done, flush=True)
    if unused:
        raise ValueError(f"there is no {sorted(unused)[0]} in it")


try:
    main(*sys.argv[1:])
except OSError as error:
    print(error, file=sys.stderr)
    sys.exit(errno.ENOSPC if error.errno == errno.ENOSPC else 1)
except (ValueError, zipfile.BadZipFile) as error:
    print(error, file=sys.stderr)
    sys.exit(1)

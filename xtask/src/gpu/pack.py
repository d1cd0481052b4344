"""pack.py FOLDER FILE: one archive of a folder, as the folder `brigade-gpu`."""

import lzma
import os
import sys
import tarfile

folder, target = sys.argv[1:]
# The same program for two libtorchs is nearly the same text: side by side, within one dictionary.
paths = []
for root, folders, files in os.walk(folder):
    paths += [os.path.relpath(os.path.join(root, name), folder) for name in files]
paths.sort(key=lambda path: (os.path.basename(path), path))


def plain(info):
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def write(out):
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in paths:
            archive.add(os.path.join(folder, path), os.path.join("brigade-gpu", path), filter=plain)


partial = target + ".partial"
if target.endswith(".xz"):
    filters = [
        {"id": lzma.FILTER_X86},
        # What makes it small is the dictionary: higher presets take four times as long, for some per cent.
        {"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 128 << 20},
    ]
    with lzma.open(partial, "wb", format=lzma.FORMAT_XZ, filters=filters) as out:
        write(out)
else:
    with open(partial, "wb") as out:
        write(out)
os.replace(partial, target)

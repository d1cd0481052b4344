"""What tests share: temporary folders, stand-ins for programs, processes that end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import brigade
from brigade.programs import find_brigade

# Takes part as `brigade`, but makes packages without libtorch.
_BRIGADE = """#!/bin/sh
echo "$@" >> {folder}/brigade.log
case "$1" in
    new) mkdir -p "$2/src" && echo made > "$2/src/main.rs";;
    *) exec {brigade} "$@";;
esac
"""

# Takes part as cargo: a cell's lines that begin with `//$` are a shell program, which it "builds".
_CARGO = """#!{python}
import json, os, pathlib, sys, time
with open("{folder}/cargo.log", "a") as log:
    print(*sys.argv[1:], file=log)
print("    Building [=>   ] 1/2: tch", end="\\r", file=sys.stderr)
source = pathlib.Path("src/main.rs").absolute()
def say(reason, **fields):
    print(json.dumps(dict(reason=reason, target=dict(src_path=str(source)), **fields)), flush=True)
def message(level, text):
    rendered = text + " --> src/main.rs:3:5\\n"
    say("compiler-message", message=dict(level=level, code=None, spans=[0], rendered=rendered))
if pathlib.Path("{folder}/offline").exists():
    sys.exit("error: no network")
if "// warn" in source.read_text():
    message("warning", "unused")
if "// slow" in source.read_text():
    pathlib.Path("{folder}/pid.new").write_text(str(os.getpid()))
    os.rename("{folder}/pid.new", "{folder}/pid")
    time.sleep(600)
if "// wrong" in source.read_text():
    message("error", "mismatched")
    sys.exit("error: could not compile `cell`")
program = pathlib.Path(sys.argv[sys.argv.index("--target-dir") + 1], "release/cell")
program.parent.mkdir(parents=True, exist_ok=True)
lines = [line[4:] for line in source.read_text().splitlines() if line.startswith("//$ ")]
program.write_text("\\n".join(["#!/bin/sh", *lines, ""]))
program.chmod(0o755)
say("compiler-artifact", executable=str(program))
"""


class TestCase(unittest.TestCase):
    """A test in a folder of its own, which is the working folder."""

    def setUp(self) -> None:
        self.folder = Path(self.enterContext_(tempfile.TemporaryDirectory())).resolve()
        before = Path.cwd()
        os.chdir(self.folder)
        self.addCleanup(os.chdir, before)
        self.enterContext_(mock.patch.dict(os.environ))
        os.environ["PYTHONPATH"] = str(Path(brigade.__file__).parents[1])
        # Settings of the user who runs the tests.
        os.environ["BRIGADE_CONFIG"] = os.devnull
        for name in ("LIBTORCH", "LIBTORCH_USE_PYTORCH"):
            os.environ.pop(name, None)

    def enterContext_(self, context: contextlib.AbstractContextManager):
        """Does what `enterContext` does since Python 3.11."""
        entered = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return entered

    def use_stand_ins(self) -> None:
        """Puts stand-ins for `brigade new` and cargo in place, and an empty cache."""
        for name, text in (("brigade", _BRIGADE), ("cargo", _CARGO)):
            program = self.folder / "bin" / name
            program.parent.mkdir(exist_ok=True)
            text = text.format(folder=self.folder, brigade=find_brigade(), python=sys.executable)
            program.write_text(text)
            program.chmod(0o755)
        os.environ["BRIGADE_PROGRAM"] = str(self.folder / "bin/brigade")
        os.environ["PATH"] = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")

    def log_of(self, name: str) -> list[str]:
        """Returns the arguments of a stand-in's calls."""
        log = self.folder / f"{name}.log"
        return log.read_text().splitlines() if log.exists() else []


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Takes what is written to standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def until(condition: Callable[[], object]) -> None:
    """Waits until something is so; an error after a minute."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a condition has not come true within 60 s")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Tells whether a process runs; one that has ended and is not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"

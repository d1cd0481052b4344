"""Which `brigade` is started, and `python -m brigade`."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from pathlib import Path

from tests.support import TestCase

_SHOW = 'echo "$PYTHON_EXEC: $@"; exit 5'
# Tells which program is found by a package in the library of an installed Python.
_FIND = "from brigade.programs import find_brigade; print(find_brigade())"


class Programs(TestCase):
    """Started by a Python of its own."""

    def program(self, path: str, script: str = "") -> Path:
        """Writes a stand-in for `brigade`."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs Python to its end."""
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)

    def test_the_module_starts_the_program_with_this_python(self) -> None:
        os.environ["BRIGADE_PROGRAM"] = str(self.program("brigade", _SHOW))
        os.environ.pop("PYTHON_EXEC", None)
        ran = self.python("-m", "brigade", "launch", "a b")
        self.assertEqual((ran.returncode, ran.stdout), (5, f"{sys.executable}: launch a b\n"))
        os.environ["PYTHON_EXEC"] = "pypy"
        self.assertEqual(self.python("-m", "brigade").stdout, "pypy: \n")

    def test_a_module_without_its_program(self) -> None:
        os.environ["BRIGADE_PROGRAM"] = "/no/brigade"
        ran = self.python("-m", "brigade")
        self.assertEqual(ran.returncode, 127)
        self.assertRegex(ran.stderr, "^brigade: BRIGADE_PROGRAM is /no/brigade, which is not")

    def test_the_program_beside_an_installed_package_comes_before_path(self) -> None:
        beside = self.program("base/bin/brigade")
        in_path = self.program("path/brigade")
        os.environ["PATH"] = f"{in_path.parent}:{os.environ['PATH']}"
        os.environ.pop("BRIGADE_PROGRAM", None)
        source = Path(os.environ["PYTHONPATH"])
        library = self.folder / "base/lib/python{}.{}/site-packages".format(*sys.version_info)
        library.mkdir(parents=True)
        (library / "brigade").symlink_to(source / "brigade")
        # As a checkout: no program belongs to it.
        self.assertEqual(self.python("-c", _FIND).stdout, f"{in_path}\n")
        (library / "brigade").unlink()
        (library / "brigade").mkdir()
        for module in (source / "brigade").glob("*.py"):
            (library / "brigade" / module.name).write_text(module.read_text())
        home = {"PYTHONUSERBASE": str(self.folder / "base"), "PYTHONPATH": str(library)}
        os.environ.update(home)
        self.assertEqual(self.python("-c", _FIND).stdout, f"{beside}\n")


if __name__ == "__main__":
    unittest.main()

"""The programs that this package starts: `brigade` and cargo."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from brigade.errors import NotInstalled


def find_brigade() -> Path:
    """Finds `brigade`.

    It is what `BRIGADE_PROGRAM` names, else the program that was installed with this package, else
    the one in `PATH` or in cargo's folder. Raises `NotInstalled` where it is in none of them.
    """
    if named := os.environ.get("BRIGADE_PROGRAM"):
        program = shutil.which(Path(named).absolute())
        if program is None:
            raise NotInstalled(f"BRIGADE_PROGRAM is {named}, which is not an executable file")
        return Path(program)
    for folder in _script_folders():
        if program := shutil.which(folder / "brigade"):
            return Path(program)
    return _find(
        "brigade", "build it with `cargo install --path crates/cli`, or name it in BRIGADE_PROGRAM"
    )


def _script_folders() -> list[Path]:
    """Lists the folders of this environment and this user that have the program of a wheel."""
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    folders = [Path(sysconfig.get_path("scripts", scheme)) for scheme in schemes]
    package = Path(__file__).resolve().parent
    libraries = [Path(sysconfig.get_path("purelib", scheme)) for scheme in schemes]
    # Only where this package is installed: a checkout has a program of its own.
    return [
        folder
        for folder, library in zip(folders, libraries, strict=True)
        if package.parent == library.resolve()
    ]


def find_cargo() -> Path:
    """Finds cargo, which builds cells. Raises `NotInstalled` where there is none."""
    return _find("cargo", "install Rust (https://rustup.rs)")


def search_path() -> str:
    """Returns `PATH` with cargo's folder of programs at its end.

    A notebook server that a desktop has started may not have it.
    """
    cargo_home = os.environ.get("CARGO_HOME") or Path.home() / ".cargo"
    path = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([path, os.fspath(Path(cargo_home, "bin"))])


def _find(name: str, remedy: str) -> Path:
    path = search_path()
    program = shutil.which(name, path=path)
    if program is None:
        raise NotInstalled(f"there is no program `{name}` in {path}: {remedy}")
    return Path(program).absolute()

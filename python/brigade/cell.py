"""A cell of Rust as a program: wrapped, written as a package in a cache, and built."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brigade import process
from brigade.cargo import Build
from brigade.errors import CompileError, Interrupted
from brigade.programs import find_brigade, find_cargo, search_path

# Where LIBTORCH or LIBTORCH_USE_PYTORCH names another libtorch, packages are made anew.
_LIBTORCH = ("LIBTORCH", "LIBTORCH_USE_PYTORCH")

_BEGIN = (
    "#[allow(unused_imports)] use brigade::prelude::*; fn main() -> brigade::Result<()> {"
)


def program(cell: str) -> str:
    """Makes a program of a cell. Its first line is the magic's: line numbers are the cell's.

    A cell without `fn main` becomes the body of one that returns `brigade::Result<()>`, with
    the prelude imported. `Ok(())` is added where the body ends with a statement.
    """
    if re.search(r"^\s*(pub\s+)?fn\s+main\s*\(", cell, re.MULTILINE):
        return f"// %%brigade\n{cell.rstrip()}\n"
    end = "Ok(())\n" if _ends_with_statement(cell) else ""
    return f"{_BEGIN}\n{cell.rstrip()}\n{end}}}\n"


def _ends_with_statement(body: str) -> bool:
    """Looks at the last line with code, without its comment."""
    code = re.sub(r'"(\\.|[^"\\])*"', '""', body)
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    lines = (re.sub(r"//.*", "", line).rstrip() for line in code.splitlines())
    last = next((line for line in reversed(list(lines)) if line), "")
    return not last or last.endswith((";", "}"))


@dataclass(frozen=True)
class Package:
    """What a cell is built with."""

    features: Sequence[str] = ()
    """Features of the crate `brigade`."""
    checkout: Path | None = None
    """Checkout of Brigade to build with. Defaults to that of the program `brigade`, else crates.io."""
    debug: bool = False
    """Build without optimizations."""

    @contextmanager
    def built(self, cell: str) -> Iterator[Path]:
        """Builds a cell, and removes the program at the end of the `with` statement.

        Notebooks build one after the other; their programs run side by side. Raises `CompileError`
        where the cell cannot be built, and `Interrupted`.
        """
        root = cache_folder()
        root.mkdir(parents=True, exist_ok=True)
        with _folder_of_run(root) as folder:
            with _locked(root / "lock"):
                _remove_folders_of_killed_runs(root)
                package = self._prepare(root)
                _write(package / "src/main.rs", program(cell))
                built = self._build(package, root / "target")
                # The next cell that is built takes its place.
                own = shutil.copy2(built, folder)
            yield Path(own)

    def _build(self, package: Path, target: Path) -> Path:
        command = [find_cargo(), "build", *Build.OPTIONS, "--target-dir", target]
        if not self.debug:
            command.append("--release")
        if self.features:
            command += ["--features", ",".join(f"brigade/{name}" for name in self.features)]
        build = Build(package / "src/main.rs")
        env = {**os.environ, **Build.VARIABLES, "PATH": search_path()}
        ended = process.run(
            command,
            stdout=build.messages,
            stderr=build.progress,
            cwd=package,
            env=env,
            signal_group=True,
        )
        return build.finish(ended)

    def _prepare(self, root: Path) -> Path:
        """Makes the package, by `brigade new`, unless it is there."""
        brigade = find_brigade()
        cuda = "cuda" in self.features and not any(os.environ.get(name) for name in _LIBTORCH)
        made_with = {
            "brigade": [str(brigade), brigade.stat().st_mtime_ns],
            "checkout": str(self.checkout),
            "cuda": cuda,
            **{name: os.environ.get(name) for name in _LIBTORCH},
        }
        key = hashlib.sha256(f"{self.checkout} {cuda}".encode()).hexdigest()[:12]
        package = root / key / "cell"
        stamp = root / key / "made.json"
        if stamp.exists() and json.loads(stamp.read_text()) == made_with:
            return package
        # The versions of other crates stay, so that they need not be compiled again.
        lock = package / "Cargo.lock"
        versions = lock.read_bytes() if lock.exists() else None
        shutil.rmtree(root / key, ignore_errors=True)
        (root / key).mkdir()
        command = [brigade, "new", package, "--template", "single"]
        if self.checkout:
            command += ["--brigade", self.checkout]
        if cuda:
            command.append("--cuda")
        ended = process.run(
            command,
            stdout=lambda _: None,
            stderr=process.to_stderr,
            env={**os.environ, "PATH": search_path()},
            signal_group=True,
        )
        if ended.interrupted:
            raise Interrupted("the preparation of the build was stopped")
        if ended.code != 0:
            raise CompileError("`brigade new` could not make a package; its message is above")
        if versions is not None:
            lock.write_bytes(versions)
        # Last: a package without it is made anew.
        stamp.write_text(json.dumps(made_with))
        return package


def cache_folder() -> Path:
    """Returns the folder with the packages, what they were compiled with, and running programs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Without links, as cargo names its files.
    return Path(cache, "brigade/notebooks/python").resolve()


def _write(path: Path, text: str) -> None:
    """Writes a file unless it has this content: cargo compiles what has a later time."""
    if path.read_text() != text:
        path.write_text(text)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process has the lock, which ends with a process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process.to_stderr("waiting for the build of another notebook\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_RUN = "run-"


@contextmanager
def _folder_of_run(root: Path) -> Iterator[Path]:
    """Makes a folder that is locked as long as this process uses it."""
    with tempfile.TemporaryDirectory(prefix=_RUN, dir=root) as name:
        descriptor = os.open(name, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_folders_of_killed_runs(root: Path) -> None:
    for folder in root.glob(f"{_RUN}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)

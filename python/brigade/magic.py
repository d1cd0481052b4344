"""The cell magic `%%brigade`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from brigade.cell import Package
from brigade.curves import Curves
from brigade.job import run_job


def register(shell: InteractiveShell) -> None:
    """Adds `%%brigade` to a shell."""

    def brigade(line: str, cell: str) -> None:
        """Build the Rust of this cell, and launch it on several processes.

        %%brigade [--nproc N] [OPTION of brigade launch ...] [--features NAME,...] [--debug]
                  [--brigade FOLDER] [--out NAME] [-- ARGUMENT ...]

        A cell without `fn main` is the body of one, with `brigade::prelude` imported, in which `?`
        works. The first cell compiles Brigade, which takes minutes; later ones take seconds.
        Interrupting the cell stops the ranks. The curves of what the program logs with the trackers
        JsonLines and Csv in the folder `runs` are shown while it runs.

        --nproc N        ranks; further options of `brigade launch` as on its command line, those
                         with a value as NAME=VALUE or NAME VALUE
        --features LIST  features of the crate brigade: vision, learn, text, parquet, hub, cuda
        --debug          build without optimizations
        --brigade FOLDER checkout of Brigade to build with; by default that of the program
                         `brigade`, else the release on crates.io
        --out NAME       variable for the run: `run.code`, `run.events`, `run.curves`
        -- ARGUMENT ...  arguments of the program
        """
        options = parse(line)
        show = _live() if getattr(shell, "kernel", None) else None
        with options.package.built(cell) as program:
            run = run_job(options.launch, [str(program), *options.arguments], show=show)
        if options.out:
            shell.user_ns[options.out] = run

    shell.register_magic_function(brigade, magic_kind="cell", magic_name="brigade")


@dataclass(frozen=True)
class Options:
    """What the line of the magic says."""

    package: Package
    launch: list[str]
    """Options of `brigade launch`."""
    arguments: list[str]
    """Arguments of the program."""
    out: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%brigade: {message}; %%brigade? describes the options")


def parse(line: str) -> Options:
    """Reads the line of the magic. Raises `UsageError`."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--features", default="")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--brigade", type=_checkout)
    parser.add_argument("--out")
    try:
        words = shlex.split(line)
    except ValueError as error:
        parser.error(str(error))
    at = words.index("--") if "--" in words else len(words)
    own, launch = parser.parse_known_args(words[:at])
    if own.out is not None and not own.out.isidentifier():
        parser.error(f"--out {own.out}: expected the name of a variable")
    features = [name for name in re.split(r"[, ]+", own.features) if name]
    package = Package(sorted(set(features)), own.brigade, own.debug)
    return Options(package, launch, words[at + 1 :], own.out)


def _checkout(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _live() -> Callable[[Curves], None]:
    """Shows curves in one place of the cell, where later ones replace earlier ones."""
    handle = None

    def show(curves: Curves) -> None:
        nonlocal handle
        if handle is None:
            handle = display(curves, display_id=True)
        else:
            handle.update(curves)

    return show

"""What can go wrong, in messages that a notebook shows without a traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brigade.job import Run


class _Short:
    """Makes IPython show the message alone: the traceback leads through this package."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class BrigadeError(_Short, Exception):
    """Any error of this package."""


class NotInstalled(BrigadeError):
    """The program `brigade` or cargo is missing."""


class CompileError(BrigadeError):
    """The Rust of a cell could not be built."""


class LaunchError(BrigadeError):
    """The ranks could not be started, or one of them failed.

    `run` is what is known of the run, `rank` the number of the rank that failed first.
    """

    def __init__(self, message: str, run: Run, rank: int | None = None) -> None:
        super().__init__(message)
        self.run = run
        self.rank = rank


class Interrupted(_Short, KeyboardInterrupt):
    """SIGINT, or the notebook's interrupt, has stopped what was running."""

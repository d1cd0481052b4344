"""Brigade for Python: Rust cells and built programs, launched on several processes.

In a notebook, `%load_ext brigade` brings the magic `%%brigade`; `brigade.launch` works anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brigade.curves import Curves
from brigade.errors import BrigadeError, CompileError, Interrupted, LaunchError, NotInstalled
from brigade.job import Run, launch

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"
__all__ = [
    "BrigadeError",
    "CompileError",
    "Curves",
    "Interrupted",
    "LaunchError",
    "NotInstalled",
    "Run",
    "launch",
]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Adds `%%brigade`; IPython calls it for `%load_ext brigade`."""
    from brigade.magic import register

    register(shell)

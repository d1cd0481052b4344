"""A child process whose output is handled as it comes, and which interrupts reach."""

from __future__ import annotations

import codecs
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

TextHandler = Callable[[str], None]
"""Takes a piece of text, which may end anywhere."""

# Seconds between two calls of `idle`.
_TICK = 0.5


@dataclass(frozen=True)
class Ended:
    """How a child process has ended."""

    code: int
    """Its exit code, or the negative number of the signal that ended it."""
    interrupted: bool
    """Whether a SIGINT came meanwhile."""


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    stdout: TextHandler,
    stderr: TextHandler,
    idle: Callable[[], None] = lambda: None,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    signal_group: bool = False,
) -> Ended:
    """Runs a command to its end, and hands its output on as it comes.

    A SIGINT does not raise `KeyboardInterrupt` meanwhile, but goes to the command, each time that
    one comes, or with `signal_group` to all that the command has started as well. `idle` is called
    now and then. Where one of the functions raises, the command is ended by SIGTERM.
    """
    process: subprocess.Popen[bytes] | None = None
    interrupted = False

    def pass_on() -> None:
        if process is not None and process.poll() is None:
            send = os.killpg if signal_group else os.kill
            send(process.pid, signal.SIGINT)

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        pass_on()

    with _handling_sigint(interrupt):
        # A session of its own: a terminal, and Jupyter, would send SIGINT to it a second time.
        process = subprocess.Popen(
            [os.fspath(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        if interrupted:
            pass_on()
        with process:
            try:
                _read(process, stdout, stderr, idle)
                return Ended(process.wait(), interrupted)
            finally:
                if process.poll() is None:
                    process.terminate()


def _read(
    process: subprocess.Popen[bytes],
    stdout: TextHandler,
    stderr: TextHandler,
    idle: Callable[[], None],
) -> None:
    with selectors.DefaultSelector() as selector:
        for pipe, handler in ((process.stdout, stdout), (process.stderr, stderr)):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(pipe, selectors.EVENT_READ, (decoder, handler))
        while selector.get_map():
            for key, _ in selector.select(_TICK):
                decoder, handler = key.data
                data = os.read(key.fd, 1 << 16)
                if text := decoder.decode(data, final=not data):
                    handler(text)
                if not data:
                    selector.unregister(key.fileobj)
            idle()


@contextmanager
def _handling_sigint(handler: Callable[..., None]) -> Iterator[None]:
    """Handles SIGINT in the main thread; no other thread can, and none is interrupted by it."""
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def to_stdout(text: str) -> None:
    """Writes to Python's standard output, in a notebook to the cell."""
    sys.stdout.write(text)
    sys.stdout.flush()


def to_stderr(text: str) -> None:
    """Writes to Python's standard error, in a notebook to the cell."""
    sys.stderr.write(text)
    sys.stderr.flush()

"""What cargo says while it builds a cell: progress, the compiler's messages, the program."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from brigade.errors import CompileError, Interrupted
from brigade.process import Ended, to_stderr, to_stdout

# Seconds between two lines of progress, which stay in a saved notebook.
_PROGRESS_EVERY = 1.0
_WIDTH = 78


class Build:
    """Takes the output of `cargo build`, shows what concerns the user, and finds the program."""

    OPTIONS: ClassVar = ["--message-format=json-diagnostic-rendered-ansi"]
    VARIABLES: ClassVar = {
        "CARGO_TERM_COLOR": "never",
        "CARGO_TERM_PROGRESS_WHEN": "always",
        "CARGO_TERM_PROGRESS_WIDTH": "120",
    }

    def __init__(self, source: Path) -> None:
        self._source = source
        self._half = ""
        self._errors = 0
        self._executable: Path | None = None
        self._told = ""
        self._began = self._shown = time.monotonic()
        self._has_line = False

    def messages(self, text: str) -> None:
        """Takes a piece of cargo's standard output, which is JSON lines."""
        *lines, self._half = (self._half + text).split("\n")
        for line in lines:
            # Programs that cargo runs may print there, too.
            if line.startswith("{"):
                self._message(json.loads(line))

    def _message(self, message: dict[str, Any]) -> None:
        ours = message.get("target", {}).get("src_path") == str(self._source)
        if message["reason"] == "compiler-artifact" and ours:
            self._executable = Path(message["executable"])
        if message["reason"] == "compiler-message":
            said = message["message"]
            is_error = said["level"].startswith("error")
            self._errors += is_error and bool(said["spans"] or said["code"])
            if ours or is_error:
                self._clear()
                to_stderr(said["rendered"].replace("src/main.rs", "cell"))

    def progress(self, text: str) -> None:
        """Takes a piece of cargo's standard error: the state of a progress bar, and lines."""
        self._told += text
        states = re.findall(r"Building \[[^]]*\] (\d+/\d+)(?:: ([^\r\n]*))?", text)
        now = time.monotonic()
        if states and now - self._shown >= _PROGRESS_EVERY:
            count, names = states[-1]
            line = f"Building {count}: {names.strip()}"
            to_stdout("\r" + line[:_WIDTH].ljust(_WIDTH))
            self._shown, self._has_line = now, True

    def _clear(self) -> None:
        """Takes the line of progress away."""
        if self._has_line:
            to_stdout("\r" + " " * _WIDTH + "\r")
            self._has_line = False

    def finish(self, ended: Ended) -> Path:
        """Returns the program, once cargo has ended. Raises `CompileError` and `Interrupted`."""
        self._clear()
        if ended.interrupted:
            raise Interrupted("the build was stopped")
        if ended.code != 0 or self._executable is None:
            self._fail()
        to_stdout(f"Built in {time.monotonic() - self._began:.1f} s.\n")
        return self._executable

    def _fail(self) -> NoReturn:
        if self._errors:
            count = "1 error" if self._errors == 1 else f"{self._errors} errors"
            raise CompileError(f"the cell does not compile: {count}, shown above")
        lines = re.split(r"[\r\n]+", self._told)
        noise = re.compile(r"\s*((Building|Fetch) \[|(Adding|Compiling|Download|Locking|Updating))")
        to_stderr(
            "\n".join(line for line in lines if line.strip() and not noise.match(line)) + "\n"
        )
        raise CompileError("cargo could not build the cell; its message is above")

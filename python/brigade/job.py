"""Launching a program as ranks: `brigade.launch`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brigade import process
from brigade.curves import Curves, Watch
from brigade.errors import Interrupted, LaunchError
from brigade.programs import find_brigade, search_path

# Seconds between two looks at what a running program has logged.
_CURVES_EVERY = 2.0


@dataclass(frozen=True)
class Run:
    """A run that has ended; in a notebook, shown as the curves that it has logged, if any."""

    code: int
    """The launcher's exit code: 0, or that of the rank that failed first."""
    events: list[dict[str, Any]]
    """What happened to the job, in the format of `docs/events.md`."""
    curves: Curves
    """What the program has logged with the trackers `JsonLines` or `Csv`."""
    seconds: float
    """How long it took."""

    def __repr__(self) -> str:
        ranks = len({event["rank"] for event in self.events if event["event"] == "start"})
        curves = f", {self.curves!r}" if self.curves else ""
        return f"Run(ranks={ranks}, code={self.code}, seconds={self.seconds:.1f}{curves})"

    def _repr_html_(self) -> str | None:
        return self.curves._repr_html_()


def launch(
    program: str | os.PathLike[str],
    args: Sequence[object] = (),
    nproc: int | str | None = 2,
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    runs: str | os.PathLike[str] = "runs",
    quiet: bool = False,
    **options: object,
) -> Run:
    """Runs a program that is already built as several ranks, as `brigade launch` does.

    What the ranks print appears as it comes. SIGINT, or interrupting the cell, stops them; when
    this process is killed they are, too.

    Args:
        program: a path, a name that is looked up in `PATH`, or a Python script.
        args: its arguments.
        nproc: ranks per host: a number, `"gpu"`, `"cpu"` or `"auto"`; `None` leaves it to the
            settings of `brigade launch`.
        cwd: folder to run in.
        env: variables for the ranks, besides those of this process.
        runs: folder, from `cwd`, in which the program's trackers write.
        quiet: leave out what the launcher says, unless the job fails.
        **options: further options of `brigade launch`, with `_` for `-`: `max_restarts=3`,
            `mixed_precision="bf16"`, `cpu=True`, `hosts=["node1:4", "node2:4"]`.

    Raises:
        LaunchError: a rank failed, with its message, or the ranks could not be started.
        Interrupted: a `KeyboardInterrupt`; the ranks were stopped.
        NotInstalled: there is no program `brigade`.
    """
    given = {"nproc": nproc, "quiet": quiet or None, **options}
    words = [os.fspath(program), *map(str, args)]
    return run_job(flags(given), words, cwd=cwd, env=env, runs=runs)


def flags(options: Mapping[str, object]) -> list[str]:
    """Turns keywords into the options of a command line.

    >>> flags({"nproc": 2, "cpu": True, "sync": False, "devices": [0, 2], "config": None})
    ['--nproc=2', '--cpu', '--no-sync', '--devices=0,2']
    """
    words = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, (list, tuple)):
            words.append(f"--{name}={','.join(map(str, value))}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def run_job(
    options: Sequence[str],
    words: Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    runs: str | os.PathLike[str] = "runs",
    show: Callable[[Curves], None] | None = None,
) -> Run:
    """Launches a program with its arguments (`words`), and waits for its end.

    `show` is called with the curves whenever there are new ones while the program runs, and at its
    end. Raises what `launch` does.
    """
    brigade = find_brigade()
    watch = Watch(Path(cwd or ".", runs), brigade)
    looked = time.monotonic()

    def idle() -> None:
        nonlocal looked
        if show and time.monotonic() - looked > _CURVES_EVERY:
            if watch.changed() and (curves := watch.curves()):
                show(curves)
            looked = time.monotonic()

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="brigade-") as folder:
        events = Path(folder, "events.jsonl")
        # `brigade launch` that ends with this process, whatever ends it.
        command = [brigade, "notebook-agent", "--parent", str(os.getpid())]
        ended = process.run(
            [*command, "--events", events, *options, "--", *words],
            stdout=process.to_stdout,
            stderr=process.to_stderr,
            idle=idle,
            cwd=cwd,
            env={**os.environ, "PATH": search_path(), **(env or {})},
        )
        told = _read(events)
    run = Run(ended.code, told, watch.curves(), time.monotonic() - began)
    if show and run.curves:
        show(run.curves)
    if ended.interrupted:
        raise Interrupted("the ranks were stopped")
    if ended.code != 0:
        raise _failure(run)
    return run


def _read(events: Path) -> list[dict[str, Any]]:
    if not events.exists():
        return []
    # A line without an end is not whole.
    *lines, _half = events.read_text().split("\n")
    return [json.loads(line) for line in lines]


def _failure(run: Run) -> LaunchError:
    causes = [event for event in run.events if event["event"] == "cause"]
    if not causes:
        ended = f"signal {-run.code}" if run.code < 0 else f"exit code {run.code}"
        return LaunchError(f"`brigade launch` ended with {ended}; its message is above", run)
    cause = causes[-1]
    detail = (cause.get("error") or "\n".join(cause.get("last_lines", []))).strip()
    message = f"{cause['message']}: {detail}" if detail else cause["message"]
    return LaunchError(message, run, cause.get("rank"))

"""The curves of runs: what programs log with Brigade's trackers `JsonLines` and `Csv`."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Point = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True)
class Curves:
    """The numbers that runs have logged; in a notebook, shown as charts."""

    values: dict[str, dict[str, list[Point]]] = field(default_factory=dict)
    """By project and name: steps and values. Values without a step are counted from 1."""
    charts: dict[str, list[str]] = field(default_factory=dict)
    """By project: pictures as SVG."""

    def __bool__(self) -> bool:
        return bool(self.values)

    def __getitem__(self, project: str) -> dict[str, list[Point]]:
        return self.values[project]

    def __repr__(self) -> str:
        projects = (f"{project}: {', '.join(names)}" for project, names in self.values.items())
        return f"Curves({'; '.join(projects)})"

    def _repr_html_(self) -> str | None:
        charts = {project: pictures for project, pictures in self.charts.items() if pictures}
        if not charts:
            return None
        parts = []
        for project, pictures in charts.items():
            if len(charts) > 1:
                parts.append(f"<h4>{html.escape(project)}</h4>")
            parts.append('<div style="display: flex; flex-wrap: wrap; gap: 8px">')
            parts += [*pictures, "</div>"]
        return "\n".join(parts)


class Watch:
    """A folder of runs, of which only what is logged from now on counts."""

    def __init__(self, folder: Path, brigade: Path) -> None:
        self._folder = folder
        self._brigade = brigade
        self._before = {path: _whole_lines(path) for path in self._files()}
        self._seen = self._state()

    def changed(self) -> bool:
        """Tells whether anything was logged since the last call."""
        state = self._state()
        changed = state != self._seen
        self._seen = state
        return changed

    def curves(self) -> Curves:
        """Reads what was logged, and draws it by `brigade report`."""
        curves = Curves()
        for path in self._files():
            lines = _lines(path, self._before.get(path, 0))
            values = _values(lines)
            # Of a project that is logged by both trackers, JSON lines come first.
            if values and path.stem not in curves.values:
                curves.values[path.stem] = values
                curves.charts[path.stem] = self._draw(path.stem, lines)
        return curves

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl")) + sorted(self._folder.glob("*.csv"))

    def _state(self) -> list[tuple[Path, int, int]]:
        state = []
        for path in self._files():
            found = path.stat()
            state.append((path, found.st_size, found.st_mtime_ns))
        return state

    def _draw(self, project: str, lines: list[bytes]) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="brigade-") as folder:
            run, page = Path(folder, f"{project}.jsonl"), Path(folder, "page.html")
            run.write_bytes(b"".join(line + b"\n" for line in lines))
            command = [self._brigade, "report", run, "--output", page]
            made = subprocess.run(command, capture_output=True, start_new_session=True)
            text = page.read_text() if made.returncode == 0 else ""
        return re.findall(r"<svg .*?</svg>", text, re.DOTALL)


def _whole_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def _lines(path: Path, before: int) -> list[bytes]:
    """Returns the whole lines after the first ones, as JSON; all of a file that was made anew."""
    *lines, _half = path.read_bytes().split(b"\n")
    if len(lines) < before:
        before = 0
    if path.suffix == ".csv":
        return [json.dumps(row).encode() for row in _rows(lines, before)]
    return lines[before:]


def _rows(lines: list[bytes], before: int) -> Iterator[dict[str, float | str]]:
    reader = csv.reader(os.fsdecode(line) for line in lines)
    columns = next(reader, [])
    # Other tables lie in the folder, too.
    if columns[:2] != ["_step", "_time"]:
        return
    for number, row in enumerate(reader, start=1):
        if number >= before:
            yield {name: _cell(text) for name, text in zip(columns, row, strict=False) if text}


def _cell(text: str) -> float | str:
    """Reads a cell, as it would stand in JSON lines, where non-finite numbers are words."""
    if text in _NON_FINITE:
        return _NON_FINITE[text]
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text


_NON_FINITE = {"NaN": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _values(lines: list[bytes]) -> dict[str, list[Point]]:
    values: dict[str, list[Point]] = {}
    for line in lines:
        try:
            logged = json.loads(line)
        except ValueError:
            continue
        if not isinstance(logged, dict) or "_event" in logged:
            continue
        for name, value in logged.items():
            if value in _NON_FINITE.values():
                value = float(value)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and name not in ("_step", "_time"):
                points = values.setdefault(name, [])
                points.append((logged.get("_step", len(points) + 1), value))
    return values

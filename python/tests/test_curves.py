"""Curves of what programs log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import brigade
from brigade.curves import Curves, Watch
from brigade.programs import find_brigade
from tests.support import TestCase, captured


def _line(**values: object) -> str:
    return json.dumps(values) + "\n"


class WhatWasLogged(TestCase):
    """Files of trackers, and what is read of them."""

    def setUp(self) -> None:
        super().setUp()
        self.runs = Path("runs")
        self.runs.mkdir()

    def test_only_new_lines_count(self) -> None:
        run = self.runs / "digits.jsonl"
        # A killed run has left half a line, which the next one cuts off.
        run.write_text(_line(_step=1, loss=9.0) + '{"_step":2,"lo')
        watch = Watch(self.runs, find_brigade())
        self.assertFalse(watch.changed())
        self.assertFalse(watch.curves())
        started = _line(_event="start", _time=1.0, _project="digits", _config={"lr": 0.1})
        lines = [
            _line(_step=10, _time=1.0, loss=0.5, note="text", flag=True),
            _line(_step=20, _time=2.0, loss="NaN", accuracy=1),
            _line(_step=30, _time=3.0, loss=0.25, accuracy=2),
        ]
        run.write_text(_line(_step=1, loss=9.0) + started + "".join(lines) + '{"_step":40,"loss":1')
        self.assertTrue(watch.changed())
        self.assertFalse(watch.changed())
        curves = watch.curves()
        losses = curves["digits"]["loss"]
        self.assertEqual([losses[0], losses[2], len(losses)], [(10, 0.5), (30, 0.25), 3])
        self.assertTrue(math.isnan(losses[1][1]))
        self.assertEqual(curves["digits"]["accuracy"], [(20, 1), (30, 2)])
        self.assertEqual(list(curves["digits"]), ["loss", "accuracy"])
        self.assertEqual(repr(curves), "Curves(digits: loss, accuracy)")
        shown = curves._repr_html_()
        self.assertEqual(shown.count("<svg "), 2)
        self.assertIn(">accuracy</text>", shown)

    def test_a_run_that_begins_anew(self) -> None:
        run = self.runs / "a.jsonl"
        run.write_text(_line(loss=1.0) * 5)
        watch = Watch(self.runs, find_brigade())
        run.write_text(_line(loss=2.0) + _line(loss=3.0))
        self.assertEqual(watch.curves()["a"]["loss"], [(1, 2.0), (2, 3.0)])

    def test_csv(self) -> None:
        table = self.runs / "a.csv"
        table.write_text("_step,_time,loss\n1,1.5,0.5\n")
        (self.runs / "a.config.csv").write_text("name,value\n")
        watch = Watch(self.runs, find_brigade())
        # A name that came later has made a column.
        table.write_text("_step,_time,loss,word\n1,1.5,0.5,\n2,2.5,inf,x\n3,3.5,0.25,\n")
        (self.runs / "a.config.csv").write_text("name,value\nlr,0.1\n")
        curves = watch.curves()
        self.assertEqual(curves.values, {"a": {"loss": [(2, math.inf), (3, 0.25)]}})
        self.assertEqual(len(curves.charts["a"]), 1)
        # Of both trackers, JSON lines come first.
        (self.runs / "a.jsonl").write_text(_line(_step=7, loss=0.125))
        self.assertEqual(watch.curves().values, {"a": {"loss": [(7, 0.125)]}})

    def test_several_projects_are_named(self) -> None:
        watch = Watch(self.runs, find_brigade())
        for name in ("a", "b<"):
            (self.runs / f"{name}.jsonl").write_text(_line(loss=1.0) + _line(loss=2.0))
        shown = watch.curves()._repr_html_()
        self.assertIn("<h4>b&lt;</h4>", shown)
        # A single value is no curve, and a run without curves shows nothing.
        self.assertIsNone(Curves({"a": {"loss": [(1, 2.0)]}}, {"a": []})._repr_html_())

    def test_a_folder_that_the_run_makes(self) -> None:
        log = _line(_step=1, loss=1.0) + _line(_step=2, loss=0.5)
        script = f"test $RANK = 0 || exit 0; mkdir logs; printf %s '{log}' > logs/a.jsonl"
        (self.folder / "inside").mkdir()
        with captured():
            run = brigade.launch("sh", ["-c", script], cwd="inside", runs="logs")
        self.assertEqual(run.curves["a"]["loss"], [(1, 1.0), (2, 0.5)])
        self.assertIn("<svg ", run._repr_html_())
        self.assertIn("Curves(a: loss)", repr(run))

"""`brigade.launch` with the real launcher and small shell programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import unittest
from pathlib import Path

import brigade
from brigade.job import flags
from brigade.programs import find_brigade
from tests.support import TestCase, captured, is_alive, until

# Says that it runs, in a file with its number, and stays.
_STAYS = "echo $$ > rank.$RANK; mv rank.$RANK pid.$RANK; echo running $RANK; exec sleep 600"


class Launch(TestCase):
    """Launches in this process."""

    def test_output_events_and_code(self) -> None:
        with captured() as (out, err):
            script = 'echo "$1 $2 of $WORLD_SIZE $WORD"; echo also >&2'
            run = brigade.launch("sh", ["-c", script, "sh", "a b", 3], env={"WORD": "word"})
        self.assertEqual(
            sorted(out.getvalue().splitlines()), ["[0] a b 3 of 2 word", "[1] a b 3 of 2 word"]
        )
        self.assertIn("[1] also\n", err.getvalue())
        self.assertEqual(run.code, 0)
        ranks = [event["rank"] for event in run.events if event["event"] == "start"]
        self.assertEqual((sorted(ranks), run.events[-1]["event"]), ([0, 1], "end"))
        self.assertRegex(repr(run), r"^Run\(ranks=2, code=0, seconds=\d+\.\d\)$")
        self.assertIsNone(run._repr_html_())

    def test_the_working_folder_and_options(self) -> None:
        (self.folder / "inside").mkdir()
        with captured() as (out, _):
            brigade.launch("pwd", nproc=1, cwd="inside", prefix="<${rank}> ", raw=False)
        self.assertEqual(out.getvalue(), f"<0> {self.folder}/inside\n")
        options = {"max_restarts": 3, "cpu": True, "sync": False, "devices": [0, 2], "config": None}
        expected = ["--max-restarts=3", "--cpu", "--no-sync", "--devices=0,2"]
        self.assertEqual(flags(options), expected)

    def test_the_message_of_the_rank_that_failed(self) -> None:
        script = "test $RANK = 0 && exec sleep 600; echo no data >&2; exit 3"
        with captured(), self.assertRaises(brigade.LaunchError) as caught:
            brigade.launch("sh", ["-c", script])
        error = caught.exception
        self.assertRegex(str(error), r"^rank 1 on .* failed: exit code 3: no data$")
        self.assertEqual((error.rank, error.run.code), (1, 3))
        self.assertEqual(error._render_traceback_(), [f"LaunchError: {error}"])
        # Of a rank that has left an error, that is the message.
        script = """echo '{"message": "loss is NaN"}' > $TORCHELASTIC_ERROR_FILE; exit 1"""
        with captured(), self.assertRaisesRegex(brigade.LaunchError, "loss is NaN"):
            brigade.launch("sh", ["-c", script], nproc=1)

    def test_what_the_launcher_refuses(self) -> None:
        with captured() as (_, err), self.assertRaises(brigade.LaunchError) as caught:
            brigade.launch("true", nproc="many")
        message = "`brigade launch` ended with exit code 2; its message is above"
        self.assertEqual(str(caught.exception), message)
        self.assertIn("many", err.getvalue())

    def test_a_missing_launcher(self) -> None:
        os.environ["BRIGADE_PROGRAM"] = "nothing"
        with self.assertRaisesRegex(brigade.NotInstalled, "^BRIGADE_PROGRAM is nothing, which is"):
            brigade.launch("true")
        del os.environ["BRIGADE_PROGRAM"]
        os.environ["PATH"] = os.environ["CARGO_HOME"] = str(self.folder)
        with self.assertRaisesRegex(brigade.NotInstalled, "no program `brigade` in .*: build it"):
            brigade.launch("true")

    def test_the_launcher_is_found(self) -> None:
        os.environ.pop("BRIGADE_PROGRAM", None)
        os.environ["CARGO_HOME"] = str(self.folder)
        for folder in ("bin", "path"):
            (self.folder / folder).mkdir()
            (self.folder / folder / "brigade").touch(0o755)
        os.environ["PATH"] = str(self.folder / "path")
        self.assertEqual(find_brigade(), self.folder / "path/brigade")
        os.environ["PATH"] = str(self.folder)
        self.assertEqual(find_brigade(), self.folder / "bin/brigade")

    def test_output_that_cannot_be_written_ends_the_ranks(self) -> None:
        class Closed:
            def write(self, _: str) -> None:
                raise BrokenPipeError

        with unittest.mock.patch("sys.stdout", Closed()), self.assertRaises(BrokenPipeError):
            brigade.launch("sh", ["-c", _STAYS])
        for pid in self.folder.glob("pid.*"):
            until(lambda pid=pid: not is_alive(int(pid.read_text())))

    def test_another_thread_than_the_main_one(self) -> None:
        runs = []
        with captured() as (out, _):
            thread = threading.Thread(
                target=lambda: runs.append(brigade.launch("echo", ["hello"], nproc=1, raw=False))
            )
            thread.start()
            thread.join()
        self.assertEqual((out.getvalue(), runs[0].code), ("[0] hello\n", 0))


class Stopped(TestCase):
    """Launches in a Python of its own, which is interrupted or killed."""

    def start(self, script: str) -> tuple[subprocess.Popen[str], list[int]]:
        """Starts a program that launches ranks; returns it and the ranks, which run."""
        process = subprocess.Popen(
            [sys.executable, "-c", script, _STAYS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What a Python that is killed leaves goes with the test's folder.
            env={**os.environ, "TMPDIR": str(self.folder)},
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        files = [self.folder / f"pid.{rank}" for rank in (0, 1)]
        until(lambda: all(file.exists() for file in files))
        return process, [int(file.read_text()) for file in files]

    def test_an_interrupt_ends_the_ranks_and_python_lives(self) -> None:
        script = (
            "import brigade, sys\n"
            "try: brigade.launch('sh', ['-c', sys.argv[1]])\n"
            "except KeyboardInterrupt as error: print(error._render_traceback_())\n"
            "print(brigade.launch('echo', ['again'], nproc=1, raw=False).code)\n"
        )
        process, ranks = self.start(script)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        self.assertEqual([rank for rank in ranks if is_alive(rank)], [])
        self.assertTrue(
            out.endswith("['Interrupted: the ranks were stopped']\n[0] again\n0\n"), out
        )
        self.assertEqual(process.returncode, 0, err)
        self.assertNotIn("Traceback", err)

    def test_a_killed_python_leaves_no_rank(self) -> None:
        script = "import brigade, sys; brigade.launch('sh', ['-c', sys.argv[1]])"
        process, ranks = self.start(script)
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        launchers = [int(pid) for task in tasks for pid in task.read_text().split()]
        process.kill()
        # The launcher, too, which writes into the test's folder.
        until(lambda: not any(map(is_alive, ranks + launchers)))

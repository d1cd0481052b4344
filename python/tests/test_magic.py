"""`%%brigade` in IPython, and interrupts in a kernel."""

from __future__ import annotations

import unittest

from tests.support import TestCase, captured, is_alive, until

try:
    from IPython.core.error import UsageError
    from IPython.core.interactiveshell import InteractiveShell
    from jupyter_client.manager import start_new_kernel

    from brigade.magic import parse
except ImportError:
    raise unittest.SkipTest("IPython or ipykernel is missing") from None


class Line(TestCase):
    """The line of the magic."""

    def test_own_options_and_those_of_the_launcher(self) -> None:
        options = parse(
            "--nproc 2 --features vision,learn --log-dir 'a b' --debug --out run --brigade ../b "
            "--max-restarts=3 -- --epochs 4 -- --debug"
        )
        self.assertEqual(options.launch, ["--nproc", "2", "--log-dir", "a b", "--max-restarts=3"])
        self.assertEqual(options.arguments, ["--epochs", "4", "--", "--debug"])
        package = options.package
        self.assertEqual((package.features, package.debug), (["learn", "vision"], True))
        self.assertEqual((package.checkout.name, options.out), ("b", "run"))
        self.assertEqual(parse("").launch, [])

    def test_mistakes(self) -> None:
        for line, message in [
            ("--features", "expected one argument"),
            ("--out a-b", "the name of a variable"),
            ("--nproc '2", "No closing quotation"),
        ]:
            with self.assertRaisesRegex(UsageError, f"^%%brigade: .*{message}.*; %%brigade\\? "):
                parse(line)


class Cell(TestCase):
    """Cells, with a stand-in for cargo and the real launcher."""

    def setUp(self) -> None:
        super().setUp()
        self.use_stand_ins()
        self.shell = InteractiveShell()
        self.addCleanup(self.shell.history_manager.end_session)
        self.run_cell("%load_ext brigade")

    def run_cell(self, cell: str):
        with captured() as (out, err):
            result = self.shell.run_cell(cell)
        return result, out.getvalue(), err.getvalue()

    def test_a_cell_runs_on_two_ranks(self) -> None:
        cell = '%%brigade --nproc {n} --out run -- $word\n//$ echo "$RANK of $WORLD_SIZE: $@"\n'
        self.shell.user_ns.update(n=2, word="hello")
        result, out, _ = self.run_cell(cell)
        result.raise_error()
        self.assertIn("[0] 0 of 2: hello\n", out)
        self.assertIn("[1] 1 of 2: hello\n", out)
        self.assertEqual(self.shell.user_ns["run"].code, 0)

    def test_errors_have_no_traceback(self) -> None:
        for line, message in [("exit 3", "failed: exit code 3"), ("// wrong", "does not compile")]:
            result, out, err = self.run_cell(f"%%brigade --nproc 1 --no-raw\n//$ {line}\n")
            self.assertIn(message, str(result.error_in_exec))
            self.assertRegex(out, f"(?m)^(LaunchError|CompileError): .*{message}")
            self.assertNotIn("Traceback", out + err)
        result, _, err = self.run_cell("%%brigade --out 1\n//$ true\n")
        self.assertIn("UsageError: %%brigade: --out 1: expected", err)


class Kernel(TestCase):
    """A kernel, as Jupyter starts it."""

    def setUp(self) -> None:
        super().setUp()
        self.use_stand_ins()
        self.manager, self.client = start_new_kernel(cwd=str(self.folder))
        self.addCleanup(self.manager.shutdown_kernel, now=True)
        self.addCleanup(self.client.stop_channels)

    def outputs(self, cell: str) -> tuple[str, list[dict]]:
        """Runs a cell; returns its status, and what it displays."""
        shown: list[dict] = []
        reply = self.client.execute_interactive(cell, output_hook=shown.append, timeout=60)
        return reply["content"]["status"], shown

    def test_curves_are_shown_and_replaced(self) -> None:
        self.assertEqual(self.outputs("%load_ext brigade")[0], "ok")
        # It goes on when the first curves are shown: the test has seen them.
        cell = (
            "%%brigade --nproc 1 --no-raw\n"
            '//$ mkdir runs; for i in 1 2; do echo "{\\"loss\\":$i}"; done > runs/a.jsonl\n'
            "//$ echo logged; until [ -e go ]; do sleep 0.01; done\n"
            "//$ echo '{\"loss\":3}' >> runs/a.jsonl\n"
        )
        shown: list[dict] = []

        def take(message: dict) -> None:
            shown.append(message)
            if message["msg_type"] == "display_data":
                (self.folder / "go").touch()

        reply = self.client.execute_interactive(cell, output_hook=take, timeout=60)
        self.assertEqual(reply["content"]["status"], "ok")
        pictures = [it for it in shown if "display_data" in it["msg_type"]]
        self.assertEqual(pictures[0]["msg_type"], "display_data")
        self.assertEqual(pictures[-1]["msg_type"], "update_display_data")
        for picture in pictures:
            self.assertIn("<svg ", picture["content"]["data"]["text/html"])
        text = "".join(it["content"]["text"] for it in shown if it["msg_type"] == "stream")
        self.assertIn(" logged\n", text)

    def test_an_interrupt_ends_the_ranks_and_the_kernel_lives(self) -> None:
        self.assertEqual(self.outputs("%load_ext brigade")[0], "ok")
        cell = "%%brigade --nproc 2\n//$ echo $$ > pid.$RANK; echo running; exec sleep 600\n"
        running = 0

        def interrupt(message: dict) -> None:
            nonlocal running
            before, running = running, running + str(message["content"]).count("running\\n")
            if before < 2 <= running:
                self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(cell, output_hook=interrupt, timeout=60)
        content = reply["content"]
        self.assertEqual((content["status"], content["ename"]), ("error", "Interrupted"))
        self.assertEqual(content["traceback"], ["Interrupted: the ranks were stopped"])
        for rank in (0, 1):
            pid = int((self.folder / f"pid.{rank}").read_text())
            until(lambda pid=pid: not is_alive(pid))
        status, shown = self.outputs("import brigade; brigade.launch('echo', ['again'], nproc=2)")
        self.assertEqual(status, "ok")
        self.assertIn("Run(ranks=2, code=0", str(shown))

"""Cells as programs: wrapping, the cache, and what cargo says, with stand-ins for the builds."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from brigade import BrigadeError, CompileError
from brigade.cell import Package, cache_folder, program
from tests.support import TestCase, captured, is_alive, until


class Wrapping(TestCase):
    """What becomes of a cell."""

    def test_a_program_stays_as_it_is(self) -> None:
        for head in ("fn main() {", "pub fn main() -> Result<()> {", "    fn  main ( ) {"):
            cell = f"use brigade::prelude::*;\n\n{head}\n}}\n"
            self.assertEqual(program(cell), f"// %%brigade\n{cell}")

    def test_a_body_is_wrapped(self) -> None:
        for body in (
            "let a = 1;",
            "for i in 0..3 {\n}",
            "a(); // done",
            "a(); /* b\n c */",
            "",
            "x\n;",
        ):
            first, *lines = program(body + "\n").splitlines()
            self.assertIn(
                "use brigade::prelude::*; fn main() -> brigade::Result<()> {", first
            )
            # Line n of the body is line n + 1 of the cell, and of the program.
            self.assertEqual("\n".join(lines), f"{body}\nOk(())\n}}")
        for body in ("Ok(())", "model.save(a)?;\nOk(()) // end;", 'save("b; // c")'):
            self.assertTrue(program(body).endswith(f"{body}\n}}\n"), body)
        self.assertIn("\nOk(())\n", program('get("http://a");'))
        self.assertIn("\nOk(())\n", program("// fn main() is not here\na();"))


class Cache(TestCase):
    """Packages, builds and programs below the cache's folder."""

    def setUp(self) -> None:
        super().setUp()
        self.use_stand_ins()

    def build(self, cell: str, package: Package | None = None) -> tuple[str, str, str]:
        """Builds and runs; returns what the program, the build and the compiler said."""
        with captured() as (out, err), (package or Package()).built(cell) as built:
            said = subprocess.run([built], capture_output=True, text=True).stdout
        self.assertFalse(built.exists())
        return said, out.getvalue(), err.getvalue()

    def test_a_package_is_made_once(self) -> None:
        said, out, err = self.build("//$ echo one")
        self.assertEqual((said, err), ("one\n", ""))
        self.assertRegex(out, r"^Built in \d+\.\d s\.\n$")
        self.assertEqual(self.build("//$ echo two\n// warn")[0], "two\n")
        (made,) = self.log_of("brigade")
        self.assertRegex(made, rf"^new {cache_folder()}/\w+/cell --template single$")
        first, second = self.log_of("cargo")
        target = cache_folder() / "target"
        self.assertTrue(first.endswith(f"--target-dir {target} --release"), first)
        self.assertEqual(first, second)
        self.assertEqual(cache_folder(), self.folder / "cache/brigade/notebooks/python")

    def test_other_settings_make_another_package(self) -> None:
        checkout = self.folder / "checkout"
        self.build("", Package(["learn", "vision"], checkout, debug=True))
        (built,) = self.log_of("cargo")
        self.assertTrue(built.endswith("/target --features brigade/learn,brigade/vision"), built)
        self.build("", Package(["cuda"]))
        os.environ["LIBTORCH"] = "elsewhere"
        self.build("", Package(["cuda"]))
        self.build("", Package(["cuda"]))
        made = [call.split(" --template single")[1] for call in self.log_of("brigade")]
        # What the user's libtorch is for says that libtorch itself.
        self.assertEqual(made, [f" --brigade {checkout}", " --cuda", ""])

    def test_a_package_of_another_brigade_keeps_its_versions(self) -> None:
        self.build("")
        (lock,) = cache_folder().glob("*/cell")
        (lock / "Cargo.lock").write_text("versions")
        os.utime(os.environ["BRIGADE_PROGRAM"], (1, 1))
        self.build("")
        self.assertEqual(len(self.log_of("brigade")), 2)
        self.assertEqual((lock / "Cargo.lock").read_text(), "versions")

    def test_an_unchanged_cell_is_not_written_again(self) -> None:
        self.build("//$ echo one")
        (source,) = cache_folder().glob("*/cell/src/main.rs")
        before = source.stat().st_mtime_ns
        self.build("//$ echo one")
        self.assertEqual(source.stat().st_mtime_ns, before)

    def test_messages_of_the_compiler_name_lines_of_the_cell(self) -> None:
        self.assertEqual(self.build("// warn")[2], "unused --> cell:3:5\n")
        with captured() as (_, err), self.assertRaises(CompileError) as caught:
            self.build_alone("// wrong")
        self.assertEqual(err.getvalue(), "mismatched --> cell:3:5\n")
        message = "the cell does not compile: 1 error, shown above"
        self.assertEqual(str(caught.exception), message)
        self.assertEqual(list(cache_folder().glob("run-*")), [])

    def build_alone(self, cell: str) -> None:
        with Package().built(cell):
            self.fail("it was built")

    def test_other_failures_of_cargo_are_shown(self) -> None:
        (self.folder / "offline").touch()
        with captured() as (_, err), self.assertRaisesRegex(CompileError, "cargo could not build"):
            self.build_alone("")
        self.assertEqual(err.getvalue(), "error: no network\n")

    def test_a_package_that_cannot_be_made(self) -> None:
        Path("bin/brigade").write_text("#!/bin/sh\nmkdir -p $2; echo no libtorch >&2; exit 1\n")
        for _ in range(2):
            with (
                captured() as (_, err),
                self.assertRaisesRegex(BrigadeError, "`brigade new` could"),
            ):
                self.build_alone("")
            self.assertEqual(err.getvalue(), "no libtorch\n")
        self.assertEqual(self.log_of("cargo"), [])

    def test_builds_wait_for_each_other(self) -> None:
        cache_folder().mkdir(parents=True)
        with (cache_folder() / "lock").open("w") as lock, captured() as (_, err):
            fcntl.flock(lock, fcntl.LOCK_EX)
            thread = threading.Thread(target=lambda: Package().built("").__enter__())
            thread.start()
            until(err.getvalue)
            self.assertEqual(err.getvalue(), "waiting for the build of another notebook\n")
            self.assertEqual(self.log_of("cargo"), [])
            fcntl.flock(lock, fcntl.LOCK_UN)
            thread.join()
        self.assertEqual(len(self.log_of("cargo")), 1)

    def test_an_interrupt_ends_the_build(self) -> None:
        script = (
            "import brigade; from brigade.cell import Package\n"
            "try: Package().built('// slow').__enter__()\n"
            "except brigade.Interrupted as error: print(error)\n"
        )
        building = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        pid = self.folder / "pid"
        until(pid.exists)
        building.send_signal(signal.SIGINT)
        out, _ = building.communicate(timeout=60)
        self.assertEqual((out, building.returncode), ("the build was stopped\n", 0))
        self.assertFalse(is_alive(int(pid.read_text())))
        self.assertEqual(list(cache_folder().glob("run-*")), [])

    def test_programs_of_killed_notebooks_are_removed(self) -> None:
        script = (
            "import os; from brigade.cell import Package\n"
            "with Package().built('//$ true'): os.kill(os.getpid(), 9)\n"
        )
        killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
        self.assertEqual(killed.returncode, -9)
        (left,) = cache_folder().glob("run-*")
        with captured(), Package().built("") as other:
            self.assertFalse(left.exists())
            # One that runs stays.
            self.build("//$ true")
            self.assertTrue(other.exists())

"""Starts the tests and benchmarks of this folder with the PyTorch of the Python that runs this program.

    python3 run.py --help
    python3 run.py --budget 480s
    python3 run.py --only nccl

The folder of a libtorch in LIBTORCH, with lib/ and version.py or build-version in it, wins.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def libtorch():
    """The folder of libtorch, and the Python that has it as a package."""
    if os.environ.get("LIBTORCH"):
        return Path(os.environ["LIBTORCH"]), None
    # Finding the package does not import it, which takes seconds.
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        sys.exit(
            f"error: {sys.executable} has no PyTorch: run this program with the Python that has it, or name "
            "the folder of a libtorch in LIBTORCH"
        )
    return Path(found.origin).parent, sys.executable


def versions(torch):
    """The versions of libtorch and of its CUDA, such as 2.11.0 and 13.0."""
    for name in ("version.py", "build-version"):
        if (torch / name).is_file():
            text = (torch / name).read_text()
            break
    else:
        sys.exit(f"error: {torch} is not a libtorch: it has neither version.py nor build-version")
    version = re.search(r"\d+\.\d+\.\d+", text)
    if version is None:
        sys.exit(f"error: {torch / name} names no version")
    cuda = re.search(r"^cuda\b.*'([\d.]+)'", text, re.MULTILINE)
    return version[0], cuda[1] if cuda else None


def main():
    torch, python = libtorch()
    version, cuda = versions(torch)
    # PyTorch's packages lie side by side with NVIDIA's.
    folders = [torch / "lib", *sorted((torch.parent / "nvidia").glob("*/lib"))]
    before = os.environ.get("LD_LIBRARY_PATH")
    # For programs in Python, whose PyTorch finds its own libraries.
    os.environ["BRIGADE_PEER_LIBRARY_PATH"] = before or ""
    os.environ["LD_LIBRARY_PATH"] = ":".join([*map(str, folders), *([before] if before else [])])
    runner = str(HERE / "bin" / "brigade-gpu")
    arguments = [runner, "run", "--folder", str(HERE), "--libtorch", version]
    if cuda:
        arguments += ["--cuda", cuda]
    if python:
        arguments += ["--python", python]
    os.execv(runner, arguments + sys.argv[1:])


main()

"""Writes accelerate_names.txt: the public names that a ported program may have used.

    python make_accelerate_names.py            # needs accelerate
"""

import inspect
from pathlib import Path

import accelerate
from accelerate import Accelerator
from accelerate import utils

PLUGINS = ("Kwargs", "Plugin", "Configuration", "Config")

names = {name for name in dir(Accelerator) if not name.startswith("_")}
names |= set(inspect.signature(Accelerator.__init__).parameters) - {"self"}
names |= {
    name
    for name in dir(accelerate)
    if not name.startswith("_") and not inspect.ismodule(getattr(accelerate, name))
}
names |= {
    name
    for name in dir(utils)
    if inspect.isclass(getattr(utils, name)) and name.endswith(PLUGINS) and "Context" not in name
}
lines = [f"# accelerate {accelerate.__version__}, by make_accelerate_names.py", *sorted(names)]
Path(__file__).with_name("accelerate_names.txt").write_text("\n".join(lines) + "\n")

"""Makes the pickles of this folder: python3 make.py FOLDER, with fastcore."""

import os
import pickle
import sys
from pathlib import Path

from fastcore.foundation import L

folder = Path(sys.argv[1])
words = ["xxunk", "xxpad", "the", "é", "▁", "xxfake", "xxfake"] + [f"w{number}" for number in range(300)]


class Runs:
    def __reduce__(self):
        return os.system, ("false",)


values = {f"list_{protocol}": (words, protocol) for protocol in (2, 3, 4, 5)}
values |= {f"fastcore_{protocol}": (L(words), protocol) for protocol in (2, 4)}
values |= {"long": (["x" * 300, "y"], 4), "tuple": (("a", "b"), 4), "empty": ([], 4)}
values |= {"protocol_0": (["a"], 0), "numbers": ([1, 2], 4), "dictionary": ({"a": 1}, 4), "runs": (Runs(), 4)}
for name, (value, protocol) in values.items():
    (folder / f"{name}.pkl").write_bytes(pickle.dumps(value, protocol=protocol))

"""torch.save or torch.load of 1 GB of weights: seconds, as JSON.

`save FOLDER [--flush] [--new]` writes FOLDER/peer.pt several times, or, with `--new`, each time under a
new name, after which the old file is removed: as Accelerate's automatic names with a total_limit do.
`load FOLDER` reads FOLDER/peer.pt as people do.
"""

import json
import os
import sys
import time

import torch

TENSORS, ELEMENTS = 64, 4_000_000  # 64 x 16 MB
ROUNDS = 3


def main():
    action, folder = sys.argv[1], sys.argv[2]
    path = os.path.join(folder, "peer.pt")
    seconds = []
    if action == "save":
        torch.manual_seed(1)
        state = {f"layer{i}.weight": torch.rand(ELEMENTS) for i in range(TENSORS)}
        new = "--new" in sys.argv
        for round in range(ROUNDS):
            os.sync()  # nothing waits for the disk when the clock starts
            start = time.perf_counter()
            older, path = path, os.path.join(folder, f"peer_{round}.pt") if new else path
            with open(path, "wb") as file:
                torch.save(state, file)
                if "--flush" in sys.argv:
                    file.flush()
                    os.fsync(file.fileno())
            if new and os.path.exists(older):
                os.remove(older)
            seconds.append(time.perf_counter() - start)
        if new:
            os.remove(path)
    else:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            state = torch.load(path)
            seconds.append(time.perf_counter() - start)
            assert len(state) == TENSORS
            del state
    print(json.dumps([seconds]))


main()

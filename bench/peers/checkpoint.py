"""torch.save or torch.load of 1 GB of weights: seconds, as JSON.

`save FOLDER [--flush]` writes FOLDER/peer.pt several times; `load FOLDER` reads it as people do.
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
        for _ in range(ROUNDS):
            start = time.perf_counter()
            with open(path, "wb") as file:
                torch.save(state, file)
                if "--flush" in sys.argv:
                    file.flush()
                    os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    else:
        for _ in range(ROUNDS):
            start = time.perf_counter()
            state = torch.load(path)
            seconds.append(time.perf_counter() - start)
            assert len(state) == TENSORS
            del state
    print(json.dumps([seconds]))


main()

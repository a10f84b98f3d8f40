"""The function that the platform calls: from positions of atoms to their energy and forces, all as JSON. See
build.py."""

import array
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # such a function gets only a fraction of a processor
began = time.perf_counter()
sys.path.insert(0, str(Path(__file__).parent))

import aot_backward_native as abn  # noqa: E402

ENERGY = abn.load(Path(__file__).parent / "forces.pt2").grad()


def handler(event: dict, context: object = None) -> dict:
    rows = event["positions"]
    flat = array.array("d", [x for row in rows for x in row])
    energy, gradient = ENERGY(memoryview(flat).cast("B").cast("d", (len(rows), 3)))
    return {
        "energy": memoryview(energy).tolist(),
        "forces": [[-g for g in row] for row in memoryview(gradient).tolist()],
    }


if __name__ == "__main__":
    answer = handler({"positions": json.loads(sys.argv[1])})
    print(json.dumps(answer))
    print(f"{1e3 * (time.perf_counter() - began):.0f} ms from the first line to the answer", file=sys.stderr)
    assert not {"numpy", "torch"} & sys.modules.keys()

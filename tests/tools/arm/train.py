"""Run by the emulated Python of __main__.py, which has aot_backward_native and no NumPy: 300 steps, saved after 200 and
resumed."""

import array
import json
import random
import sys

import aot_backward_native as abn

package, state = sys.argv[1:]
random.seed(0)
batches = [[random.uniform(-2, 2) for _ in range(128)] for _ in range(300)]


def opened() -> object:
    loaded = abn.load(package)
    loaded.seed(0)
    return loaded.step("fit")


def trained(step: object, first: int, last: int) -> list[float]:
    losses = []
    for points in batches[first:last]:
        x = memoryview(array.array("f", points)).cast("B").cast("f", (64, 2))
        y = array.array("q", [a * a + b * b > 1 for a, b in zip(points[::2], points[1::2], strict=True)])
        losses.append(memoryview(step(x, y)).cast("B").cast("f")[0])
    return losses


step = opened()
losses = trained(step, 0, 200)
step.save(state)
losses += trained(step, 200, 300)
other = opened()
other.resume(state)
print(json.dumps({"losses": losses, "resumed": trained(other, 200, 300)}))

"""Run by the emulated Python of with_pytorch.py, which has PyTorch: verify a package, then export another and train by
it. Prints JSON."""

import json
import platform
import sys
import time
from typing import Any

began = time.perf_counter()

import aot_backward_native  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import aot_backward as ab  # noqa: E402
import aot_backward_runtime  # noqa: E402
from aot_backward.checks.verify import verify_variant  # noqa: E402
from aot_backward_runtime.native.weights import load_examples  # noqa: E402
from aot_backward_runtime.package.archive import open_package  # noqa: E402

torch.set_num_threads(1)
# The export starts it, and this one is not a program of the workstation
sys.executable, package, out = sys.argv[1:]
found = {
    "machine": platform.machine(),
    "torch": torch.__version__,
    "import": time.perf_counter() - began,
    "entries": {},
}
examples = load_examples(open_package(package))
for name in aot_backward_runtime.load(package).manifest.entries:
    report = verify_variant(aot_backward_runtime.load(package), name, 0, examples)
    found["entries"][name] = {"wrong": report.wrong, "error": report.ratio}

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 2))
x, y = torch.randn(64, 2), torch.randint(2, (64,))
batch = {0: torch.export.Dim("batch", min=2, max=256)}
optimizer, loss = torch.optim.AdamW(net.parameters(), lr=0.02), nn.functional.cross_entropy
began = time.perf_counter()
variant = ab.Variant((x, y), dynamic_shapes=(batch, batch))
ab.export(out, {"fit": ab.Step(net, [variant], optimizer, loss_fn=loss)}, tune="none")
found["export"] = time.perf_counter() - began
step = ab.load(out).step()
torch.manual_seed(1)
ours = [float(step(x, y)) for _ in range(20)]
torch.manual_seed(1)
expected = []
for _ in range(20):
    optimizer.zero_grad()
    value = loss(net(x), y)
    value.backward()
    optimizer.step()
    expected.append(float(value))
found["20 steps"] = max(abs(a - b) / abs(a) for a, b in zip(expected, ours, strict=True))


def opened() -> Any:
    """The same step in C over libtorch."""
    package = aot_backward_native.load(out, backend="libtorch", unchecked=True)
    package.seed(1)
    return package.step("fit")


def trained(step: Any, count: int) -> list[float]:
    return [memoryview(step(x, y)).cast("B").cast("f")[0] for _ in range(count)]


step = opened()
losses = trained(step, 10)
step.save(f"{out}.state")
losses += trained(step, 10)
other = opened()
other.resume(f"{out}.state")
found["C"] = {"equal": losses == ours, "resumed": trained(other, 10) == losses[10:]}
print(json.dumps(found))

"""The memory of a step's gradients. If it runs out inside a kernel, the error says so, nothing changes, and the next
call is right (docs/reliability.md, row 38). Otherwise the process keeps the memory from call to call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_exporters import torch_api

from ..support import exports

_STARVED = """
import json, resource, sys
import torch
import aot_backward_runtime as runtime

torch.set_num_threads(1)
package = runtime.load(sys.argv[1])
torch.manual_seed(3)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
free = resource.RLIM_INFINITY


def used():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))


def starved(call, seen):
    # every error at a little more memory than the last, until there is enough
    for extra in range(0, 64 << 20, 2 << 20):
        resource.setrlimit(resource.RLIMIT_AS, (used() + extra, free))
        try:
            return call()
        except RuntimeError as error:
            resource.setrlimit(resource.RLIMIT_AS, (free, free))
            seen.append(str(error).splitlines()[0])
            check()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (free, free))


step, other, grad = package.step("fit"), runtime.load(sys.argv[1]).step("fit"), package.grad("loss")
for each in (step, other):  # opens the native code
    each(x, y)
    each(x, y, update=False)
    each.zero_grad()
grad(x, y)


def check():
    now = step.state_dict()
    for name, tensor in before["module"].items():
        assert torch.equal(now["module"][name], tensor), name
    for i, slots in before["optimizer"]["state"].items():
        assert all(torch.equal(now["optimizer"]["state"][i][key], tensor) for key, tensor in slots.items()), i
    assert now["count"] == before["count"] and now["accumulated"] == 0


whole, halves, gradient = [], [], []
before = step.state_dict()
assert torch.equal(starved(lambda: step(x, y), whole), other(x, y))
before = step.state_dict()
starved(lambda: step(x, y, update=False), halves)
step(x, y)
other(x, y, update=False)
other(x, y)
assert all(torch.equal(a, b) for a, b in zip(step.parameters.values(), other.parameters.values()))
before = step.state_dict()
value, grads = starved(lambda: grad(x, y), gradient)
again, repeated = grad(x, y)
assert torch.equal(value, again) and all(torch.equal(grads[n], repeated[n]) for n in grads)
print(json.dumps({"whole": whole, "halves": halves, "gradient": gradient}))
"""


def _make(path: Path) -> None:
    torch.manual_seed(5)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    net = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), *hidden, nn.Linear(1024, 10))
    loss, (x, y) = nn.CrossEntropyLoss(), (torch.randn(64, 256), torch.randint(0, 10, (64,)))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(net(x), y)

    variants = [ab.Variant((x, y))]
    optimizer = torch.optim.AdamW(net.parameters())
    entries = {
        "fit": ab.Step(net, variants, optimizer, loss_fn=loss, accumulate=True),
        "loss": ab.Grad(loss_of, variants, wrt="parameters"),
    }
    ab.export(
        path,
        entries
        | {"net": ab.Module(net, [ab.Variant((x,))]), "little": ab.Function(lambda x: x.sin(), [ab.Variant((x,))])},
    )


def test_out_of_memory_changes_nothing_and_the_next_call_is_right() -> None:
    path = exports.shared("step-memory", _make)
    # Else the next call uses heap memory that earlier calls freed
    asking_the_system = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    argv = [sys.executable, "-c", _STARVED, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **asking_the_system})
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    for kind, words in {
        "whole": "nothing was changed",
        "halves": "the accumulated gradients are lost",
        "gradient": "",
    }.items():
        assert seen[kind], f"memory never ran out ({kind}): the test shows nothing"
        for message in seen[kind]:
            # torch before 2.13 writes the cause of a failed allocation only to stderr
            assert "allocate memory" in (message if torch_api.at_least("2.13") else done.stderr) and words in message


_FAULTED = """
import resource, statistics, sys
import torch
import aot_backward_runtime as runtime

torch.set_num_threads(1)
package = runtime.load(sys.argv[1])
step, loss, net, little = package.step("fit"), package.grad("loss"), package.module("net"), package.function("little")
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
calls = {
    "step": lambda: step(x, y),
    "grad": lambda: loss(x, y),
    "module": lambda: net(x).sum().backward(),
    "little": lambda: little(x),
    "nothing": lambda: None,
}
for _ in range(3):
    calls[sys.argv[2]]()
seen = []
for _ in range(11):  # 40 MB, more than glibc keeps by itself
    torch.ones(10_000_000)
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(statistics.median(after - before for before, after in zip(seen, seen[1:])))
"""


def _faults(kind: str, **settings: str) -> float:
    """Return how many pages the system maps each time 40 MB are allocated, after calls of an entry."""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | settings
    argv = [sys.executable, "-c", _FAULTED, str(exports.shared("step-memory", _make)), kind]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout)


_PAGES = 40_000_000 / 4096


@pytest.mark.parametrize("kind", ["step", "grad", "module"])
def test_memory_is_kept_for_the_next_call_unless_the_person_says_otherwise(kind: str) -> None:
    assert _faults(kind) < _PAGES / 20
    assert _faults(kind, MALLOC_TRIM_THRESHOLD_="131072") > _PAGES / 2
    assert _faults(kind, GLIBC_TUNABLES="glibc.malloc.trim_threshold=131072") > _PAGES / 2


@pytest.mark.parametrize("kind", ["little", "nothing"])
def test_memory_is_not_kept_for_little_calls(kind: str) -> None:
    assert _faults(kind) > _PAGES / 2

"""Memory that its address misrepresents: inputs inside memory that a call writes, storages that became too small at a
known address, results that share memory (docs/reliability.md, rows 42 to 44)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import InputError, WeightsError, load
from aot_backward_runtime.native.memory import Ranges, are_apart, extent

from ..support.exports import shared
from ..support.packages import python
from .test_tensor_kinds import counting_package, counts

Y = torch.randn(4, 4)


def slices(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return tensors of (4, 4) inside or overlapping ``buffer`` of (8, 4)."""
    flat = buffer.view(-1)
    around = torch.from_numpy(numpy.asarray(flat.numpy()))
    return {
        "its beginning": buffer[:4],
        "rows in the middle": buffer[2:6],
        "every other row": buffer[1::2],
        "an offset of one": flat[1:17].view(4, 4),
        "transposed": buffer[2:6].t(),
        "expanded": buffer[3].expand(4, 4),
        "by NumPy": around[16:].view(4, 4),
    }


@pytest.mark.parametrize("warm", [False, True])
def test_an_input_that_lies_in_what_the_call_writes_is_refused(warm: bool) -> None:
    package = load(counting_package())
    net, loss, fit = package.module("net"), package.grad("loss"), package.step("fit")
    written = {
        "net": (net, [net.seen]),
        "loss": (loss, [t for n, t in loss.parameters.items() if n.endswith("seen")]),
        "fit": (lambda x: fit(x, Y), [fit.buffers["seen"]]),
        "fit's target": (lambda t: fit(Y, t), [fit.buffers["seen"]]),
    }
    if warm:
        for call, _ in written.values():
            for _ in range(3):
                call(torch.randn(4, 4))
    for door, (call, buffers) in written.items():
        for buffer in buffers:
            before = buffer.detach().clone()
            for what, view in slices(buffer.detach()).items():
                with pytest.raises(
                    InputError,
                    match=r"(x|target) shares memory with \S*seen, which the call updates in place: pass a copy",
                ):
                    call(view)
                assert torch.equal(buffer, before), (door, what)
                call(view.clone())
                buffer.detach().copy_(before)
    weight = fit.parameters["linear.weight"].detach()
    momentum = fit.state[fit.parameters["linear.weight"]]["momentum_buffer"].detach()
    for state, name in ((weight, "linear.weight"), (weight.t(), "linear.weight"), (momentum, "momentum_buffer")):
        with pytest.raises(InputError, match=name):
            fit(state, Y)
    eager = counts()
    net.load_state_dict(eager.state_dict())
    x = net.linear.weight.detach()  # the module's call only reads it
    torch.testing.assert_close(net(x), eager(x))


def test_state_that_came_to_share_memory_is_refused() -> None:
    net = load(counting_package()).module("net")
    net(Y)
    bias = net.linear.bias
    net.linear.bias = nn.Parameter(net.seen[1])
    with pytest.raises(WeightsError, match=r"seen, which the call updates in place, and linear\.bias share memory"):
        net(Y)
    net.linear.bias = bias
    net(Y)


SHRUNK = """
import sys
import torch
from aot_backward_runtime import InputError, WeightsError, load

package = load(sys.argv[1])
net, loss, fit = package.module("net"), package.grad("loss"), package.step("fit")
y = torch.randn(4, 4)

def refused(call, kind=InputError):
    try:
        call()
    except kind as error:
        assert "its storage holds" in str(error), error
    else:
        raise AssertionError("accepted")

def same_address(call):
    '''``call`` on a tensor that is good, and on one of the same looks and address, whose storage is shorter.'''
    memory = bytearray(torch.randn(4, 4).numpy().tobytes())
    good = torch.frombuffer(memory, dtype=torch.float32).view(4, 4)
    short = torch.frombuffer(memory, dtype=torch.float32, count=12)
    bad = torch._C._dynamo.guards._reinterpret_tensor(short, (4, 4), (4, 1), 0)
    assert bad.data_ptr() == good.data_ptr()
    for _ in range(3):
        call(good)
    refused(lambda: call(bad))
    call(good)
    moved = torch._C._dynamo.guards._reinterpret_tensor(torch.frombuffer(memory, dtype=torch.float32), (4, 4), (4, 1), 4)
    refused(lambda: call(moved))

for call in (net, loss, lambda x: fit(x, y), lambda t: fit(y, t)):
    same_address(call)
same_address(lambda gradient: net(y).backward(gradient))

# parameters: shrunk in place, and freed and given back
size = net.linear.weight.untyped_storage().nbytes()
weight = torch.nn.Parameter(net.linear.weight.detach().clone())
net.linear.weight = weight
value = net(y)
storage = weight.untyped_storage()
for bytes in (size // 2, 0):
    storage.resize_(bytes)
    refused(lambda: net(y), WeightsError)
storage.resize_(size)
torch.nn.init.ones_(weight)
net(y)
print("done")
"""


def test_a_storage_too_small_is_refused_at_an_address_that_was_good() -> None:
    done = python(SHRUNK, counting_package())
    assert done.returncode == 0 and done.stdout.split() == ["done"], (done.stdout, done.stderr)


class Aliases(nn.Module):
    """Some results share memory in eager, others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> Any:
        e = self.linear(x) * 2
        mean, log = (e + 1).chunk(2, dim=1)
        whole = {"whole": e, "flat": e.view(-1), "row": e[1], "turned": e.t(), "cut off": e.detach(), "again": e}
        return whole | {"last": e[:, -1], "some": e[::2, 1:3], "wide": e[:1].expand(3, 6), "mean": mean, "log": log}


@pytest.mark.parametrize("gradients", [True, False])
def test_results_that_share_memory_in_eager_share_it(gradients: bool) -> None:
    """A write to one shows in the others, and also in autograd's version counter."""

    def make(path: Path) -> None:
        torch.manual_seed(5)
        batch = torch.export.Dim("batch", min=2, max=16)
        ab.export_module(Aliases(), (torch.randn(3, 4),), dynamic_shapes=({0: batch},), path=path)

    loaded = load(shared("aliases", make)).module()
    eager = Aliases()
    eager.load_state_dict(loaded.state_dict())
    family = ("whole", "flat", "row", "turned", "cut off", "again", "last", "some")
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        for written in family:
            with torch.set_grad_enabled(gradients):
                mine, theirs = loaded(x), eager(x)
            for out in (mine, theirs):
                out["mean"].detach().zero_()
                with torch.no_grad():
                    out[written].mul_(3)
            for name in mine:
                torch.testing.assert_close(mine[name].detach(), theirs[name].detach(), msg=f"{written}, {name}")
                assert (
                    mine[name].stride() == theirs[name].stride()
                    and mine[name].requires_grad == theirs[name].requires_grad
                )
            versions = {mine[name]._version for name in (*family, "wide")}
            assert len(versions) == 1 and versions != {0}
    if gradients:
        for name in ("whole", "flat", "row", "turned", "again", "last", "some", "wide", "mean"):
            (a,), (b,) = (torch.autograd.grad(m(x)[name].square().sum(), m.linear.bias) for m in (loaded, eager))
            torch.testing.assert_close(a, b, msg=name)
        out = loaded(x)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            out["flat"].mul_(2)  # autograd's error; eager allows the write
        out["cut off"].mul_(2)
        torch.testing.assert_close(out["whole"].detach(), 2 * eager(x)["whole"].detach())


def test_results_that_share_a_part_are_refused(tmp_path: Path) -> None:
    class Parts(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            h = x.sin()
            return h[:3], h[1:]

    with pytest.raises(
        ab.ExportError, match=r"output\[0\] and output\[1\] share a part of their memory.*return a \.clone\(\) of one"
    ):
        ab.export_module(Parts(), (torch.randn(4, 4),), path=tmp_path / "no.pt2")


def test_stretches_of_memory_are_compared_by_sorting() -> None:
    """Compare with a test of all pairs: stretches that touch, contain each other, begin together or are empty."""
    generator, buffer = random.Random(1), torch.zeros(64, dtype=torch.uint8)
    found = [0, 0]
    for _ in range(2_000):
        begins = [generator.randrange(40) for _ in range(generator.randint(1, 6))]
        counts = [generator.randrange(8) for _ in begins]
        meet = [
            (i, j)
            for i in range(len(begins))
            for j in range(i)
            if max(begins[i], begins[j]) < min(begins[i] + counts[i], begins[j] + counts[j])
        ]
        assert are_apart(begins, counts) == (not meet)
        found[bool(meet)] += 1
        tensors = [buffer[b : b + n] for b, n in zip(begins, counts, strict=True)]
        written = Ranges((str(i), t) for i, t in enumerate(tensors[1:]))
        if written.overlap() is None and counts[0]:
            apart = written.apart_from([tensors[0].data_ptr()], [extent(tensors[0])])
            assert apart == (not any(0 in pair for pair in meet)) == (not written.reached_by(tensors[0]))
    assert min(found) > 200

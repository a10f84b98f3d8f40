"""Errors that once happened: silent wrong results, crashes, or damage to your own module; most silent first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import aot_backward as ab
from aot_backward_runtime import ExportError, load

from ..support.oracle import assert_same, run


def test_a_submodule_frozen_in_eval_stays_frozen(tmp_path: Path) -> None:
    """A BatchNorm in eval inside a network in training keeps its mode in the export and through ``train`` with the
    current mode."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    net[1].eval()
    net[1].running_mean.fill_(3.0)
    x = torch.randn(8, 4, requires_grad=True)
    for i, mode in enumerate((None, "train")):
        loaded = load(ab.export(tmp_path / f"{i}.pt2", {"net": ab.Module(net, [ab.Variant((x,), mode=mode)])})).module()
        assert_same(run(loaded, (x,), 1), run(net, (x,), 1))
        assert not net[1].training and int(loaded.get_buffer("1.num_batches_tracked")) == 0


def test_parameters_that_overlap_are_refused(tmp_path: Path) -> None:
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    net.part = nn.Parameter(net.weight.data[:2])
    other.twin = nn.Parameter(other.weight.data)
    for module, name in ((net, "part"), (other, "twin")):
        with pytest.raises(
            ExportError, match=rf"({name} and weight|weight and {name}) share memory without being one tensor; tie them"
        ):
            ab.export_module(module, (torch.randn(3, 4),), path=tmp_path / "no.pt2")


class Constants(nn.Module):
    """Its two variants make constants of different values and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.large = torch.randn(30000, 2)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        table = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0]), self.large.sum(0)][which]
        return self.linear(x) * table


def test_each_variant_has_its_own_constants(tmp_path: Path) -> None:
    net, x = Constants(), torch.randn(3, 2)
    variants = [ab.Variant((x, which)) for which in range(3)]
    loaded = load(ab.export(tmp_path / "c.pt2", {"net": ab.Module(net, variants)})).module()
    for which in range(3):
        assert_same(run(loaded, (x, which), 1), run(net, (x, which), 1))


class Twice(nn.Module):
    """One submodule under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(torch.tanh(self.first(x))) * self.kept


def test_a_submodule_of_two_names_is_exported_and_left_whole(tmp_path: Path) -> None:
    net, x = Twice(), torch.randn(3, 4, requires_grad=True)
    weight = net.first.weight
    loaded = load(ab.export_module(net, (x,), path=tmp_path / "twice.pt2")).module()
    assert net.first.weight is weight and type(weight) is nn.Parameter
    assert loaded.first.weight is loaded.again.weight
    assert_same(run(loaded, (x,), 1), run(net, (x,), 1))


def test_an_infinite_constant_is_refused_before_the_work(tmp_path: Path) -> None:
    def fill(x: torch.Tensor, value: float) -> torch.Tensor:
        return x.masked_fill(x > 0, value).exp().sum()

    with pytest.raises(ExportError, match=r"is -inf, which a package cannot hold as a constant; pass it as a tensor"):
        ab.export_grad(fill, (torch.randn(3), float("-inf")), wrt="x", path=tmp_path / "no.pt2")


def test_a_group_norm_whose_eager_backward_ends_the_process_is_exported(tmp_path: Path) -> None:
    """Eager crashes in channels_last if the input does not require grad, as for Grad and Step here, and for a Module
    with only parameter gradients. This runs in a subprocess, so that a signal is a failure."""
    script = """
import sys, torch
import aot_backward as ab
torch.manual_seed(0)
net, x = torch.nn.GroupNorm(2, 4), torch.randn(2, 4, 3, 3)
wide = x.to(memory_format=torch.channels_last)
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = net
    def forward(self, x):
        return self.norm(x).pow(3).sum()
program = Loss()
path = ab.export(sys.argv[1], {
    "module": ab.Module(net, [ab.Variant((wide.detach().requires_grad_(),))]),
    "grad": ab.Grad(program, [ab.Variant((wide,))]),
    "step": ab.Step(program, [ab.Variant((wide,))], optimizer=torch.optim.SGD(program.parameters(), lr=0.5)),
})
expected = torch.autograd.grad(program(x), list(program.parameters()))
package = ab.load(path)
module = package.module("module")
module(wide).pow(3).sum().backward()
found = {"module": [p.grad for p in module.parameters()], "grad": list(package.grad("grad")(wide)[1].values())}
step = package.step("step")
before = {n: p.detach().clone() for n, p in step.parameters.items()}
step(wide)
found["step"] = [(before[n] - p) / 0.5 for n, p in step.parameters.items()]
for name, gradients in found.items():
    for got, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "norm.pt2")],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)


def test_generated_code_that_does_not_compile_names_operator_and_line(tmp_path: Path) -> None:
    script, path = tmp_path / "strict-g++", tmp_path / "no.pt2"
    said = "kernel.cpp: In function 'void cpp_fused_sin_sum_0(const half*)': error: no match for operator+="
    script.write_text(f'#!/bin/sh\ncase "$*" in *"-c kernel.cpp"*) echo "{said}"; exit 1;; esac\nexec g++ "$@"\n')
    script.chmod(0o755)
    where = r"in <lambda> \(test_pitfalls\.py:\d+: ab\.export_grad\(lambda x: x\.sin\(\)"
    message = rf"aten\.sin\.default, .*aten\.sum\.\w+ \(torch\.float16.*called {where}.*Compute that part in float32.*--debug shows"
    with inductor_config.patch({"cpp.cxx": (None, str(script))}), pytest.raises(ExportError, match=message) as caught:
        ab.export_grad(lambda x: x.sin().sum(), (torch.randn(4).half(),), wrt="x", path=path, tune="none")
    assert said not in str(caught.value) and said in str(caught.value.__cause__)

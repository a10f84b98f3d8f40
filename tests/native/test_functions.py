"""C and Python give the same results: bit for bit over the same libtorch, up to rounding over the standalone backend,
and with the same random masks from the same seed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import aot_backward as ab
from aot_backward_runtime import load
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.pytree import unflatten
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.package.archive import open_package

from ..support import c_library, golden_files
from ..support.c_library import Function
from ..support.exports import shared

pytestmark = golden_files.needed
GOLDEN = [
    golden_files.FOLDER / f"{name}.pt2"
    for name in ("1.0-pair", "1.2-step", "1.3-orders", "1.4-targets", "1.6-sketches", "1.7-speed")
]


class Attention(nn.Module):
    """Attention and dropout, with eager's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).square().mean()


class Bag(nn.Module):
    """Sums of embedding rows. Compiled code calls the operator of its gradient by name."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(30, 8, mode="sum")
        self.head = nn.Linear(8, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows(index)).square().mean()


def export_kinds(path: Path) -> None:
    """Export other operators, dtypes, layouts and dynamic sizes, as C code of a user would call them."""
    torch.manual_seed(0)
    batch, attention, bag = Dim("batch", min=1, max=64), Attention(), Bag()
    convolution = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )

    def waves(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs().square().mean() + x.double().cumsum(0).tanh().sum()

    ab.export(
        path,
        {
            "attention": ab.Step(
                attention,
                [ab.Variant((torch.randn(3, 5, 16),), dynamic_shapes=({0: batch},))],
                torch.optim.SGD(attention.parameters(), 0.1),
            ),
            "bag": ab.Grad(bag, [ab.Variant((torch.randint(30, (6, 4)),))]),
            "conv": ab.Module(
                convolution, [ab.Variant((torch.randn(4, 2, 8, 8, requires_grad=True),), dynamic_shapes=({0: batch},))]
            ),
            "waves": ab.Grad(waves, [ab.Variant((torch.randn(16),))]),
        },
    )


def kinds() -> Path:
    return shared("native-kinds", export_kinds)


def leaves(value: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def of_python(
    package: Package, entry: str, variant: VariantSpec, inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> list[Any]:
    """Return outputs, and gradients in the order of the variant's plan."""
    tensors = [t.clone().requires_grad_(s.requires_grad) for t, s in zip(inputs, variant.inputs, strict=True)]
    args, kwargs = unflatten(variant.in_tree, tensors, {}, {})
    torch.manual_seed(7)
    spec = package.manifest.entries[entry]
    if spec.kind == "step":
        step = package.step(entry)
        return [t.clone() for _ in range(3) for t in leaves(step(*args, **kwargs))]
    if spec.kind == "grad":
        value, gradients = package.grad(entry)(*args, **kwargs)
        by_target = (
            {spec.wrt[0]: gradients}
            if spec.single
            else dict(zip(spec.wrt, (gradients[n] for n in spec.names), strict=True))
        )
        assert variant.gradient is not None
        return [*leaves(value), *(by_target[g.of] for g in variant.gradient.gradients)]
    module = package.module(entry).train(variant.mode == "train")
    outputs = leaves(module(*args, **kwargs))
    assert variant.backward is not None
    parameters = dict(module.named_parameters(remove_duplicate=False))
    places = [g.of.partition(":") for g in variant.backward.gradients]
    targets = [tensors[int(name)] if kind == "input" else parameters[name] for kind, _, name in places]
    found = torch.autograd.grad([outputs[i] for i in variant.differentiable], targets, incoming, allow_unused=True)
    return [*(o.detach() for o in outputs), *found]


def of_c(
    called: Function, variant: VariantSpec, inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
) -> list[Any]:
    if variant.mode:
        called.train(variant.mode == "train")
    if called.kind == "step":
        return [t for _ in range(3) for t in called.run(*inputs)]
    if called.kind == "grad":
        return called.run(*inputs)
    return [*called.forward(*inputs), *called.backward(*incoming)]


def assert_alike(actual: Sequence[Any], expected: Sequence[Any], backend: str) -> None:
    assert len(actual) == len(expected)
    largest = max(
        (e.abs().max().item() for e in expected if e is not None and e.is_floating_point() and e.numel()), default=1.0
    )
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is None:
            continue
        assert a.dtype == e.dtype and a.shape == e.shape
        if backend == "libtorch" or not e.is_floating_point():
            assert torch.equal(a, e), f"off by {(a - e).abs().max()}"
        else:
            torch.testing.assert_close(a, e, rtol=0, atol=64 * torch.finfo(e.dtype).eps * largest)


@pytest.mark.parametrize("backend", ["libtorch", "standalone"])
@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_every_entry_of_a_golden_package_gives_what_python_gets(path: Path, backend: str) -> None:
    compare(path, load(path).entries, backend)


@pytest.mark.parametrize("entry", ["attention", "bag", "conv", "waves"])
def test_every_kind_of_entry_gives_what_python_gets(entry: str) -> None:
    compare(kinds(), [entry], "libtorch")


@pytest.mark.parametrize("entry", ["attention", "bag", "conv"])
def test_every_kind_of_entry_gives_what_python_gets_without_torch(entry: str) -> None:
    compare(kinds(), [entry], "standalone")


def test_an_operator_that_the_standalone_backend_lacks_is_named() -> None:
    with c_library.function(kinds(), "waves", "standalone") as called, pytest.raises(c_library.Failed) as failed:
        called.run(torch.randn(16))
    assert failed.value.status == c_library.INCOMPATIBLE
    # The first of several, in the order of the library's symbols
    lacking = "abs|view_as_real|_fft_r2c|_fft_c2c|slice_scatter"
    assert re.search(rf"aoti_torch_cpu_({lacking}), which the backend standalone does not have", str(failed.value))


def compare(path: Path, entries: Sequence[str], backend: str) -> None:
    examples, compared = load_examples(open_package(path)), 0
    with c_library.opened(path, backend) as package:
        for entry in entries:
            python = load(path)  # load again per entry: entries of one package share their state
            spec = python.manifest.entries[entry]
            variant = spec.variants[0]
            inputs = [examples[f"{entry}/0/input/{i}"] for i in range(len(variant.inputs))]
            generator = torch.Generator().manual_seed(3)
            stored = (
                [examples[f"{entry}/0/cotangent/{i}"] for i in range(len(variant.cotangents))]
                if spec.kind == "module"
                else []
            )
            incoming = [torch.randn(s.shape, generator=generator) for s in stored]
            with package.function(entry) as called:
                expected = of_python(python, entry, variant, inputs, incoming)
                package.seed(7)
                assert_alike(of_c(called, variant, inputs, incoming), expected, backend)
                if spec.kind == "step":
                    step = python.step(entry)
                    for name, tensor in {**step.parameters, **step.buffers}.items():
                        assert_alike([called.state(name)], [tensor.detach()], backend)
                compared += len(expected)
    assert compared

"""Recurrent layers as loops over a dynamic length: outputs, final states and every gradient against eager, in all
runtimes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import aot_backward as ab
from aot_backward.capture.recurrent_layers import LONGEST_UNROLLED
from aot_backward_exporters import torch_api
from aot_backward_runtime import ExportError, load
from aot_backward_runtime.package.archive import open_package

from ..support import exports

pytestmark = [
    pytest.mark.skipif(
        not torch_api.at_least("2.13"), reason="there the body of a loop gets the wrong inputs, and layers are unrolled"
    ),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),  # eager's
]

INPUT, HIDDEN = 5, 6
LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(INPUT, HIDDEN),
    "lstm_both_ways_with_projections": lambda: nn.LSTM(
        INPUT, HIDDEN, proj_size=4, bias=False, bidirectional=True, batch_first=True
    ),
    "gru_of_two": lambda: nn.GRU(INPUT, HIDDEN, 2),
    "gru_without_bias": lambda: nn.GRU(INPUT, HIDDEN, bias=False),
    "tanh": lambda: nn.RNN(INPUT, HIDDEN),
    "relu_in_float64": lambda: nn.RNN(INPUT, HIDDEN, nonlinearity="relu", dtype=torch.float64),
}
BATCH = Dim("batch", min=1, max=8)
SIZES = (14, 3), (1, 1), (2, 4), (40, 1)
"""Length and batch. The first are the example's."""


class Layers(nn.Module):
    """All layers over the same sequences, from states that are an input: x [length, batch, INPUT], states [4, batch,
    HIDDEN]."""

    def __init__(self, names: Any = tuple(LAYERS)):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: LAYERS[name]() for name in names})

    def forward(self, x: Tensor, states: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {name: self.results(net, x, states) for name, net in self.layers.items()}

    @staticmethod
    def results(net: nn.RNNBase, x: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        x, states = x.to(net.weight_ih_l0.dtype), states.to(net.weight_ih_l0.dtype)
        h = states[: net.num_layers * (2 if net.bidirectional else 1)]
        first = (h[..., : net.proj_size or HIDDEN], h.cos()) if isinstance(net, nn.LSTM) else h
        out, last = net(x.transpose(0, 1) if net.batch_first else x, first)
        return out, *(last if isinstance(last, tuple) else (last,))


def inputs(length: int, batch: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(length + batch)
    return torch.randn(length, batch, INPUT, requires_grad=True), torch.randn(4, batch, HIDDEN, requires_grad=True)


def sizes() -> Any:
    return {"x": {0: Dim("length", min=1, max=64), 1: BATCH}, "states": {1: BATCH}}


def package() -> Path:
    return exports.shared(
        "recurrent-layers",
        lambda path: ab.export_module(Layers(), inputs(*SIZES[0]), dynamic_shapes=sizes(), path=path),
    )


def weighted(results: Any) -> Tensor:
    return torch.stack(
        [(r * (1 + torch.arange(r.numel(), dtype=r.dtype).view(r.shape).cos())).sum().double() for r in results]
    ).sum()


@functools.cache
def compared() -> list[list[tuple[Any, Any]]]:
    """Return for each size (eager, loaded): for each layer its results and gradients."""
    found = []
    for length, batch in SIZES:
        pair = []
        for module in (Layers(), load(package()).module()):
            values = inputs(length, batch)
            results = module(*values)
            own = dict(module.named_parameters())
            pair.append(
                {
                    name: [
                        *out,
                        *torch.autograd.grad(
                            weighted(out),
                            [*values, *(p for n, p in own.items() if f"layers.{name}." in n)],
                            retain_graph=True,
                        ),
                    ]
                    for name, out in results.items()
                }
            )
        found.append(pair)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_equal_eagers_at_every_length(name: str) -> None:
    for eager, loaded in compared():
        assert [(t.shape, t.stride()) for t in loaded[name]] == [(t.shape, t.stride()) for t in eager[name]]
        torch.testing.assert_close(loaded[name], eager[name])


def test_they_run_without_pytorch() -> None:
    assert open_package(package()).manifest.entries["module"].standalone == "verified"
    values, module = inputs(33, 2), abn.load(package()).module()
    expected = pytree.tree_map(Tensor.detach, Layers()(*values))
    results = module.forward(*(v.detach() for v in values))
    torch.testing.assert_close(pytree.tree_map(torch.from_dlpack, results), expected)


def test_as_onnx_graphs_of_a_static_length(tmp_path: Path) -> None:
    """Export compares them with eager."""
    net, values = Layers(["lstm_both_ways_with_projections", "relu_in_float64"]), inputs(LONGEST_UNROLLED + 2, 2)
    ab.export_onnx(
        tmp_path / "net.onnx",
        {"net": ab.Module(net, [ab.Variant(values, dynamic_shapes={"x": {1: BATCH}, "states": {1: BATCH}})])},
    )
    with pytest.raises(
        ExportError, match=r"scan over a dynamic length has no ONNX translation.*Make the length static"
    ):
        ab.export_onnx(tmp_path / "net.onnx", {"net": ab.Module(net, [ab.Variant(values, dynamic_shapes=sizes())])})


def test_the_code_does_not_grow_with_the_length(tmp_path: Path) -> None:
    found = []
    for length in (LONGEST_UNROLLED + 1, 300):
        ab.export_module(Layers(["tanh"]), inputs(length, 2), path=tmp_path / f"{length}.pt2")
        members = open_package(tmp_path / f"{length}.pt2").members()
        found.append(sum(member.size for name, member in members.items() if name.endswith(".so")))
    assert abs(found[1] - found[0]) < 0.05 * found[0]
    ab.rebuild(tmp_path / "300.pt2", tmp_path / "300.pt2")  # from the graphs as data; compares


def test_gradients_of_gradients(tmp_path: Path) -> None:
    """They are those of the layer step by step, as in eager; no loop has them."""
    module, values, path = Layers(["tanh"]), inputs(12, 2), tmp_path / "twice.pt2"
    ab.export_module(module, values, path=path, order=2)
    found = []
    for one in (module, load(path).module()):
        (g,) = torch.autograd.grad(weighted(one(*values)["tanh"]), values[:1], create_graph=True)
        found.append([g, *torch.autograd.grad(g.square().sum(), [*values, *one.parameters()])])
    torch.testing.assert_close(found[1], found[0])
    with pytest.raises(ExportError, match="differentiated again, and its length is dynamic"):
        ab.export_module(module, values, dynamic_shapes=sizes(), path=path, order=2)


class In16Bits(nn.Module):
    """Layers under autocast, of float32 and bfloat16 inputs, and a layer in bfloat16, with all their results."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {name: LAYERS[name]() for name in ("lstm", "gru_of_two", "tanh", "lstm_both_ways_with_projections")}
        )
        self.low = nn.GRU(INPUT, HIDDEN).bfloat16()

    def forward(self, x: Tensor) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            out = [net(t) for net in self.net.values() for t in (x, x.bfloat16())]
        return [*out, self.low(x.bfloat16())]


def test_dtypes_and_a_dynamic_length_in_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, (x, _) = In16Bits(), inputs(14, 3)
    path = ab.export_module(
        module, (x,), dynamic_shapes=({0: Dim("length", min=2)},), path=tmp_path / "net.pt2", tune="none"
    )
    loaded = load(path).module()
    for length in (2, 33):
        found = []
        for net in (module, loaded):
            x = torch.randn(length, 3, INPUT, generator=torch.Generator().manual_seed(length)).requires_grad_()
            out = pytree.tree_leaves(net(x))
            gradients = torch.autograd.grad(sum(o.float().cos().sum() for o in out), [x, *net.parameters()])
            found.append([*out, *gradients])
        for expected, ours in zip(*found, strict=True):
            assert ours.dtype == expected.dtype
            assert float((ours - expected).detach().float().norm()) <= 3e-2 * float(expected.detach().float().norm())


class Transformed(nn.Module):
    """Transforms of torch.func, for which the layer is unrolled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.RNN(INPUT, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        def f(x: Tensor) -> Tensor:
            return self.net(x)[0].square().sum()

        return torch.func.grad(f)(x), torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def test_under_transforms(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, (x, _) = Transformed(), inputs(LONGEST_UNROLLED + 1, 2)
    ab.export_module(module, (x,), path=tmp_path / "net.pt2")  # compares with eager
    loaded = load(tmp_path / "net.pt2").module()
    assert all(r.requires_grad for r in loaded(x))


class Uses(nn.Module):
    """Lengths that follow from a dynamic one, and outputs that the caller changes in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = "lstm", "gru_of_two", "tanh", "relu_in_float64"
        self.layers = nn.ModuleDict({name: LAYERS[name]() for name in names}).double()

    def forward(self, x: Tensor) -> list[Tensor]:
        out = [self.layers["gru_of_two"](part)[0] for part in (x[1:], x[::2], torch.cat([x, x]))]
        return [*out, *(net(x)[0].mul_(2.0).relu_() for net in self.layers.values())]


def test_parts_of_a_dynamic_length_and_outputs_changed_in_place(tmp_path: Path) -> None:
    module = Uses()
    path = ab.export_module(
        module,
        (torch.randn(14, 3, INPUT).double().requires_grad_(),),
        dynamic_shapes=({0: Dim("length", min=2)},),
        path=tmp_path / "uses.pt2",
    )
    loaded = load(path).module()
    for length in (2, 33):
        found = []
        for net in (module, loaded):
            x = torch.randn(length, 3, INPUT, generator=torch.Generator().manual_seed(length)).double().requires_grad_()
            out = net(x)
            found.append([*out, *torch.autograd.grad(sum(o.cos().sum() for o in out), [x, *net.parameters()])])
        torch.testing.assert_close(found[1], found[0])


def test_relu_passes_a_gradient_where_it_is_nan() -> None:
    """As eager's relu does: its gradient is 0 where the result is at most 0, and NaN is not."""
    x, states = inputs(14, 3)
    x.data[5, 1, 2] = torch.nan
    found = []
    for module in (Layers(), load(package()).module()):
        weights = [p for n, p in module.named_parameters() if ".relu_" in n]
        found.append(torch.autograd.grad(module(x, states)["relu_in_float64"][0].sum(), weights))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)

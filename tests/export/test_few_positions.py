"""Convolutions of one number each at few positions: eager's results, by oneDNN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.few_positions import by_onednn
from aot_backward_runtime import load

from ..support import rewriting
from ..support.oracle import assert_same, run

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
KINDS = {
    "1d": (nn.Conv1d, (7,)),
    "2d": (nn.Conv2d, (3, 3)),
    "3d": (nn.Conv3d, (2, 1, 3)),
    "one position": (nn.Conv2d, (1, 1)),
}


def gradients(layer: nn.Module, x: Tensor) -> torch.fx.GraphModule:
    """Return the graph of a layer's result and of all its gradients, after the rewrite."""
    bias = [layer.bias] if layer.bias is not None else []

    def program(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        result = torch.func.functional_call(layer, dict(zip(("weight", "bias"), parameters, strict=False)), (x,))
        return (result, *torch.autograd.grad(result.square().sum(), (x, *parameters)))

    inputs = [t.detach().requires_grad_() for t in (x, layer.weight, *bias)]  # type: ignore[list-item]
    return rewriting.rewritten(torch_api.make_fx(program, tracing_mode="fake")(*inputs), by_onednn)


def marked(graph: torch.fx.GraphModule) -> list[bool]:
    """Return of each convolution whether it is dilated."""
    nodes = [node for target in CONVOLUTIONS for node in graph.graph.find_nodes(op="call_function", target=target)]
    return [set(node.args[6 if node.target is CONVOLUTIONS[1] else 5]) == {2} for node in nodes]  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 2, 15, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_eagers(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    layer_class, sizes = KINDS[kind]
    layer, x = layer_class(96, 192, 1, bias=rows > 1), torch.randn(rows, 96, *sizes)
    graph = gradients(layer, x)
    assert marked(graph) == [True, True]
    given = x.clone().requires_grad_()
    expected = layer(given)
    parameters = [p for p in (layer.weight, layer.bias) if p is not None]
    of_eager = torch.autograd.grad(expected.square().sum(), (given, *parameters))
    for ours, eager in zip(graph(x, *parameters), (expected, *of_eager), strict=True):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-3)


def test_pytorch_leaves_dilated_convolutions_to_onednn() -> None:
    """The rewrite rests on it. It gains nothing where PyTorch chooses oneDNN without a dilation, too."""
    x, weight, before = torch.randn(8, 96, 3, 3), torch.randn(192, 96, 1, 1), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dilation, expected in ((1, False), (2, True)):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                nn.functional.conv2d(x, weight, dilation=dilation)
            assert any(event.key == "aten::mkldnn_convolution" for event in profile.key_averages()) == expected
    finally:
        torch.set_num_threads(before)


LEFT: dict[str, tuple[nn.Module, Tensor]] = {
    "groups": (nn.Conv2d(384, 384, 1, groups=2), torch.randn(2, 384, 3, 3)),
    "strides": (nn.Conv2d(96, 192, 1, stride=2), torch.randn(2, 96, 3, 3)),
    "padding": (nn.Conv2d(96, 192, 1, padding=1), torch.randn(2, 96, 1, 1)),
    "a larger kernel": (nn.Conv2d(96, 192, (1, 2)), torch.randn(2, 96, 3, 3)),
    "transposed": (nn.ConvTranspose2d(96, 192, 1), torch.randn(2, 96, 3, 3)),
}


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    assert not any(marked(gradients(*LEFT[name])))


def test_a_package_for_any_number_of_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(96, 192, 1), nn.BatchNorm2d(192), nn.ReLU(), nn.Conv2d(192, 96, 1, bias=False))
    x = torch.randn(4, 96, 3, 3).requires_grad_()
    rows = {"input": {0: Dim("rows", min=2, max=64)}}
    package = load(ab.export_module(model, (x,), dynamic_shapes=rows, path=tmp_path / "net.pt2", runtime="standalone"))
    before = torch.get_num_threads()
    try:
        for threads, count in ((1, 2), (1, 33), (2, 5)):
            torch.set_num_threads(threads)
            exported, given = package.module(), torch.randn(count, 96, 3, 3).requires_grad_()
            exported.load_state_dict(model.state_dict())
            assert_same(run(exported, (given,), 5), run(model, (given,), 5))
    finally:
        torch.set_num_threads(before)

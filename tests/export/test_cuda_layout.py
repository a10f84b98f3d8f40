"""Operators that lay out results differently on a GPU still give results with the recorded strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from aot_backward.capture import partition, trace
from aot_backward.capture.shapes import dynamic_shapes
from aot_backward_exporters.cuda.devices import DEVICES
from aot_backward_exporters.cuda.retarget import retarget
from aot_backward_runtime.errors import ExportError

GPU = torch.device("cuda:0")


class Singular(nn.Module):
    """Right singular vectors, which a CPU returns as columns and a GPU as rows."""

    def __init__(self, part: int = 4):
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return [made[..., : self.part] for made in torch.linalg.svd(x, full_matrices=False)]


def forward_of(net: nn.Module, shapes: Any = None) -> tuple[Any, Any, Any]:
    x = torch.randn(4, 3, 3, requires_grad=True)
    traced = trace.trace_program(
        net, (x,), {}, dynamic_shapes.normalized(shapes, net.forward, (x,), {}), signature=net.forward
    )
    return partition.split_module(traced, "net", {}, forward_only=False).graphs[0], traced.fake_mode, x.detach()


def values(graph: Any) -> list[torch.Tensor]:
    return [node.meta["val"] for node in next(iter(graph.module.graph.find_nodes(op="output"))).args[0]]


@pytest.mark.parametrize("shapes", [None, ({0: Dim("batch", min=2, max=64)},)], ids=["static", "dynamic"])
def test_results_keep_their_strides(shapes: Any) -> None:
    graph, fake_mode, x = forward_of(Singular(), shapes)
    with fake_mode:
        there = torch.linalg.svd(torch.empty(4, 3, 3, device=GPU), full_matrices=False)
    assert there[2].stride() == (9, 3, 1)
    moved = retarget(graph, fake_mode, DEVICES["sm_90"], GPU)
    assert [v.device for v in values(moved)] == [GPU] * 3
    assert [v.stride() for v in values(moved)] == [v.stride() for v in values(graph)] == [(9, 1, 3), (3, 1), (9, 1, 3)]
    for given, wanted in zip(moved.module(x), graph.module(x), strict=True):
        torch.testing.assert_close(given, wanted)
        assert given.stride() == wanted.stride()
    assert fake_mode.shape_env is None or fake_mode.shape_env.guards == []


def test_what_no_copy_mends_is_refused() -> None:
    graph, fake_mode, _ = forward_of(Singular(2))
    with pytest.raises(
        ExportError,
        match=r"net.forward: aten.slice.Tensor: expected strides .*, as on the CPU, got .*\. Make its result contiguous",
    ):
        retarget(graph, fake_mode, DEVICES["sm_90"], GPU)

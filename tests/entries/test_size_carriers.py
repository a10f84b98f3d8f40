"""Sizes that a backward needs from its forward and that no saved tensor has."""

from __future__ import annotations

import torch
from torch import nn
from torch.export import Dim

from aot_backward.capture import partition, trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.block(x).softmax(-1)


def test_sizes_are_carried_where_the_first_input_is_one() -> None:
    """Under autocast the partitioner puts sizes before the tensors."""
    net, x = Block(), torch.randn(5, 3, 8, requires_grad=True)
    traced = trace.trace_program(net, (x,), {}, {"x": {0: Dim("batch", min=2, max=64)}}, signature=net.forward)
    weights = {n: (n, p.detach()) for n, p in net.named_parameters()}
    pieces = partition.split_module(traced, "net", weights, forward_only=False)
    assert pieces.backward is not None and pieces.backward.call is not None
    assert any(operand.startswith("size:") for operand in pieces.backward.call.operands)
    for graph in pieces.graphs:
        graph.module.graph.lint()

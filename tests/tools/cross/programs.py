"""The programs to cross-compile for GPUs: one of each kind, each with a static and a dynamic batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel

import aot_backward as ab

from ...support import zoo


class Attentive(nn.Module):
    """A transformer block with attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.block(x)


class Heads(nn.Module):
    """Attention with a kernel of the GPU: flash attention for half precision, else the memory-efficient one, else the
    formula."""

    def __init__(self, depth: int, dtype: torch.dtype, causal: bool, masked: bool):
        super().__init__()
        self.depth, self.causal, self.masked = depth, causal, masked
        self.mix = nn.Linear(2 * depth, 6 * depth, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, self.depth)).permute(2, 0, 3, 1, 4)
        mask = x.new_zeros(x.shape[1], x.shape[1]).fill_(-1).tril() if self.masked else None
        return (
            nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal).transpose(1, 2).flatten(2)
        )


class Mixed(nn.Module):
    """A transformer block in mixed precision, as scripts for GPUs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.block(x).softmax(-1)


KERNELS = {
    "flash": (16, torch.bfloat16, True, False),
    "padded": (12, torch.bfloat16, True, False),
    "efficient": (8, torch.float32, True, False),
    "masked": (8, torch.float32, False, True),
    "formula": (6, torch.float32, True, False),
    "double": (8, torch.float64, True, False),
}
ROWS: Any = ({0: Dim("batch", min=2, max=64)},)
BOTH: Any = ({0: ROWS[0][0], 1: Dim("length", min=2, max=512)},)
LAST = torch.channels_last
NAMES = ("mlp", "bfloat16", "convolutions", "channels_last", "attention", "mixed", *KERNELS, "step", "recorded")


def module(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the module of that name, from the same seed each time, and an example."""
    torch.manual_seed(0)
    made: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
        "mlp": lambda: (
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)),
            torch.randn(5, 8, requires_grad=True),
        ),
        "bfloat16": lambda: (
            nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).bfloat16(),
            torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True),
        ),
        "convolutions": lambda: (zoo.ConvNet(), torch.randn(5, 3, 8, 8, requires_grad=True)),
        "channels_last": lambda: (
            zoo.ConvNet().to(memory_format=LAST),
            torch.randn(5, 3, 8, 8).to(memory_format=LAST).requires_grad_(),
        ),
        "mixed": lambda: (Mixed(), torch.randn(5, 6, 16, requires_grad=True)),
        "attention": lambda: (Attentive(), torch.randn(5, 6, 16, requires_grad=True)),
    }
    if name in KERNELS:
        net = Heads(*KERNELS[name])
        return net, torch.randn(5, 6, 2 * net.depth, dtype=net.mix.weight.dtype, requires_grad=True)
    return made[name]()


def write(path: Path, name: str, dynamic: bool, target: str) -> None:
    """Export the program of that name for ``target``."""
    torch.manual_seed(0)
    rows = ROWS if dynamic else None
    if name == "recorded":
        _record(path, dynamic)
        ab.rebuild(path, path, target=target)
    elif name == "step":
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        variant = ab.Variant((torch.randn(6, 4), torch.randint(0, 3, (6,))), dynamic_shapes=rows and (rows[0], rows[0]))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        ab.export(path, {name: ab.Step(net, [variant], optimizer, loss_fn=nn.functional.cross_entropy)}, target=target)
    else:
        program, x = module(name)
        shapes = BOTH if dynamic and name in KERNELS else rows
        ab.export(path, {name: ab.Module(program, [ab.Variant((x,), dynamic_shapes=shapes)])}, target=target)


def _record(path: Path, dynamic: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with ab.record(path, tune="none") as recording:
        for rows in (3, 5, 6) if dynamic else (4, 4):
            net(torch.randn(rows, 4)).square().mean().backward()
    assert not recording.skipped, recording.skipped

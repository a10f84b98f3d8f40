"""Convolutions and their gradients read images in the memory format that eager's read: oneDNN reports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import aot_backward as ab

IMAGES = (16, 16, 10, 10)

PROGRAM = """
import ctypes, sys, torch
from aot_backward_runtime import load
from tests.export.test_convolution_layouts import IMAGES, Block
Block()(torch.ones(IMAGES)).backward()
ctypes.CDLL(None).fflush(None)  # oneDNN's lines
print("compiled", flush=True)
load(sys.argv[1]).grad()(torch.ones(IMAGES))
"""


class Block(nn.Module):
    """A block of ConvNeXt: its permutations put the channels last without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.last = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(self.wide(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return self.last(y + x).square().mean()


def layouts(reported: str) -> list[str]:
    """Return what each convolution computes, and the layouts of its images."""
    fields = [line.split(",") for line in reported.splitlines() if ",exec,cpu,convolution," in line]
    assert fields
    return sorted(f"{f[7]} {[part for part in f[8].split() if part.startswith(('src', 'dst'))]}" for f in fields)


def test_a_depthwise_convolution_reads_what_eager_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = ab.export_grad(Block(), (torch.randn(IMAGES),), path=tmp_path / "block.pt2", tune="none")
    env = {**os.environ, "ONEDNN_VERBOSE": "1"}
    process = subprocess.run([sys.executable, "-c", PROGRAM, path], check=True, capture_output=True, text=True, env=env)
    eager, compiled = map(layouts, process.stdout.split("\ncompiled\n"))
    assert compiled == eager
    assert any("acdb" in line for line in eager)  # channels last

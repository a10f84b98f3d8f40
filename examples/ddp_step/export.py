"""Digits on several processes, first half: export a training step that can average gradients over processes.

python examples/ddp_step/export.py ddp_step.pt2
torchrun --standalone --nproc-per-node 2 examples/ddp_step/train.py ddp_step.pt2 ddp_step.safetensors
"""

import sys

import torch
from torch import nn

import aot_backward as ab


def network() -> nn.Sequential:
    """Return a network from images (batch, 64) in [0, 1] to the logits (batch, 10) of the ten digits."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["ddp_step.pt2"]
    net = network()
    batch = {0: torch.export.Dim("batch", min=2, max=1024)}
    ab.export_step(
        net,
        (torch.rand(8, 64), torch.randint(10, (8,))),
        loss_fn=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3),
        dynamic_shapes=(batch, batch),
        distributed=True,
        clip_norm=5.0,
        path=path,
    )
    print(f"wrote {path}")

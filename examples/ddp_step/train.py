"""Digits over several processes, second half: each takes its share of every batch, and goes on from the saved state if there is one.

    torchrun --standalone --nproc-per-node 2 examples/ddp_step/train.py ddp_step.pt2 ddp_step.safetensors

Started again, it does the epochs that are missing: after Ctrl-C, after a kill -9, or by itself where torchrun is given --max-restarts. (With
torch 2.13, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 then: else restarted processes look for the dead ones' addresses.) Without torchrun it is
one process, which takes whole batches: the same training, but for rounding.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import aot_backward_runtime

EPOCHS, BATCH, TRAINING = 12, 64, 1344


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """1,344 images of 8x8 pixels, as rows, and what they show."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))[:TRAINING]
    return torch.from_numpy(digits.data).float()[order] / 16, torch.from_numpy(digits.target)[order]


def main(package: str, state: str, epochs: int = EPOCHS) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    images, labels = data()
    step = aot_backward_runtime.load(package).step()
    if world > 1:
        dist.init_process_group("gloo")
        step.distribute()
    torch.manual_seed(rank)  # for dropout, of which this network has none
    first = step.resume(state)["epoch"] if Path(state).exists() else 0
    for epoch in range(first, epochs):
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))  # the same in every process
        losses = [step(images[rows], labels[rows]) for rows in (batch.chunk(world)[rank] for batch in order.split(BATCH))]
        loss = torch.stack(losses).mean() / world
        if world > 1:
            dist.all_reduce(loss)
        step.save(state, {"epoch": epoch + 1})  # called by all; the first writes
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.6f}", flush=True)
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:3] or ["ddp_step.pt2", "ddp_step.safetensors"]), *map(int, sys.argv[3:]))

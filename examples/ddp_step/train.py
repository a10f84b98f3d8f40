"""Digits on several processes, second half: each takes its share of every batch. They resume from the saved state if it
exists.

    torchrun --standalone --nproc-per-node 2 examples/ddp_step/train.py ddp_step.pt2 ddp_step.safetensors

After Ctrl-C or kill -9, start the script again: it trains the missing epochs. torchrun --max-restarts does this by
itself. (With torch 2.13, also set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Otherwise restarted processes look for the
addresses of the dead ones.) Without torchrun, one process takes whole batches. The results then differ only by
rounding.
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
    """Return 1,344 images of 8x8 pixels as rows, and their digits."""
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
    torch.manual_seed(rank)  # for dropout, which this network does not use
    first = step.resume(state)["epoch"] if Path(state).exists() else 0
    for epoch in range(first, epochs):
        order = torch.randperm(TRAINING, generator=torch.Generator().manual_seed(epoch))  # the same in every process
        losses = [
            step(images[rows], labels[rows]) for rows in (batch.chunk(world)[rank] for batch in order.split(BATCH))
        ]
        loss = torch.stack(losses).mean() / world
        if world > 1:
            dist.all_reduce(loss)
        step.save(state, {"epoch": epoch + 1})  # every process calls it; the first one writes
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.6f}", flush=True)
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*(sys.argv[1:3] or ["ddp_step.pt2", "ddp_step.safetensors"]), *map(int, sys.argv[3:]))

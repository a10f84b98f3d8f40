"""Ordinary DistributedDataParallel in the ways that it is used, ten steps each: ``ddp_modes.py FOLDER CASE…``. Each rank leaves a file of losses,
gradients and parameters there. It knows nothing of this project."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: the defaults of its functions keep the one that there is when it is imported
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 10


class Heads(nn.Module):
    """Two heads, of which ``which`` says the ones that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, which: str) -> list[Tensor]:
        y = torch.tanh(self.body(x))
        return [getattr(self, name)(y) for name in which.split()]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def batch(step: int, last: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    rows = last if step % 5 == 4 else 8
    return torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


Step = Callable[[Any, int], Tensor]


def plain(ddp: Any, step: int) -> Tensor:
    x, y = batch(step)
    return backward(ddp(x), y)


def backward(output: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(output, y)
    loss.backward()
    return loss


def uneven(ddp: Any, step: int) -> Tensor:
    """The last batch of an epoch is smaller, and another one on each rank."""
    x, y = batch(step, last=7 - dist.get_rank())
    return backward(ddp(x), y)


def accumulated(ddp: Any, step: int) -> Tensor:
    with ddp.no_sync():
        plain(ddp, 100 + step)
        plain(ddp, 200 + step)
    return plain(ddp, step)


def unused(ddp: Any, step: int) -> Tensor:
    """The second head is computed in every other step alone; rank 1 computes it in other steps than rank 0."""
    x, y = batch(step)
    return backward(sum(ddp(x, "first second" if (step + dist.get_rank()) % 2 else "first")), y)  # type: ignore[arg-type]


def ignored(ddp: Any, step: int) -> Tensor:
    """Both heads are computed, and the loss is of one."""
    x, y = batch(step)
    return backward(ddp(x, "first second")[0], y)


def joined(ddp: Any, step: int) -> Tensor:
    return plain(ddp, step)


def hooked(ddp: Any, step: int) -> Tensor:
    """A hook of the script on a parameter, which runs before the reducer's."""
    if step == 0:
        ddp.module[3].weight.register_hook(lambda grad: grad * 0.5)
    return plain(ddp, step)


CASES: dict[str, tuple[Step, Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (plain, net, {}),
    "buckets": (plain, net, {"bucket_cap_mb": 0.0005}),
    "no_sync": (accumulated, net, {}),
    "bucket_view": (accumulated, net, {"gradient_as_bucket_view": True}),
    "uneven": (uneven, net, {}),
    "comm_hook": (plain, net, {}),
    "join": (joined, net, {}),
    "unused": (unused, Heads, {"find_unused_parameters": True}),
    "ignored": (ignored, Heads, {"find_unused_parameters": True}),
    "static_graph": (plain, net, {"static_graph": True}),
    "hooked": (hooked, net, {}),
}


def run(case: str) -> Iterator[tuple[str, Tensor]]:
    step_of, module, options = CASES[case]
    torch.manual_seed(len(case) + 10 * dist.get_rank())  # DDP makes the ranks' parameters the same
    ddp = DDP(module(), **options)
    if case == "comm_hook":
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    steps = STEPS - 3 * dist.get_rank() if case == "join" else STEPS
    with Join([ddp]) if case == "join" else nullcontext():
        for step in range(steps):
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            yield f"loss {step}", step_of(ddp, step).detach()
            for name, p in ddp.named_parameters():
                if p.grad is not None:
                    yield f"gradient {step} {name}", p.grad.clone()
            optimizer.step()
    yield from ((name, tensor.detach().clone()) for name, tensor in ddp.state_dict().items())


def main(folder: str, *cases: str) -> None:
    dist.init_process_group("gloo")
    group = weakref.ref(dist.group.WORLD)
    for case in cases or CASES:
        torch.save(dict(run(case)), Path(folder) / f"{case}.{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        Path(folder, "modules.txt").write_text("\n".join(sorted(sys.modules)))
    dist.destroy_process_group()
    gc.collect()  # DDP modules are cycles, and keep the group
    assert group() is None, "threads of the group may abort the process when it ends (PyTorch's issue 190489)"


if __name__ == "__main__":
    main(*sys.argv[1:])

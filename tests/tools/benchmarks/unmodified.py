"""``python -m tests.tools.benchmarks.unmodified MODEL foreach|fused STEPS``: an ordinary training script that does not
import this project.

It prints JSON: the median time of a step in the second half, the losses of the first 50 steps, the number of
parameters, and their sum after ten steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, ...]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(states), self.critic(states).squeeze(-1)


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(27, 24)
        self.body = nn.Sequential(nn.Linear(72, 128), nn.Tanh(), nn.Linear(128, 27))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.characters(x).flatten(1))


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.head(x.flatten(1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, 4, width // 4).transpose(1, 2)
            for t in self.qkv(self.before_attention(x)).split(width, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(65, width), nn.Embedding(16, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 65)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def cross_entropy(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def proximal_policy(
    net: nn.Module, states: torch.Tensor, actions: torch.Tensor, old: torch.Tensor, gain: torch.Tensor
) -> torch.Tensor:
    logits, values = net(states)
    all_logs = F.log_softmax(logits, dim=-1)
    ratio = (all_logs.gather(1, actions[:, None]).squeeze(1) - old).exp()
    policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    entropy = -(all_logs.exp() * all_logs).sum(-1).mean()
    return policy + 0.5 * F.mse_loss(values, gain) - 0.01 * entropy


def tokens(rows: int) -> Batch:
    x = torch.randint(0, 65, (rows, 12))
    return x, (x + 1) % 65


def transitions(rows: int) -> Batch:
    return torch.randn(rows, 8), torch.randint(0, 4, (rows,)), torch.full((rows,), -1.4), torch.randn(rows)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], int, Callable[..., torch.Tensor]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        lambda n: (torch.randn(n, 64), torch.randint(0, 10, (n,))),
        32,
        cross_entropy,
    ),
    "ppo": (ActorCritic, transitions, 64, proximal_policy),
    "next-character": (
        NextCharacter,
        lambda n: (torch.randint(0, 27, (n, 3)), torch.randint(0, 27, (n,))),
        32,
        cross_entropy,
    ),
    "digits": (Digits, lambda n: (torch.randn(n, 1, 8, 8), torch.randint(0, 10, (n,))), 32, cross_entropy),
    "transformer-30k": (lambda: Transformer(32), tokens, 8, cross_entropy),
    "transformer-110k": (lambda: Transformer(64), tokens, 16, cross_entropy),
}


def main(name: str, how: str, steps: int, prepare: Callable[[nn.Module], object] = lambda net: None) -> None:
    """Train, and print the results. The script calls ``prepare`` with its module before it trains."""
    torch.manual_seed(0)
    make, batch, rows, loss_of = MODELS[name]
    net = make()
    prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True if how == "fused" else None)
    times, losses, after_ten = [], [], 0.0
    for step in range(steps):
        given = batch(rows if step % 10 else rows // 2)  # the last batch of an epoch is smaller
        start = time.perf_counter()
        loss = loss_of(net, *given)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 10:
            times.append(time.perf_counter() - start)
        if step < 50:
            losses.append(loss.item())
        if step == 9:
            after_ten = sum(p.double().sum().item() for p in net.parameters())
    count = sum(p.numel() for p in net.parameters())
    print(
        json.dumps(
            {
                "seconds": statistics.median(times[len(times) // 2 :]),
                "losses": losses,
                "parameters": count,
                "after_ten": after_ten,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

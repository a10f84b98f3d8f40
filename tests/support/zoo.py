"""Small real models of common families, each compiled in seconds. One line here adds one case everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import Dim


@dataclass(frozen=True)
class Case:
    """A module, its example arguments and its dynamic dimensions. ``args(n)`` returns arguments of another size."""

    module: nn.Module
    args: Callable[[int], tuple[Any, ...]]
    dynamic_shapes: Any
    sizes: tuple[int, ...] = (3, 5)
    mode: str = "train"
    relative: float | None = None  # tolerance, if another order of rounding changes results by more than usual


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.BatchNorm2d(16),
            nn.GELU(),
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        out, state = self.lstm(x)
        return self.head(out), state


class Embedder(nn.Module):
    """Embedding and EmbeddingBag, the tables of a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(50, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(40, 8, mode="sum")
        self.out = nn.Linear(16, 1)

    def forward(self, item: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.item(item), self.bag(tags)], 1)).squeeze(1)


class Two(nn.Module):
    """Two outputs in a dict; tied, unused and frozen parameters; dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.3)
        self.b = nn.Linear(16, 4)
        self.unused = nn.Linear(3, 3)
        self.tied = nn.Linear(8, 16)
        self.tied.weight = self.a.weight
        self.scale = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        h = self.drop(torch.relu(self.norm(self.a(x) + self.tied(x))))
        return {
            "out": self.b(h) * self.scale + y,
            "hidden": h,
            "n": 3,
            "y": y,
            "rows": 2 * x.shape[0],
            "flat": (x * 2).view(-1),
        }


class HalfPrecision(nn.Module):
    """Autocast inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.net(x)
        return y.float()


def _transformers(name: str) -> nn.Module:
    import transformers

    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=60,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
        )
        return transformers.BertModel(config)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _real(*shape: int) -> Callable[[int], tuple[torch.Tensor]]:
    return lambda n: (torch.randn(n, *shape).requires_grad_(),)


def _batch(name: str = "x") -> dict[str, Any]:
    return {name: {0: Dim("batch", min=1, max=64)}}


def make(name: str) -> Case:
    """Return the case of that name, made from the same seed each time."""
    torch.manual_seed(7)
    return _CASES[name]()


_CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)),
        _real(8),
        {"input": {0: Dim("batch", min=1, max=64)}},
    ),
    "conv": lambda: Case(ConvNet(), _real(3, 8, 8), _batch()),
    "lstm": lambda: Case(Recurrent(), _real(5, 6), _batch()),
    "encoder": lambda: Case(
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        ),
        _real(6, 16),
        {"src": {0: Dim("batch", min=1, max=64)}},
    ),
    "embedding": lambda: Case(
        Embedder(),
        lambda n: (torch.randint(0, 50, (n,)), torch.randint(0, 40, (n, 4))),
        {"item": {0: Dim("batch", min=1, max=64)}, "tags": {0: Dim("batch", min=1, max=64)}},
    ),
    "bert": lambda: Case(
        _transformers("bert"),
        lambda n: (torch.randint(0, 60, (n, 7)),),
        {"input_ids": {0: Dim("batch", min=1, max=64)}},
    ),
    "llama": lambda: Case(
        _transformers("llama"),
        lambda n: (torch.randint(0, 60, (n, 7)),),
        {"input_ids": {0: Dim("batch", min=2, max=64)}},
    ),
    "two": lambda: Case(
        Two(),
        lambda n: (torch.randn(n, 8).requires_grad_(), torch.randn(n, 1)),
        {"x": {0: Dim("batch", min=2, max=64)}, "y": {0: Dim("batch", min=2, max=64)}},
    ),
    "autocast": lambda: Case(HalfPrecision(), _real(8), _batch(), relative=2e-2),
}
NAMES = tuple(_CASES)

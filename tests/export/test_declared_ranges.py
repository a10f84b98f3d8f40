"""That nothing between the trace and native code narrows a size whose range was declared: neither the trace, nor the passes over joint graphs, the
partitioner, the decompositions, or lowering. Each may ask a size only for speed, and each new torch asks elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_runtime import load

LEAST, MOST = 2, 200


class Pairs(nn.Module):
    """Products of matrices with the dynamic size in each of their places, also twice: atoms x atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, pos: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(pos))
        near = torch.softmax(hidden @ hidden.T, 1)
        return self.second(near @ hidden).square().mean() + (near.T @ near).sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 16), nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return nn.functional.cross_entropy(x.flatten(0, 1), tokens.flatten()) + x.cumsum(1).logsumexp(-1).mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class Words(nn.Module):
    """Two dynamic sizes that views merge: each of them may be 1, where torch's own trace allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(self.embed(tokens)).flatten(0, 1), tokens.flatten())


class Heads(nn.Module):
    """An attention's output, whose strides are not those of its sizes, viewed as rows by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = (t.view(rows, length, 2, width // 2).transpose(1, 2) for t in self.mixed(x).split(width, dim=2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(rows, length, width)).square().mean()


def dynamic(*names: str, least: int = LEAST) -> dict[int, Dim]:
    return {i: Dim(name, min=least, max=MOST) for i, name in enumerate(names)}


CASES = {
    "pairs": (Pairs, lambda n: (torch.randn(n, 3, requires_grad=True),), [dynamic("atoms")], ("module", "grad", "step")),
    "attention": (Attention, lambda n: (torch.randint(0, 10, (n, n + 1)),), [dynamic("rows", "length")], ("grad",)),
    "images": (Images, lambda n: (torch.randn(n, 1, 8, 8),), [dynamic("rows", least=1)], ("module", "grad")),
    "words": (Words, lambda n: (torch.randint(0, 10, (n, n)),), [dynamic("rows", "length", least=1)], ("module", "grad")),
    "heads": (Heads, lambda n: (torch.randn(n, n, 8),), [dynamic("rows", "length", least=1)], ("module", "grad")),
}


@pytest.mark.parametrize("name", CASES)
def test_no_pass_narrows_a_declared_range(name: str, tmp_path: Path) -> None:
    if name in ("words", "heads") and not torch_api.at_least("2.13"):
        pytest.skip("Inductor before 2.13 asks for the product of two sizes whether it is at least 2")
    make, inputs, shapes, kinds = CASES[name]
    torch.manual_seed(0)
    model = make()
    variants = [ab.Variant(inputs(5), dynamic_shapes=shapes)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made = {
        "module": lambda: ab.Module(model, variants),
        "grad": lambda: ab.Grad(model, variants, wrt="parameters"),
        "step": lambda: ab.Step(model, variants, optimizer),
    }
    package = load(ab.export(tmp_path / "open.pt2", {kind: made[kind]() for kind in kinds}))
    for kind, entry in package.manifest.entries.items():
        (variant,) = entry.variants
        assert variant.guards == (), kind
        assert {(s.label, s.minimum, s.maximum) for s in variant.symbols} == {(d.__name__, d.min, MOST) for d in shapes[0].values()}, kind
    grad = package.grad("grad")
    for n in (shapes[0][0].min, 33, MOST - 1):  # beside and beyond each limit that torch has
        args = inputs(n)
        expected = dict(zip([k for k, _ in model.named_parameters()], torch.autograd.grad(model(*args), list(model.parameters())), strict=True))
        torch.testing.assert_close(dict(grad(*args)[1]), expected, rtol=1e-3, atol=1e-5)

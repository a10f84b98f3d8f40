"""Requests that PyTorch could not serve: one test each, named after its issue
(https://github.com/pytorch/pytorch/issues/NUMBER)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load

from ..support import exports
from ..support.oracle import assert_same, run

ROWS = {0: Dim("rows", min=1, max=1024)}


class Potential(nn.Module):
    """153251: a model with a meaningful gradient, so that serving it needs its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Square(nn.Module):
    """125984: the forward is itself a gradient."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(x.square().sum(), x)


class Improved(nn.Module):
    """125984, a comment of 2024-09-12: an action, moved along the gradient of its value from a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        if not state.requires_grad:
            state = state.detach().requires_grad_()
        action = self.policy(state)
        value = self.critic(torch.cat([state, action], -1))
        return action + 0.5 * torch.autograd.grad(value.sum(), action, create_graph=True)[0]


class Operators(nn.Module):
    """146719: gradients within the forward, through each of the report's operators, in a trainable model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.requires_grad_()
        product = x * y * self.weight
        values = [
            product.square().sum().sqrt(),
            product.square().sum().rsqrt(),
            (0.1 * product).square().sum().exp(),
            torch.linalg.norm(x * self.weight, dim=-1).sum(),
            torch.matmul((x * self.weight)[:, None], y.t()).square().sum(),
        ]
        return [torch.autograd.grad(v, x, create_graph=True)[0] for v in values]


class Tied(nn.Module):
    """147380: a language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            self.head(torch.tanh(self.body(self.embed(ids)))).flatten(0, 1), labels.flatten()
        )


class ThroughSavedOutputs(nn.Module):
    """187907: gradients within the forward, through operators that save their output, with a dynamic batch."""

    def forward(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = param.clone().requires_grad_(True)
        outs = torch.sqrt(leaf), torch.reciprocal(leaf)
        first, second = (torch.autograd.grad(o, leaf, grad_outputs=torch.ones_like(o))[0].detach() for o in outs)
        return first, second


class Quartic(nn.Module):
    """183603: a gradient that the caller differentiates again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x**4).sum(), x, create_graph=True)[0]


class Autoencoder(nn.Module):
    """138901: the gradient of an activation. 130580 and the donated buffers: several backward passes through one
    forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm, self.decoder = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor, probe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.gelu(self.norm(self.encoder(x))) + probe
        return self.decoder(hidden), hidden


def programs() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], object]]:
    """Name -> module, example inputs, dynamic shapes."""
    torch.manual_seed(2)
    return {
        "potential": (Potential().eval().requires_grad_(False), (torch.randn(3, 4, requires_grad=True),), {"x": ROWS}),
        "square": (Square(), (torch.ones(3, requires_grad=True),), None),
        "improved": (Improved(), (torch.randn(3, 4),), {"state": ROWS}),
        "operators": (Operators(), (torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)), None),
        "tied": (Tied(), (torch.randint(0, 20, (2, 5)), torch.randint(0, 20, (2, 5))), None),
        "saved": (ThroughSavedOutputs(), (torch.rand(2, 3) + 0.5,), {"param": ROWS}),
        "quartic": (Quartic(), (torch.tensor([0.5, 1.5, 2.5, 3.5], requires_grad=True),), None),
        "autoencoder": (
            Autoencoder(),
            (torch.randn(4, 6, requires_grad=True), torch.zeros(4, 12, requires_grad=True)),
            None,
        ),
    }


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        entries = {
            n: ab.Module(m, [ab.Variant(args, dynamic_shapes=sizes)]) for n, (m, args, sizes) in programs().items()
        }
        ab.export(path, entries)

    return exports.shared("asked_for", make)


def both(package: Path, name: str) -> tuple[nn.Module, nn.Module]:
    """Return the loaded module and eager's."""
    return load(package).module(name).train(programs()[name][0].training), programs()[name][0]


def test_153251_backward_for_inference_fed_by_incoming_gradients(package: Path) -> None:
    loaded, eager = both(package, "potential")
    for rows in (3, 1, 40):
        torch.manual_seed(rows)
        values, scale = torch.randn(rows, 4), torch.randn(3)
        gradients = []
        for module in (loaded, eager):
            x = values.clone().requires_grad_()
            out = module(x)
            after = out.detach().requires_grad_()
            # Computed after the model, outside of it
            (incoming,) = torch.autograd.grad((after * scale).sin().sum(), after)
            gradients.append(torch.autograd.grad(out, x, incoming)[0])
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert not any(p.requires_grad for p in loaded.parameters())


def test_125984_export_of_autograd_grad(package: Path) -> None:
    loaded, _ = both(package, "square")
    for x in (torch.ones(3), torch.randn(3)):
        torch.testing.assert_close(loaded(x.requires_grad_()), (2 * x.detach(),))
    loaded, eager = both(package, "improved")
    for rows in (3, 1, 8):
        args = (torch.randn(rows, 4),)
        assert_same(run(loaded, args, 1), run(eager, args, 1))


def test_146719_sqrt_rsqrt_exp_norm_and_matmul_in_that_path(package: Path) -> None:
    loaded, eager = both(package, "operators")
    for seed in range(2):
        torch.manual_seed(seed)
        args = (torch.randn(5, 3, requires_grad=True), torch.randn(5, 3))
        assert_same(run(loaded, args, seed), run(eager, args, seed))
        for which in range(5):  # loss.backward() of each separately, as in the report
            cotangents = [torch.randn(5, 3) if i == which else None for i in range(5)]
            assert_same(run(loaded, args, cotangents), run(eager, args, cotangents))


def test_147380_tied_weights(package: Path) -> None:
    loaded, eager = both(package, "tied")
    assert loaded.head.weight is loaded.embed.weight
    args = programs()["tied"][1]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (loaded, eager)]
    for seed in range(3):
        assert_same(run(loaded, args, seed), run(eager, args, seed))
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(loaded.state_dict()["head.weight"], loaded.state_dict()["embed.weight"])


def test_187907_symbolic_shape_baked_in(package: Path) -> None:
    loaded, eager = both(package, "saved")
    for rows in (2, 1, 7, 1024):
        x = torch.rand(rows, 3) + 0.5
        torch.testing.assert_close(loaded(x), eager(x))


def test_183603_second_order(package: Path) -> None:
    loaded, eager = both(package, "quartic")
    x = programs()["quartic"][1][0]
    (second,) = torch.autograd.grad(loaded(x).sum(), x)
    torch.testing.assert_close(second, torch.tensor([3.0, 27.0, 75.0, 147.0]))
    assert_same(run(loaded, (x,), 1), run(eager, (x,), 1))


def activations(module: nn.Module) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
    """Return gradients of the activation's probe, of the input and of the parameters, and the activation's retained
    gradient."""
    module.zero_grad()
    x, probe = (t.detach().clone().requires_grad_() for t in programs()["autoencoder"][1])
    out, hidden = module(x, probe)
    hidden.retain_grad()
    (out.square().sum() + hidden.sin().sum()).backward()
    return [probe.grad, x.grad, *(p.grad for p in module.parameters())], hidden.grad


def test_138901_retains_grad(package: Path, tmp_path: Path) -> None:
    """The full gradient of an activation. A module gives it through an added input of zeros; a recorded backward pass
    gives it through ``retain_grad``."""
    loaded, eager = both(package, "autoencoder")
    expected, kept = activations(eager)
    torch.testing.assert_close(expected[0], kept)
    torch.testing.assert_close(activations(loaded)[0], expected, rtol=1e-4, atol=1e-6)
    with ab.record(tmp_path / "recorded.pt2", min_seen=1):
        activations(eager)
    with ab.replay(tmp_path / "recorded.pt2", strict=True) as replaying:
        torch.testing.assert_close(activations(eager), (expected, kept), rtol=1e-4, atol=1e-6)
    assert replaying.report.bindings == 1


def test_130580_retain_graph_both_ways(package: Path) -> None:
    """The package keeps all saved activations: a second backward gives the same gradients. Without retain_graph it
    raises eager's error."""
    loaded, eager = both(package, "autoencoder")
    x, probe = programs()["autoencoder"][1]
    gradients = []
    for module in (loaded, eager):
        targets = [*module.parameters(), x, probe]
        loss = module(x, probe)[0].square().sum()
        first = torch.autograd.grad(loss, targets, retain_graph=True)
        again = torch.autograd.grad(loss, targets)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, targets)
        gradients.append(first)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def adaptive(module: nn.Module) -> list[torch.Tensor | None]:
    """Compute the weight of an adversarial loss, a gradient of each loss at the last layer through one forward, then
    the backward of both."""
    module.zero_grad()
    x, probe = (t.detach().clone().requires_grad_() for t in programs()["autoencoder"][1])
    out, hidden = module(x, probe)
    first, second = out.square().mean(), hidden.sin().mean() + out.mean()
    norms = [torch.autograd.grad(loss, module.decoder.weight, retain_graph=True)[0].norm() for loss in (first, second)]
    total = first + (norms[0] / (norms[1] + 1e-4)).detach() * second
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()
    return [x.grad, probe.grad, *(p.grad for p in module.parameters())]


def test_donated_buffers_do_not_break_a_second_backward(package: Path) -> None:
    """This runs in a subprocess, so that a signal is a failure."""
    script = """
import sys, torch
from pathlib import Path
from tests.export.test_asked_for import adaptive, both
loaded, eager = both(Path(sys.argv[1]), "autoencoder")
for _ in range(3):
    torch.testing.assert_close(adaptive(loaded), adaptive(eager), rtol=1e-4, atol=1e-6)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(package)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr

"""Modules exported with ``order=2``: their gradients are differentiated again as in eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import GradientError, load

from ..conftest import aot_backward
from ..support import exports
from ..support.oracle import assert_same
from ..support.packages import EXAMPLES, put_together, taken_apart


class Critic(nn.Module):
    """A net with a norm, dropout, a tied layer, an unused parameter and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(5, 12), nn.LayerNorm(12), nn.Dropout(0.3)
        self.second, self.tied, self.head = nn.Linear(12, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 1)
        self.tied.weight = self.second.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        h = torch.nn.functional.silu(self.second(h)) + self.tied(h)
        return {"score": self.head(h)[:, 0] * scale, "features": h}


class Energy(nn.Module):
    """The energy of particles in three dimensions, from their distances."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        pairs = torch.triu_indices(positions.shape[0], positions.shape[0], 1)
        distance = (positions[pairs[0]] - positions[pairs[1]]).norm(dim=1, keepdim=True)
        return self.net(distance).sum()


def convolutions() -> nn.Module:
    layers = [
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ELU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 3, 3),
        nn.Flatten(),
        nn.Linear(12, 4),
    ]
    return nn.Sequential(*layers)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(8)
    return kind()


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        rows = {0: Dim("rows", min=2, max=100)}
        critic = ab.Variant(
            (torch.randn(6, 5), torch.ones(6)),
            dynamic_shapes=(rows, rows),
            requires_grad=["x", "parameters"],
            mode="train",
        )
        energy = ab.Variant((torch.randn(4, 3, requires_grad=True),))
        image = ab.Variant((torch.randn(3, 2, 8, 8, requires_grad=True),))
        ab.export(
            path,
            {
                "critic": ab.Module(made(Critic), [critic], order=2),
                "energy": ab.Module(made(Energy), [energy], order=2),
                "thrice": ab.Module(made(Energy), [energy], order=3),
                "image": ab.Module(made(convolutions), [image], order=2),
                "once": ab.Module(made(Energy), [energy]),
            },
        )

    return exports.shared("second-order", make)


def beside(
    package: Path, entry: str, kind: Callable[[], nn.Module], use: Callable[[nn.Module], dict[str, Any]]
) -> None:
    """Compare ``use`` of the loaded module and of eager: its results, every ``.grad`` and every buffer."""
    results = []
    for module in (load(package).module(entry), made(kind)):
        torch.manual_seed(31)
        out = {n: None if t is None else t.detach() for n, t in use(module).items()}
        out |= {f"grad of {n}": p.grad for n, p in module.named_parameters(remove_duplicate=False)}
        results.append(out | {f"buffer {n}": b.clone() for n, b in module.named_buffers()})
    assert_same(*results, relative=1e-4)


@pytest.mark.parametrize("rows", [6, 40])
def test_a_gradient_penalty(package: Path, rows: int) -> None:
    """In training mode both have the same dropout mask."""

    def penalized(module: nn.Module) -> dict[str, Any]:
        x = torch.randn(rows, 5, requires_grad=True)
        out = module(x, torch.linspace(1, 2, rows))
        (gradient,) = torch.autograd.grad(out["score"].sum(), x, create_graph=True)
        loss = ((gradient.norm(dim=1) - 1) ** 2).mean() + out["score"].pow(2).mean() + out["features"].mean()
        loss.backward()
        return {"loss": loss, "gradient": gradient, "grad of x": x.grad, "next random number": torch.rand(1)}

    beside(package, "critic", Critic, penalized)


def test_trained_on_forces(package: Path) -> None:
    def trained(module: nn.Module) -> dict[str, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        losses = {}
        for i in range(5):
            positions = torch.randn(4, 3, requires_grad=True)
            energy = module(positions)
            (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
            loss = energy**2 + (forces - positions.detach()).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[f"loss {i}"] = loss
        return losses

    beside(package, "energy", Energy, trained)


def test_hessians_and_vectors(package: Path) -> None:
    def curved(module: nn.Module) -> dict[str, Any]:
        x, v = torch.randn(4, 3), torch.randn(4, 3)
        _, product = torch.autograd.functional.vhp(module, x, v)
        return {"product": product, "hessian": torch.autograd.functional.hessian(module, x)}

    beside(package, "energy", Energy, curved)


def test_products_by_differentiating_back_and_forth(package: Path) -> None:
    """``hvp`` differentiates a second backward by its inputs: a third order."""

    def product(module: nn.Module) -> dict[str, Any]:
        x, v = torch.randn(4, 3), torch.randn(4, 3)
        return {"product": torch.autograd.functional.hvp(module, x, v)[1]}

    beside(package, "thrice", Energy, product)
    with pytest.raises(GradientError, match="no derivatives of this order"):
        product(load(package).module("energy"))
    with pytest.raises(GradientError, match="export the module with order=2"):
        product(load(package).module("once"))


def test_the_third_derivative(package: Path) -> None:
    def thrice(module: nn.Module) -> dict[str, Any]:
        x = torch.randn(4, 3, requires_grad=True)
        (first,) = torch.autograd.grad(module(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        second.pow(3).sum().backward()
        return {"first": first, "second": second, "grad of x": x.grad}

    beside(package, "thrice", Energy, thrice)


def test_convolutions_and_batch_statistics(package: Path) -> None:
    """Batch statistics are updated once."""

    def double(module: nn.Module) -> dict[str, Any]:
        x = torch.randn(3, 2, 8, 8, requires_grad=True)
        incoming = torch.randn(3, 4, requires_grad=True)
        gradients = torch.autograd.grad(module(x), [x, *module.parameters()], incoming, create_graph=True)
        sum((g * torch.cos(g)).sum() for g in gradients).backward()
        return {"grad of x": x.grad, "grad of incoming": incoming.grad} | {
            f"gradient {i}": g for i, g in enumerate(gradients)
        }

    beside(package, "image", convolutions, double)


def test_batched_gradients(package: Path) -> None:
    """Rows of a Hessian at once, and their derivative; without ``order=2`` the derivative is refused."""

    def rows(module: nn.Module) -> dict[str, Any]:
        x, scales = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        (first,) = torch.autograd.grad(module(x), x, scales, is_grads_batched=True, create_graph=True)
        first.sin().sum().backward()
        (plain,) = torch.autograd.grad(module(x), x, create_graph=True)
        (hessian,) = torch.autograd.grad(plain, x, torch.eye(12).reshape(12, 4, 3), is_grads_batched=True)
        return {"first": first, "grad of x": x.grad, "grad of scales": scales.grad, "hessian": hessian}

    beside(package, "energy", Energy, rows)
    with pytest.raises(GradientError, match="export the module with order=2"):
        rows(load(package).module("once"))


def test_some_outputs_and_some_parameters(package: Path) -> None:
    """Only one output gets an incoming gradient, and frozen parameters get none. Parameters that only the other output
    reaches get zeros, not eager's None."""

    def partial(module: nn.Module) -> dict[str, Any]:
        module.first.requires_grad_(False)
        x = torch.randn(4, 5, requires_grad=True)
        features = module(x, torch.ones(4))["features"]
        names = ["second.weight", "head.weight", "unused"]
        parameters = dict(module.named_parameters())
        gradients = torch.autograd.grad(
            features.pow(2).sum(), [parameters[n] for n in names], create_graph=True, allow_unused=True
        )
        gradients[0].pow(2).sum().backward()
        for parameter in module.head.parameters():
            assert parameter.grad is None or not parameter.grad.any()
            parameter.grad = None
        return {f"gradient of {n}": g for n, g in zip(names, gradients, strict=True)} | {"grad of x": x.grad}

    beside(package, "critic", Critic, partial)


def test_the_third_derivative_is_refused(package: Path) -> None:
    module = load(package).module("energy")
    x = torch.randn(4, 3, requires_grad=True)
    (first,) = torch.autograd.grad(module(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    with pytest.raises(GradientError, match="the package has no derivatives of this order"):
        second.sum().backward()
    once = load(package).module("once")
    (first,) = torch.autograd.grad(once(x), x, create_graph=True)
    with pytest.raises(GradientError, match="export the module with order=2"):
        first.sum().backward()
    (first,) = torch.autograd.grad(once(x), x, create_graph=True)
    for asked in (x, *once.parameters()):
        # An error, not None as for a missing path
        with pytest.raises(GradientError, match="export the module with order=2"):
            torch.autograd.grad(first.sum(), asked, allow_unused=True, retain_graph=True)


def test_a_parameter_changed_in_between_is_an_error(package: Path) -> None:
    module = load(package).module("energy")
    x = torch.randn(4, 3, requires_grad=True)
    energy = module(x)
    with torch.no_grad():
        module.get_parameter("net.2.weight").mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(energy, x, create_graph=True)


def test_what_has_no_second_derivative(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8, requires_grad=True)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    with pytest.raises(ab.ExportError, match=r"order=2: .*sdpa_kernel\(SDPBackend.MATH\)"):
        ab.export_module(attention, (x,), order=2, path=tmp_path / "a.pt2")
    rows, net = {0: Dim("rows", min=2, max=100)}, nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    with pytest.raises(
        ab.ExportError, match=r"order=2: expected a second derivative for every size of rows, .* for one size only"
    ):
        ab.export_module(net, (torch.randn(3, 4),), dynamic_shapes=(rows,), order=2, path=tmp_path / "a.pt2")
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    with pytest.raises(
        ab.ExportError, match=r"order=2: the gradients depend on the buffer 'parametrizations\.weight\.0\._[uv]', which"
    ):
        ab.export_module(spectral.train(), (x,), order=2, path=tmp_path / "a.pt2")
    with pytest.raises(ab.ExportError, match="order is 0; expected 1 "):
        ab.export_module(nn.Linear(8, 8), (x,), order=0, path=tmp_path / "a.pt2")


def test_inspect_and_verify(package: Path, tmp_path: Path) -> None:
    shown = aot_backward("inspect", package)
    names = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias", "positions"]
    assert f"Gradients of: {', '.join(names)}\n" in shown.stdout, shown.stderr
    assert "Derivatives: gradients, second derivatives\n" in shown.stdout
    assert "Derivatives: gradients, second derivatives, third derivatives\n" in shown.stdout
    done = aot_backward("verify", package)
    assert done.returncode == 0, done.stderr
    members = taken_apart(package)
    examples = safetensors.torch.load(members[EXAMPLES])
    name = "energy/0/expected/second-order gradient of net.0.weight"
    members[EXAMPLES] = safetensors.torch.save(examples | {name: examples[name] * 1.01})
    put_together(tmp_path / "wrong.pt2", members, {})
    done = aot_backward("verify", tmp_path / "wrong.pt2")
    assert done.returncode == 1 and "second-order gradient of net.0.weight is off by" in done.stderr

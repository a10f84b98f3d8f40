"""``export_grad``: value and gradients of functions and modules in one native call, selected by any name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, WeightsError, load

from ..support import exports


def net() -> nn.Module:
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Pull(nn.Module):
    """A loss with further results and a mutated buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, batch: dict[str, torch.Tensor], weight: float = 0.5
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.seen += 1
        out = self.net(batch["x"]).squeeze(1)
        return weight * (out - batch["y"]).square().mean(), {"out": out, "x": batch["x"]}


def _batch(n: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(n)
    return {"x": torch.randn(n, 4), "y": torch.randn(n)}


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        energy_net, pull = net(), Pull()
        atoms = {0: Dim("atoms", min=2, max=50)}

        def energy(pos: torch.Tensor) -> torch.Tensor:
            distance = (pos[:, None] - pos[None] + 1e-2).norm(dim=-1)
            return energy_net(torch.stack([distance, distance.exp(), distance.sin(), 1 / (1 + distance)], -1)).sum()

        rows = {0: Dim("rows", min=1)}
        entries = {
            "forces": ab.Grad(energy, [ab.Variant((torch.randn(5, 3),), dynamic_shapes={"pos": atoms})], wrt="pos"),
            "pull": ab.Grad(
                pull,
                [ab.Variant((_batch(4),), dynamic_shapes={"batch": {"x": rows, "y": rows}})],
                wrt=["parameters", "batch"],
                has_aux=True,
            ),
        }
        ab.export(path, entries)

    return exports.shared("grads", make)


def _energy(pos: torch.Tensor) -> torch.Tensor:
    distance = (pos[:, None] - pos[None] + 1e-2).norm(dim=-1)
    return net()(torch.stack([distance, distance.exp(), distance.sin(), 1 / (1 + distance)], -1)).sum()


def test_one_input_gives_one_tensor(package: Path) -> None:
    forces = load(package).grad("forces")
    for n in (5, 2, 31, 5, 5):
        pos = torch.randn(n, 3)
        value, gradient = forces(pos)
        leaf = pos.clone().requires_grad_()
        expected = _energy(leaf)
        (slope,) = torch.autograd.grad(expected, leaf)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-4)
        assert not value.requires_grad and value.shape == ()
    with pytest.raises(InputError, match=r"atoms \(pos\.shape\[0\]\) is 51; expected at least 2 and at most 50"):
        forces(torch.randn(51, 3))


def test_parameters_inputs_and_what_else_the_function_returns(package: Path) -> None:
    pull, eager = load(package).grad("pull"), Pull()
    for n in (4, 1, 9, 9):
        batch = _batch(n)
        (loss, aux), gradients = pull(batch)
        leaves = {k: v.clone().requires_grad_() for k, v in batch.items()}
        eager.zero_grad()
        expected, extra = eager(leaves)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(aux["out"], extra["out"].detach())
        torch.testing.assert_close(aux["x"], batch["x"])
        assert list(gradients) == [
            *(f"net.{i}.{k}" for i in (0, 2) for k in ("weight", "bias")),
            "batch['x']",
            "batch['y']",
        ]
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradients["batch['y']"], leaves["y"].grad)
    assert float(pull.parameters["seen"]) == float(eager.seen) == 4


def test_its_parameters_are_written_in_place_or_bound_anew(package: Path) -> None:
    pull, batch = load(package).grad("pull"), _batch(3)
    first = pull(batch)[0][0]
    weight = pull.parameters["net.2.weight"]
    with torch.no_grad():
        weight.mul_(3)
    second = pull(batch)[0][0]
    assert not torch.equal(first, second)
    weight.data = weight.data / 3
    torch.testing.assert_close(pull(batch)[0][0], first)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, nn.Parameter(torch.randn(1, 8)))
    with pytest.raises(TypeError):
        pull.parameters["net.2.weight"] = weight
    weight.data = torch.randn(1, 8).double()
    with pytest.raises(WeightsError, match=r"net\.2\.weight has dtype torch\.float64"):
        pull(batch)


def test_state_goes_both_ways(package: Path) -> None:
    pull, eager, batch = load(package).grad("pull"), Pull(), _batch(3)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_()
    pull.load_state_dict(eager.state_dict())
    torch.testing.assert_close(pull(batch)[0][0], eager(batch)[0].detach())
    eager.load_state_dict(pull.state_dict())
    state = pull.state_dict()
    before = {n: t.clone() for n, t in state.items()}
    with pytest.raises(WeightsError, match=r"missing \['net\.0\.bias'\], unexpected \['other'\]"):
        pull.load_state_dict(
            {**{n: torch.zeros_like(t) for n, t in state.items() if n != "net.0.bias"}, "other": torch.zeros(1)}
        )
    with pytest.raises(WeightsError, match=r"net\.0\.bias' has shape \(7,\)"):
        pull.load_state_dict({**{n: torch.zeros_like(t) for n, t in state.items()}, "net.0.bias": torch.zeros(7)})
    torch.testing.assert_close(pull.state_dict(), before)


def test_bad_arguments(package: Path) -> None:
    forces = load(package).grad("forces")
    pos = torch.randn(5, 3)
    good = forces(pos)
    for bad, message in (
        ((pos.double(),), "pos has dtype torch.float64"),
        ((pos[None],), "pos has 3 dimensions"),
        ((pos.tolist(),), "pos is a list"),
        ((), "0 positional"),
        ((pos, pos), "2 positional"),
    ):
        with pytest.raises(InputError, match=message):
            forces(*bad)
    torch.testing.assert_close(forces(pos=pos), good)
    torch.testing.assert_close(forces(pos.t().contiguous().t()), good)


class Where(NamedTuple):
    here: torch.Tensor
    there: torch.Tensor


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"wrt": "velocity"},
            r"wrt names 'velocity', which is neither an input nor a parameter; the program has the inputs 'x', 'ids'",
        ),
        ({"wrt": "ids"}, r"wrt names the input 'ids', which is not a floating-point or complex tensor"),
        ({"wrt": "parameters"}, r"wrt='parameters': expected at least one parameter that requires a gradient"),
        ({"wrt": "x", "fn": lambda x, ids: x * ids}, r"a gradient needs a scalar loss, got shape \(3,\); reduce it"),
        (
            {"wrt": "x", "fn": lambda x, ids: (x.sum(), ids)},
            r"expected a loss, got \(Tensor, Tensor\)\. If the loss comes first, say has_aux=True",
        ),
        (
            {"wrt": "x", "fn": lambda x, ids: ids.sum() * 1.0},
            r"the loss does not depend on any tensor that gets a gradient",
        ),
    ],
)
def test_what_cannot_be_differentiated_is_refused(kwargs: dict[str, object], message: str, tmp_path: Path) -> None:
    fn = kwargs.pop("fn", lambda x, ids: (x * ids).sum())
    with pytest.raises(ExportError, match=message):
        ab.export_grad(fn, (torch.randn(3), torch.tensor([1, 2, 3])), path=tmp_path / "no.pt2", **kwargs)
    assert not list(tmp_path.iterdir())

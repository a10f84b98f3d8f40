"""Every torch optimizer and some custom ones, compiled in steps and compared with eager, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, StateError, load

from ..support.step_cases import FAMILIES, Eager, assert_equal, assert_same_change, batch, everything

OTHERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"maximize": True, "foreach": True}),
    "ASGD": (torch.optim.ASGD, {"t0": 3, "weight_decay": 0.1}),
    "Muon": (torch.optim.Muon, {}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"betas": (0.8, 0.9)}),  # the second of its two formulas starts at the fifth step
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),  # its first step has no dampening
    "fused": (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.02), "amsgrad": True}),
}
COARSE = {"Muon": 6e-2}
"""It orthogonalizes in bfloat16: two ways to compute that differ by this much."""
REFUSED = {
    "LBFGS": "evaluates the loss several times",
    "SparseAdam": "needs sparse gradients, and compiled gradients are dense",
}


FIXED = ("params", "ns_coefficients", "t0")  # Muon's options that shape its computation; ASGD's t0, an integer here


def _smaller(value: Any) -> Any:
    """Return an option with its numbers multiplied by nine tenths."""
    if isinstance(value, tuple):
        return tuple(map(_smaller, value))
    return 0.9 * float(value) if isinstance(value, (float, torch.Tensor)) else value


def _small() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(6, 3, bias=False)


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_optimizer(name: str, tmp_path: Path) -> None:
    """Run eight steps. After half of them, change each nonzero number of the groups."""
    kind, options = OTHERS[name]
    module = _small()
    path = ab.export_step(
        module,
        batch(0),
        loss_fn=nn.functional.mse_loss,
        optimizer=kind(module.parameters(), **options),
        path=tmp_path / "s.pt2",
    )
    step, other = load(path).step(), Eager(module, kind(module.parameters(), **options))
    before = everything(other)
    for i in range(8):
        if i == 4:
            for group in (*step.param_groups, *other.optimizer.param_groups):
                group.update({k: _smaller(v) for k, v in group.items() if k not in FIXED})
        torch.testing.assert_close(step(*batch(i)), other(*batch(i)), rtol=max(1e-4, COARSE.get(name, 0)), atol=1e-5)
    assert_same_change(step, other, before, COARSE.get(name, 1e-4))


def test_there_is_no_third_kind(tmp_path: Path) -> None:
    """This file compares every optimizer of this torch with eager or checks that it is refused by name."""
    kinds = {n: k for n, k in vars(torch.optim).items() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)}
    assert kinds.keys() - {"Optimizer"} == FAMILIES.keys() | {k.__name__ for k, _ in OTHERS.values()} | REFUSED.keys()
    module = _small()
    for name, reason in REFUSED.items():
        with pytest.raises(ExportError, match=f"{name} cannot be exported: it {reason}"):
            ab.export_step(
                module,
                batch(0),
                loss_fn=nn.functional.mse_loss,
                optimizer=kinds[name](module.parameters()),
                path=tmp_path / "no.pt2",
            )
    assert not list(tmp_path.iterdir())


class Lion(torch.optim.Optimizer):
    """Lion as its authors wrote it, with a count that is not used."""

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                beta1, beta2 = group["betas"]
                p.add_(torch.sign(state["exp_avg"] * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
                self.note(p, group)

    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None: ...


class Scaled(Lion):
    """Keeps a moving average of norms and a count for each parameter, both created by ``setdefault``."""

    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        size = state.setdefault("size", torch.zeros(()))
        count = state.setdefault("step", torch.zeros((), dtype=torch.int64))
        count.add_(1)
        size.mul_(0.9).add_(p.grad.norm(), alpha=0.1)
        p.sub_(p, alpha=0.01).mul_(1 - 0.01 / (1 + size)).div_(1 + 0.01 / count.item())


class PythonState(Lion):
    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p]["t"] = self.state[p].get("t", 0) + 1


class PythonGroup(Lion):
    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1


class PythonAttribute(Lion):
    calls = (0,)

    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.calls = (self.calls[0] + 1,)


class PythonTable(Lion):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.table: dict[str, Any] = {"seen": torch.zeros(())}

    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.table["seen"] += 1


class SharedState(Lion):
    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state["k"] = {"of all": torch.zeros(())}  # type: ignore[index]


class Deciding(Lion):
    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if p.norm() > 1:
            p.mul_(0.5)


class ByDivision(Lion):
    def note(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.div_(1 + p.grad.norm() / p.grad.norm())  # 0 / 0 if the gradients are zero


def _two() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [Lion, Scaled, ByDivision])
def test_an_optimizer_of_ones_own(kind: type[Lion], tmp_path: Path) -> None:
    module = _two()
    path = ab.export_step(
        module, batch(0), loss_fn=nn.functional.mse_loss, optimizer=kind(module.parameters()), path=tmp_path / "s.pt2"
    )
    step, other = load(path).step(), Eager(module, kind(module.parameters()))
    before = everything(other)
    for i in range(6):
        if i == 3:
            for group in (*step.param_groups, *other.optimizer.param_groups):
                group.update({k: _smaller(v) for k, v in group.items() if k != "params"})
        torch.testing.assert_close(step(*batch(i)), other(*batch(i)), rtol=1e-4, atol=1e-5)
    assert_same_change(step, other, before)
    again = Eager(_two(), kind(_two().parameters()))
    again.optimizer.load_state_dict(step.state_dict()["optimizer"])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            PythonState,
            r"PythonState keeps state\['0.weight'\]\['t'\] as a int that changes with each step; a compiled step can change only tensors",
        ),
        (PythonGroup, r"PythonGroup\.step changes param_groups\[0\]\['k'\]; a compiled step can change only tensors"),
        (
            PythonAttribute,
            r"PythonAttribute\.step changes the optimizer's own 'calls'; a compiled step can change only tensors",
        ),
        (
            PythonTable,
            r"PythonTable\.step changes the optimizer's own 'table'; a compiled step can change only tensors",
        ),
        (SharedState, r"SharedState keeps state\['k'\], which does not belong to a parameter"),
        (Deciding, r"Deciding\.step could not be traced: "),
    ],
)
def test_an_optimizer_that_keeps_its_numbers_elsewhere_is_refused(
    kind: type[Lion], message: str, tmp_path: Path
) -> None:
    module = _two()
    optimizer = kind(module.parameters())
    kept = {k: str(v) for k, v in vars(optimizer).items()}
    with pytest.raises(ExportError, match=message):
        ab.export_step(module, batch(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer, path=tmp_path / "no.pt2")
    assert {k: str(v) for k, v in vars(optimizer).items()} == kept and not list(tmp_path.iterdir())


def test_unequal_counts_state_that_lingers_and_other_numbers(tmp_path: Path) -> None:
    """The export starts mid-training: one layer made fewer steps, another is frozen and its state remains. ``lr`` is a
    NumPy number; groups are named."""
    module = _two()
    optimizer = torch.optim.Adam(
        [{"params": module[0].named_parameters(), "lr": np.float64(0.02)}, {"params": module[2].named_parameters()}]
    )
    module[2].weight.requires_grad_(False)
    other = Eager(module, optimizer)
    other(*batch(0))
    other(*batch(1))
    module[2].weight.requires_grad_(True)
    other(*batch(2))
    module[0].bias.requires_grad_(False)
    path = ab.export_step(
        module, batch(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer, path=tmp_path / "s.pt2"
    )
    step, before = load(path).step(), everything(other)
    for i in range(3, 6):
        torch.testing.assert_close(step(*batch(i)), other(*batch(i)), rtol=1e-4, atol=1e-5)
        step.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    state = step.state_dict()
    assert {i: float(s["step"]) for i, s in state["optimizer"]["state"].items()} == {0: 6, 2: 4, 3: 6}
    other.optimizer.state.pop(module[0].bias)
    assert_same_change(step, other, before)
    step.load_state_dict(other.state_dict())
    assert_equal(everything(step), everything(other))


def test_bfloat16(tmp_path: Path) -> None:
    """With 16-bit parameters and state, each stored value may round the other way: half a unit in the last place."""
    module = _two().bfloat16()
    args = tuple(t.bfloat16() for t in batch(0))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
    path = ab.export_step(module, args, loss_fn=nn.functional.mse_loss, optimizer=optimizer, path=tmp_path / "s.pt2")
    step, other = load(path).step(), Eager(module, optimizer)
    before = everything(other)
    for i in range(5):
        args = tuple(t.bfloat16() for t in batch(i))
        torch.testing.assert_close(step(*args), other(*args), rtol=2e-2, atol=1e-3)
    assert {t.dtype for s in step.state.values() for t in s.values() if t.dim()} == {torch.bfloat16}
    assert_same_change(step, other, before, relative=3e-2)


def test_numbers_become_conditions(tmp_path: Path) -> None:
    """If the optimizer branches on a number, each branch is a condition. A step exported without momentum has no slot
    for it."""
    module = _small()
    optimizer = torch.optim.SGD(module.parameters(), lr=0)
    path = ab.export_step(
        module, batch(0), loss_fn=nn.functional.mse_loss, optimizer=optimizer, clip_norm=1e30, path=tmp_path / "s.pt2"
    )
    step = load(path).step()
    before = everything(step)
    step(*batch(0))
    assert_equal(everything(step), before)
    assert step.grad_norm > 0
    for key in ("momentum", "weight_decay"):
        with pytest.raises(
            InputError,
            match=rf"param_groups\[0\]\['{key}'\] = 0.1: SGD computes differently for this value; compiled for 0 alone",
        ):
            step.param_groups[0][key] = 0.1
    with pytest.raises(
        InputError, match=r"param_groups\[0\]\['dampening'\] is fixed in the compiled step at 0, got 0.3"
    ):
        step.param_groups[0]["dampening"] = 0.3  # it would change the first step
    step.param_groups[0].update(lr=0.1, momentum=0)
    step(*batch(0))
    assert not torch.equal(step.parameters["weight"], before["parameter weight"])
    with pytest.raises(StateError, match="'momentum_buffer'"):
        momentum = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        other = Eager(module, momentum)
        other(*batch(0))
        state = other.state_dict()
        state["optimizer"]["param_groups"][0]["momentum"] = 0
        step.load_state_dict(state)

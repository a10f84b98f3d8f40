"""Training steps that tests share: one small net per family of optimizer, and the same training in eager with the
interface of a loaded step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import aot_backward as ab

from . import exports

CLIP = 3.2
"""A clipping norm that some of the ten steps exceed and others do not."""
WAITING = ("SGD", "Adam", "AdamW")
"""The families that accumulate gradients: export compiles three graphs for each instead of one."""


class Net(nn.Module):
    """A net with BatchNorm and dropout. The layer before BatchNorm lacks a bias, so no true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def _groups(own: Net, **second: Any) -> list[dict[str, Any]]:
    """Return two groups, ordered differently from the module. Only the weights decay."""
    return [
        {"params": [own.last.weight, own.first.weight], "weight_decay": 0.1},
        {"params": [own.norm.bias, own.norm.weight, own.last.bias], "lr": 0.02, "weight_decay": 0.0, **second},
    ]


FAMILIES: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "SGD": lambda own: torch.optim.SGD(_groups(own, nesterov=True), lr=0.05, momentum=0.9),
    "Adam": lambda own: torch.optim.Adam(_groups(own, amsgrad=True), lr=0.01),
    "AdamW": lambda own: torch.optim.AdamW(_groups(own, betas=(0.8, 0.99)), lr=0.01, eps=1e-6),
    "Adagrad": lambda own: torch.optim.Adagrad(
        _groups(own, lr_decay=0.3), lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1
    ),
    "RMSprop": lambda own: torch.optim.RMSprop(_groups(own, centered=True), lr=0.01, momentum=0.8),
}
_cycle = torch.optim.lr_scheduler.OneCycleLR  # schedules momentum, or the first beta
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: _cycle(o, [0.1, 0.05], total_steps=12),
    "Adam": lambda o: _cycle(o, [0.02, 0.01], total_steps=12),
    "AdamW": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "Adagrad": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    "RMSprop": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
}


def package(name: str) -> Path:
    """Return a package of one of :data:`FAMILIES`, clipped by norm, for any number of rows."""

    def make(path: Path) -> None:
        own, rows = net(), {0: Dim("rows", min=2)}
        ab.export_step(
            own,
            batch(0),
            loss_fn=nn.functional.mse_loss,
            optimizer=FAMILIES[name](own),
            dynamic_shapes={"x": rows, "target": rows},
            accumulate=name in WAITING,
            clip_norm=CLIP,
            path=path,
        )

    return exports.shared(f"step-{name}", make)


def batch(i: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, 6, generator=generator), 2 * torch.randn(rows, 3, generator=generator)


class Eager:
    """The training in eager, with the interface of a loaded step."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None = nn.functional.mse_loss,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ):
        self.module = module
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.clip_norm = clip_norm
        self.clip_value = clip_value
        self.grad_norm: torch.Tensor | None = None
        optimizer.zero_grad()

    def __call__(self, *args: Any, update: bool = True, **kwargs: Any) -> Any:
        value = (
            self.module(*args, **kwargs)
            if self.loss_fn is None
            else self.loss_fn(self.module(*args[:-1], **kwargs), args[-1])
        )
        pytree.tree_leaves(value)[0].backward()
        if update:
            self.step()
        return pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, value)

    def step(self) -> None:
        own = [p for g in self.optimizer.param_groups for p in g["params"]]
        if self.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(own, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(own, self.clip_value)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        return dict(self.module.named_buffers())

    @property
    def state(self) -> Any:
        return {p: {k: v for k, v in s.items() if isinstance(v, torch.Tensor)} for p, s in self.optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def eager(name: str) -> Eager:
    own = net()
    return Eager(own, FAMILIES[name](own), clip_norm=CLIP)


def everything(training: Any) -> dict[str, torch.Tensor]:
    """Return copies of parameters, buffers and the optimizer's state, by name."""
    names = {id(p): n for n, p in reversed(training.parameters.items())}
    out = {f"parameter {n}": p for n, p in training.parameters.items()} | {
        f"buffer {n}": b for n, b in training.buffers.items()
    }
    out |= {f"{key} of {names[id(p)]}": t for p, slots in training.state.items() for key, t in slots.items()}
    return {n: t.detach().clone() for n, t in out.items()}


def assert_same_change(actual: Any, expected: Any, before: Mapping[str, torch.Tensor], relative: float = 1e-4) -> None:
    """Compare each tensor's change since ``before``: ``‖Δa − Δe‖ ≤ relative·‖Δe‖ + 4·eps·‖e‖``.

    A step rounds by about 1e-6 of its size. Ten steps of a smooth net, and Adam's division by the root of small
    squares, multiply that by some tens. The smallest change from a wrong formula (an omitted weight decay) is a hundred
    times 1e-4."""
    ours, theirs = everything(actual), everything(expected)
    assert ours.keys() == theirs.keys()
    for name, e in theirs.items():
        a = ours[name]
        assert (a.dtype, a.shape) == (e.dtype, e.shape), name
        if not e.is_floating_point():
            assert torch.equal(a, e), name
            continue
        start = before.get(name, torch.zeros_like(e)).double()
        change, error = float((e.double() - start).norm()), float((a.double() - e.double()).norm())
        allowed = relative * change + 4 * torch.finfo(e.dtype).eps * float(e.double().norm())
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}, changed by {change:.3g}"


def assert_equal(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the tensors are equal bit for bit."""
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert torch.equal(actual[name], e), name


class Odd(nn.Module):
    """A module with unusual parts: tied, frozen, unused and 0-d parameters, one outside all groups, and mutated
    buffers, one not persistent. It takes keywords, and returns its loss and more."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = nn.Linear(4, 10, bias=False)
        self.tied.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(2))
        self.outside = nn.Parameter(torch.randn(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(
        self, ids: torch.Tensor, *, label: torch.Tensor, weight: float = 1.0
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        h = self.table(ids) * self.scale
        self.seen += 1
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.5)
        h = torch.tanh(self.frozen(self.drop(h)) + self.outside + self.mean)
        logits = self.tied(h)
        return weight * nn.functional.cross_entropy(logits, label), {"logits": logits, "rows": ids.shape[0]}


def odd() -> tuple[Odd, torch.optim.Optimizer]:
    torch.manual_seed(3)
    own = Odd()
    return own, torch.optim.AdamW([p for n, p in own.named_parameters() if n != "outside"], lr=0.05, weight_decay=0.2)


def words(rows: int, seed: int = 0) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids, label = torch.randint(10, (2, rows), generator=generator)
    return (ids,), {"label": label, "weight": 0.5}


def odd_package() -> Path:
    """Return a package with three variants: four rows, seven, and four in eval mode."""

    def make(path: Path) -> None:
        own, optimizer = odd()
        variants = [ab.Variant(*words(4)), ab.Variant(*words(7)), ab.Variant(*words(4), mode="eval")]
        ab.export(path, {"odd": ab.Step(own, variants, optimizer)})

    return exports.shared("step-odd", make)


class Weighted(nn.Module):
    """A loss with buffers: class weights and a mutated one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(logits, label, weight=self.weight) * (1 + 0.1 * self.calls)


def weighted() -> Eager:
    torch.manual_seed(4)
    own, loss = nn.Linear(6, 3), Weighted()
    optimizer = torch.optim.SGD(
        [{"params": [own.weight], "dampening": 0.5, "momentum": 0.9}, {"params": [own.bias], "maximize": True}], lr=0.5
    )
    return Eager(own, optimizer, loss, clip_value=0.02)


def labelled(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(i)[0], torch.randint(3, (5,), generator=torch.Generator().manual_seed(i))


def weighted_package() -> Path:
    """Return a step that clips by value and skips gradients with Inf."""

    def make(path: Path) -> None:
        made = weighted()
        ab.export_step(
            made.module,
            labelled(0),
            loss_fn=made.loss_fn,
            optimizer=made.optimizer,
            clip_value=0.02,
            skip_nonfinite=True,
            accumulate=True,
            path=path,
        )

    return exports.shared("step-weighted", make)

"""The packages to mutate, and their calls, compared with eager on the same numbers. Each package is small; it is
exported once and kept.

Eager runs on the state that the loaded entry shows (``state_dict``, ``param_groups``). So a package with other weights
or another learning rate, which is valid, is compared with eager at these values.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from aot_backward_runtime import Package, replay

from ...support import golden_packages as golden
from ...support.oracle import clones

Numbers = dict[str, torch.Tensor | None]
ROWS = Dim("rows", min=2, max=64)


class Net(nn.Module):
    """A module with tied weights, a changing buffer, a frozen parameter, two inputs and two outputs of the same form,
    and a size as a result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        h = torch.tanh(self.first(x) * y) * self.scale
        return {"out": self.second(h) + self.calls, "h": (self.third(h) * x, None), "rows": x.shape[0]}


def pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=made).requires_grad_(), torch.randn(rows, 3, generator=made).requires_grad_()


def loss_of(net: Net) -> Callable[..., torch.Tensor]:
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (net.first(x) * y + net.third(y)).square().mean()

    return loss


def fit() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


def groups(net: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": [*net[0].parameters(), *net[1].parameters()], "lr": 1e-3}, {"params": list(net[3].parameters())}]


def samples(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=made), torch.randn(rows, 4, generator=made)


def export_net(path: Path) -> None:
    import aot_backward as ab

    net = Net()
    shapes = {"x": {0: ROWS}, "y": {0: ROWS}}
    loss = loss_of(net)
    entries = {"net": ab.Module(net, [ab.Variant(pair(4), dynamic_shapes=shapes)])}
    ab.export(
        path,
        {
            **entries,
            "loss": ab.Grad(
                loss,
                [ab.Variant(pair(4), dynamic_shapes=shapes)],
                wrt=["x", "y", "net.first.weight", "net.third.weight"],
            ),
        },
    )


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def export_order(path: Path) -> None:
    import aot_backward as ab

    x = pair(4)[0]
    ab.export(
        path,
        {"twice": ab.Module(Twice(), [ab.Variant((x,), dynamic_shapes={"x": {0: ROWS}})], order=2)},
        portable=False,
    )


def export_step(path: Path) -> None:
    import aot_backward as ab

    net = fit()
    assert isinstance(net, nn.Sequential)
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    variant = ab.Variant(samples(8), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    step = ab.Step(
        net, [variant], optimizer, loss_fn=nn.functional.mse_loss, accumulate=True, clip_norm=0.5, skip_nonfinite=True
    )
    ab.export(path, {"fit": step}, portable=False)


def passes(batches: tuple[int, ...]) -> Numbers:
    """Run as a script: return the gradients of a small net's parameters, for each batch."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    out: Numbers = {}
    for n in batches:
        net.zero_grad()
        net(torch.randn(n, 4)).square().mean().backward()
        out.update({f"{n} {name}": p.grad for name, p in net.named_parameters()})
    return out


def export_passes(path: Path) -> None:
    import aot_backward as ab

    with ab.record(path, tune="none") as recording:
        passes((3, 5, 6))
    assert not recording.skipped


def bend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x) * y.sum(1, keepdim=True)).square().mean()


def export_targets(path: Path) -> None:
    import aot_backward as ab

    variant = ab.Variant(pair(4), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    ab.export(path, {"bend": ab.Grad(bend, [variant], wrt=["x", "y"])}, target="cpu:avx2,cpu:sse4")


# calls, compared with eager


def call_module(
    package: Package, name: str, eager: nn.Module, args: tuple[Any, ...], again: bool
) -> list[tuple[Numbers, Numbers]]:
    """Call a module entry and eager. ``again``: also compute second derivatives."""
    loaded = package.module(name)
    eager = copy.deepcopy(eager)
    state = {n: t.detach().clone() for n, t in loaded.state_dict().items()}
    wanted = {n: p.requires_grad for n, p in loaded.named_parameters(remove_duplicate=False)}
    found = run_module(loaded, args, again, state)
    with oracle():
        eager.load_state_dict(state, strict=False)  # other tensors are constants with eager's values
        eager.train(loaded.training)
        for n, p in eager.named_parameters(remove_duplicate=False):
            p.requires_grad_(wanted.get(n, False))
        return [(found, run_module(eager, args, again, state))]


class NotJudged(Exception):
    """Eager fails on the state of the package, so there is nothing to compare."""


@contextlib.contextmanager
def oracle() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise NotJudged(f"{type(error).__name__}: {error}") from error


def run_module(module: nn.Module, args: tuple[Any, ...], again: bool, names: Collection[str]) -> Numbers:
    """Return outputs, gradients, and the state ``names`` after the call."""
    given = clones(args)
    own = [t for t in _tensors(given) if t.requires_grad]
    results = _tensors(module(*given))
    out: Numbers = {f"output {i}": t.detach().clone() for i, t in enumerate(results)}
    # Tied parameters by their first name
    parameters = sorted((n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)
    sources = {n: p for i, (n, p) in enumerate(parameters) if all(p is not q for _, q in parameters[:i])} | {
        f"input {i}": t for i, t in enumerate(own)
    }
    made = [t for t in results if t.requires_grad]
    cotangents = [torch.linspace(-1, 1 + i, t.numel()).reshape(t.shape) for i, t in enumerate(made)]
    gradients = torch.autograd.grad(
        made, list(sources.values()), cotangents, allow_unused=True, create_graph=again, retain_graph=True
    )
    out |= {
        f"gradient of {n}": None if g is None else g.detach().clone() for n, g in zip(sources, gradients, strict=True)
    }
    if again:
        scalar = sum(g.square().sum() for g in gradients if g is not None)
        assert isinstance(scalar, torch.Tensor)
        second = torch.autograd.grad(scalar, list(sources.values()), allow_unused=True)
        out |= {f"second gradient of {n}": g for n, g in zip(sources, second, strict=True)}
    else:  # backward again, through the retained graph
        kept = torch.autograd.grad(made, list(sources.values()), cotangents, allow_unused=True)
        out |= {f"gradient of {n}, again": g for n, g in zip(sources, kept, strict=True)}
    return out | {f"state {n}": b.detach().clone() for n, b in module.state_dict().items() if n in names}


def call_grad(
    package: Package, name: str, function: Any, net: nn.Module | None, args: tuple[torch.Tensor, ...]
) -> list[tuple[Numbers, Numbers]]:
    """Call a grad entry and eager. ``function`` uses ``net``; the entry names its parameters ``net.NAME``."""
    loaded = package.grad(name)
    state = {n.removeprefix("net."): t.detach().clone() for n, t in loaded.parameters.items()}
    value, grads = loaded(*[a.detach().clone() for a in args])
    found: Numbers = {f"value {i}": t for i, t in enumerate(_tensors(value))}
    found |= {f"gradient {i}": g for i, g in enumerate([grads] if isinstance(grads, torch.Tensor) else grads.values())}
    spec = package.manifest.entries[name]
    with oracle():
        if net is not None:
            net.load_state_dict(state, strict=False)
        own = [a.detach().clone().requires_grad_() for a in args]
        named = dict(net.named_parameters(remove_duplicate=False)) if net is not None else {}
        sources = [
            own[int(w.removeprefix("input:"))] if w.startswith("input:") else named[w.removeprefix("parameter:net.")]
            for w in spec.wrt
        ]
        loss = function(*own)
        expected: Numbers = {"value 0": loss.detach()}
        expected |= {f"gradient {i}": g for i, g in enumerate(torch.autograd.grad(loss, sources, allow_unused=True))}
    return [(found, expected)]


def call_step(package: Package, name: str) -> list[tuple[Numbers, Numbers]]:
    """Make a step, then two calls with accumulated gradients. Compare the losses and the final state."""
    step = package.step(name)
    state = step.state_dict(whole=True)
    spec = package.manifest.entries[name].step
    assert spec is not None
    clip = next(n.value for n in spec.numbers if n.key == "clip_norm")
    moved = {(n.group, n.key) for n in spec.numbers}
    numbers = [{k: v for k, v in group.items() if (i, k) in moved} for i, group in enumerate(step.param_groups)]
    calls = ((8, True), (5, False), (8, True))
    found: Numbers = {
        f"loss {i}": _tensors(step(*samples(rows), update=update))[0] for i, (rows, update) in enumerate(calls)
    }
    found |= step.state_dict()["module"]
    with oracle():
        return [(found, _trained(state, numbers, clip, calls))]


def _trained(
    state: dict[str, Any], numbers: list[dict[str, Any]], clip: float, calls: tuple[tuple[int, bool], ...]
) -> Numbers:
    """Return eager's losses and final state. Options that are not among the numbers of the groups stay as at the
    export."""
    net = fit()
    assert isinstance(net, nn.Sequential)
    optimizer = torch.optim.AdamW(groups(net), lr=1e-2)
    net.load_state_dict(state["module"], strict=False)
    for own, theirs in zip(optimizer.param_groups, numbers, strict=True):
        own.update(theirs)
    optimizer.load_state_dict(
        {"state": state["optimizer"]["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    )
    out: Numbers = {}
    net.train()
    for number, (rows, update) in enumerate(calls):
        x, y = samples(rows)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        out[f"loss {number}"] = loss.detach()
        if update:
            # A step with skip_nonfinite skips the update otherwise
            if bool(nn.utils.clip_grad_norm_(net.parameters(), clip).isfinite()):
                optimizer.step()
            optimizer.zero_grad()
    own_state = net.state_dict()
    return out | {n: own_state[n] for n in state["module"]}


def call_passes(path: Path, entry: str, script: Callable[[], Numbers]) -> list[tuple[Numbers, Numbers]]:
    with replay(path, entry=entry):
        found = script()
    return [(found, script())]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _call_net(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    net = Net()
    out = []
    for name, kind in package.entries.items():
        if kind == "module":
            out += call_module(package, name, net, pair(5), False)
        elif kind == "grad":
            out += call_grad(package, name, loss_of(net), net, pair(5))
    return out


def _call_order(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [
        r
        for n, k in package.entries.items()
        if k == "module"
        for r in call_module(package, n, Twice(), pair(5)[:1], True)
    ]


def _call_step(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [r for n, k in package.entries.items() if k == "step" for r in call_step(package, n)]


def _call_passes(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [
        r for n, k in package.entries.items() if k == "replay" for r in call_passes(path, n, lambda: passes((3, 5, 4)))
    ]


def _call_golden_pair(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [
        r
        for n, k in package.entries.items()
        if k == "module"
        for r in call_module(package, n, golden.Pair(), golden.arguments(), False)
    ]


def _golden_passes() -> Numbers:
    return {f"{n} {i}": t for n, tensors in enumerate(golden.backward_passes((3, 5))) for i, t in enumerate(tensors)}


def _call_golden_passes(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [r for n, k in package.entries.items() if k == "replay" for r in call_passes(path, n, _golden_passes)]


def _golden(name: str) -> Callable[[Path], object]:
    return lambda path: shutil.copyfile(Path(golden.__file__).parents[1] / "golden" / name, path)


def _call_bend(package: Package, path: Path) -> list[tuple[Numbers, Numbers]]:
    return [r for n, k in package.entries.items() if k == "grad" for r in call_grad(package, n, bend, None, pair(5))]


@dataclass(frozen=True)
class Base:
    export: Callable[[Path], object]
    call: Callable[[Package, Path], list[tuple[Numbers, Numbers]]]


BASES: Mapping[str, Base] = {
    "net": Base(export_net, _call_net),
    "order": Base(export_order, _call_order),
    "step": Base(export_step, _call_step),
    "passes": Base(export_passes, _call_passes),
    "targets": Base(export_targets, _call_bend),
}
GOLDEN: Mapping[str, Base] = {
    "golden-pair": Base(_golden("1.0-pair.pt2"), _call_golden_pair),
    "golden-passes": Base(_golden("1.1-passes.pt2"), _call_golden_passes),
}
"""Packages that need no compilation, for the tests of this tool. Newer formats store more, so their checks find more
faults."""
KNOWN = {**BASES, **GOLDEN}


def difference(found: Numbers, expected: Numbers) -> str:
    """Return the first difference of ``found`` from ``expected``, or ""."""
    if found.keys() != expected.keys():
        return f"only one of both has {sorted(found.keys() ^ expected.keys())[:3]}"
    largest = max((float(e.double().norm()) for e in expected.values() if e is not None), default=0.0)
    for name, e in expected.items():
        f = found[name]
        if (f is None) != (e is None):
            return f"{name} is {'None' if f is None else 'a tensor'}, eager's {'None' if e is None else 'a tensor'}"
        if e is None or f is None:
            continue
        if f.shape != e.shape or f.dtype != e.dtype:
            return f"{name} is {f.dtype} {tuple(f.shape)}, eager's {e.dtype} {tuple(e.shape)}"
        # With a weight of Inf, the order of operations decides what is NaN
        if torch.equal(f, e) or not torch.isfinite(e).all():
            continue
        error, size = float((f.double() - e.double()).norm()), float(e.double().norm())
        if not error <= 1e-4 * max(size, 0.1 * largest, 1e-6):
            return f"{name} is off by {error:.3g} of {size:.3g}"
    return ""

"""A compiled training step against eager: the same steps from the same state, and everything that they leave behind.

Several steps are made on the example, in eager (the person's module, loss and optimizer, put back afterwards), by the artifact, and in eager
with everything in float64. What is compared is the losses, and by how much each parameter, buffer and tensor of the optimizer's state has
changed: a wrong update is small beside the parameter that it is added to. With a, e, t the artifact's, eager's and float64's change of a tensor
whose values are p:

    ‖a − t‖ ≤ 4·‖e − t‖ + 16·eps·‖t‖ + 2·eps·‖p‖ + 8·s + 8·n

where s is how far t moves when everything that goes in is rounded otherwise, as in ``selfcheck.py``, eps·‖p‖ what storing p rounds off, and n how
far t moves when each gradient is off by as much as ``selfcheck.py`` allows a gradient to be, in a random direction: an optimizer such as Adam
divides a gradient by its own size, and makes a whole step of one whose true value is zero (a bias before BatchNorm).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Verdict
from aot_backward_runtime.loader import Package

from ..capture import preserve, program_module
from ..capture.step import step_graph as steps
from ..capture.step.optimizer_spec import Settings
from . import eager_check

STEPS = 3
_PROBES = 4


@dataclass(frozen=True)
class Example:
    """Arguments of a step (real tensors), and the module's mode."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: str


@dataclass(frozen=True)
class Case:
    """What is exported: the program, its optimizer, and whether gradients can wait. ``names``: of the optimizer's parameters by identity."""

    program: steps.ProgramWithLoss
    optimizer: torch.optim.Optimizer
    settings: Settings
    names: dict[int, str]
    trained: tuple[str, ...]
    waiting: bool
    coarse: bool  # the optimizer computes in 16 bits: what it makes is compared as such


@dataclass
class Outcome:
    """Losses, by number, and what the state was before and after, by name."""

    losses: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of each step, of eager alone

    def change(self, name: str) -> torch.Tensor:
        """By how much a parameter or buffer has changed; of the optimizer's state, which may not have been there before, what it is."""
        after = self.after[name].double()
        return after - self.before[name].double() if name.startswith(("parameter ", "buffer ")) else after


Noise = list[dict[str, float]]
"""The norm of what is added to each gradient in each step."""


def check(package: Package, entry: str, number: int, case: Case, example: Example, stored: dict[str, torch.Tensor]) -> Verdict:
    """Runs variant ``number`` of ``entry`` beside eager, at the example's sizes and, where one is dynamic, at others.

    Raises :class:`ExportError` naming the tensor that is wrong, and by how much. What ``verify`` needs goes to ``stored``."""
    spec = package.manifest.entries[entry].variants[number]
    worst, at_worst, sizes = "", 0.0, list[str]()
    like = eager_check.Example(example.args, example.kwargs, example.mode, ())
    for values, args, kwargs in eager_check.sizes_of(spec, like):
        refused = False
        at = ", ".join(f"{s.label}={values[s.name]}" for s in spec.symbols)
        for waiting in (False, True) if case.waiting else (False,):
            how = f"{entry} variant {number}{' at ' + at if at else ''}{' with accumulated gradients' if waiting else ''}"
            try:
                with _gradients_kept(case):
                    eager = _eager(case, example, args, kwargs, waiting)
            except Exception as error:
                if not sizes:
                    raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
                refused = True
                break  # eager refuses this size: nothing to compare with
            drew = eager_check.drew(next(case.program.parameters()).device.type)
            with _gradients_kept(case):
                truth, moved = _truth(case, example, args, kwargs, waiting, eager, drew)
            actual = run(package, entry, example.mode, args, kwargs, waiting)
            differences = compared(actual, eager, truth, moved, case.coarse)
            for name, ratio, off, allowed in differences:
                if not ratio <= 1:
                    raise ExportError(f"{how}: {name} is wrong: off by {off:.3g} from eager, {allowed:.3g} is allowed; nothing was written")
                if ratio >= at_worst:
                    worst, at_worst = name, ratio
            if not sizes and not waiting:
                _store(stored, f"{entry}/{number}", args, kwargs, eager, {name: allowed for name, _, _, allowed in differences})
        if not refused:
            sizes.append(at)
    return Verdict("verified", worst, round(at_worst, 6), tuple(s for s in sizes if s))


def run(package: Package, entry: str, mode: str, args: Any, kwargs: Any, waiting: bool) -> Outcome:
    """:data:`STEPS` steps of the loaded entry from its present state, which is put back."""
    step = package.step(entry).train(mode == "train")
    kept, held = step.state_dict(), [(t, t.detach().clone()) for t in step._held]
    torch.manual_seed(eager_check.SEED)
    before = _flat(step.parameters, step.buffers, _full_state(step))
    losses = {}
    for i in range(STEPS):
        if waiting:
            losses[f"loss {i} first half"] = _first(step(*args, **kwargs, update=False))
        losses[f"loss {i}"] = _first(step(*args, **kwargs))
    out = Outcome(losses, before, _flat(step.parameters, step.buffers, _full_state(step)))
    step.load_state_dict(kept)
    with torch.no_grad():  # what that does not hold: buffers that are not persistent, and those of the loss
        for tensor, value in held:
            tensor.copy_(value)
    return out


def _full_state(step: Any) -> dict[str, torch.Tensor]:
    """The optimizer's state and the loss function's, by name, also before the first step."""
    state = step._state
    return {f"{key} of {name}": t for key, names, t in state.slots for name in names} | {f"{n} of the loss": t for n, t in state.loss.items()}


def _flat(parameters: Any, buffers: Any, slots: Any) -> dict[str, torch.Tensor]:
    out = {f"parameter {n}": t for n, t in parameters.items()} | {f"buffer {n}": t for n, t in buffers.items()} | dict(slots)
    return {n: t.detach().clone() for n, t in out.items()}


def _first(value: Any) -> torch.Tensor:
    return pytree.tree_leaves(value)[0].detach().clone()


def _eager(case: Case, example: Example, args: Any, kwargs: Any, waiting: bool, noise: Noise | None = None) -> Outcome:
    """The same steps by the person's own objects, which are put back."""
    module, optimizer, settings = case.program.module, case.optimizer, case.settings
    torch.manual_seed(eager_check.SEED)
    trained = [p for p in module.parameters() if case.names.get(id(p)) in case.trained]
    everything = [*case.program.parameters(), *case.program.buffers()]
    loss = {} if case.program.loss_fn is None else {f"{n} of the loss": t for n, t in program_module.state_of(case.program.loss_fn).items()}
    tensors = {f"t{i}": t for i, t in enumerate(everything)}
    with preserve.in_mode(module, example.mode), preserve.slots_kept(case.program), eager_check.undone(tensors), _state_kept(optimizer):
        try:
            before = _flat(dict(module.named_parameters()), dict(module.named_buffers()), loss)
            losses, gradients = {}, []
            generator = torch.Generator().manual_seed(eager_check.SEED)
            scale = settings.loss_scale or 1.0
            for i in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                torch.clear_autocast_cache()
                for half in (" first half", "") if waiting else ("",):
                    with torch.enable_grad():
                        value = pytree.tree_leaves(case.program(*args, **kwargs))[0]
                        losses[f"loss {i}{half}"] = value.detach().clone()
                        (value if settings.loss_scale is None else value * scale).backward()
                for p in trained if settings.loss_scale is not None else ():
                    if p.grad is not None:
                        p.grad *= float(torch.tensor(scale, dtype=torch.float32).double().reciprocal().float())  # in GradScaler's precision
                gradients.append({case.names[id(p)]: p.grad.detach().clone() for p in trained if p.grad is not None})
                for p in trained if noise is not None else ():
                    assert p.grad is not None and noise is not None
                    direction = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.device)
                    p.grad += (noise[i][case.names[id(p)]] / max(float(direction.norm()), 1e-30) * direction).to(p.dtype)
                if settings.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(trained, settings.clip_norm)
                if settings.clip_value is not None:
                    torch.nn.utils.clip_grad_value_(trained, settings.clip_value)
                finite = all(bool(torch.isfinite(p.grad).all()) for p in trained if p.grad is not None)
                if finite or not settings.skip_nonfinite:
                    type(optimizer).step(optimizer)
                scale *= 1.0 if finite else 0.5  # as torch.amp.GradScaler, which grows it after 2000 steps
            slots = {
                f"{key} of {case.names[id(p)]}": t
                for p, state in optimizer.state.items()
                for key, t in state.items()
                if isinstance(t, torch.Tensor) and case.names.get(id(p)) in case.trained
            }
            slots |= loss
            return Outcome(losses, before, _flat(dict(module.named_parameters()), dict(module.named_buffers()), slots), gradients)
        finally:
            for p in case.program.parameters():
                p.grad = None


@contextlib.contextmanager
def _gradients_kept(case: Case) -> Iterator[None]:
    """The person's own ``.grad`` are put aside, out of the way of parameters that become float64."""
    kept = [p.grad for p in case.program.parameters()]
    for p in case.program.parameters():
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(case.program.parameters(), kept, strict=True):
            p.grad = grad


@contextlib.contextmanager
def _state_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer works on a copy of its state inside, which has the dtype of its parameters."""
    kept, groups = optimizer.state, [dict(g) for g in optimizer.param_groups]

    def own(parameter: torch.Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = parameter.dtype is torch.float64 and value.is_floating_point() and value.dim() > 0
        return value.detach().clone().to(torch.float64 if wide else value.dtype)

    optimizer.state = type(kept)(dict)
    for p, slots in kept.items():
        optimizer.state[p] = {k: own(p, k, v) for k, v in slots.items()}
    try:
        yield
    finally:
        optimizer.state = kept
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def _truth(case: Case, example: Example, args: Any, kwargs: Any, waiting: bool, eager: Outcome, drew: bool) -> tuple[Outcome, dict[str, float]]:
    """The steps in float64, or eager itself where float64 is no truth (``drew``: it would draw other random numbers); and by name 8·s + 8·n of the
    measure above."""
    truth, moved, given = eager, dict.fromkeys(eager.after, 0.0), (args, kwargs)
    values = [*case.program.parameters(), *eager.losses.values()]
    wider = not drew and not any(t.is_complex() for t in values) and any(t.is_floating_point() and t.dtype is not torch.float64 for t in values)
    device = next(case.program.parameters()).device.type
    with contextlib.ExitStack() as stack:
        if wider:
            try:
                args, kwargs = eager_check.doubled(args, kwargs)
                with torch.autocast(device, enabled=False):
                    with eager_check.in_float64(case.program):
                        truth = _eager(case, example, args, kwargs, waiting)
                    with eager_check.in_float64(case.program, rounded=True):
                        near = _eager(case, example, eager_check.rounded_values(args), eager_check.rounded_values(kwargs), waiting)
            except Exception:  # whatever stands against float64, eager is the next best
                truth = eager
        if truth is not eager and _same_computation(eager, truth):
            moved = {n: 8 * float((near.change(n) - truth.change(n)).norm()) for n in truth.after}
            stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(eager_check.in_float64(case.program))
        else:
            truth, args, kwargs = eager, *given
        noisy = _eager(case, example, args, kwargs, waiting, _noise(eager, truth))
    return truth, {n: m + 8 * float((noisy.change(n) - truth.change(n)).norm()) for n, m in moved.items()}


def _same_computation(eager: Outcome, truth: Outcome) -> bool:
    """Whether float64 is eager with less rounding, and not another computation (other random numbers)."""
    if truth.after.keys() != eager.after.keys():
        return False
    for name, loss in eager.losses.items():
        right = float(truth.losses[name])
        if not math.isfinite(right) or abs(float(loss) - right) > 1e-2 * max(1e-3, abs(right)):
            return False
    return True


def _noise(eager: Outcome, truth: Outcome) -> Noise:
    """What ``selfcheck.py`` allows each gradient to be off by."""
    out = []
    for ours, right in zip(eager.gradients, truth.gradients, strict=True):
        norms = {n: float(torch.nan_to_num(g.double(), 0.0, 0.0, 0.0).norm()) for n, g in right.items()}
        largest = max(norms.values())
        allowed = {}
        for n, g in ours.items():
            if truth is eager:
                allowed[n] = eager_check.RELATIVE[g.dtype] / 4 * max(norms[n], 1e-3 * largest)
            else:  # what is zero but for rounding, as of a bias before BatchNorm, has the rounding of the others
                scale = max(norms[n], 0.1 * largest)
                allowed[n] = 4 * float((g.double() - right[n].double()).norm()) + 32 * torch.finfo(g.dtype).eps * scale
        out.append(allowed)
    return out


def compared(actual: Outcome, eager: Outcome, truth: Outcome, moved: dict[str, float], coarse: bool) -> list[tuple[str, float, float, float]]:
    """Name, ratio of error to what is allowed, error, allowed, for the losses and for everything that changes."""
    out = []
    for name, e in eager.losses.items():
        own, right = float(actual.losses[name]), float(truth.losses[name])
        if own != own and float(e) != float(e):
            continue  # NaN in both
        relative = max(16 * torch.finfo(e.dtype).eps, 1e-5 if truth is not eager else 2e-4, 1e-2 if coarse else 0.0)
        limit = 4 * abs(float(e) - right) + relative * max(abs(right), 1e-3)
        out.append((name, abs(own - right) / limit, abs(own - right), limit))
    for name, e in eager.after.items():
        if name not in actual.after:
            raise ExportError(f"{name} is in eager's state, and not in the compiled step's")
        a = actual.after[name]
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ExportError(f"{name} is {a.dtype} {tuple(a.shape)} in the compiled step and {e.dtype} {tuple(e.shape)} in eager")
        if not e.is_floating_point():
            wrong = float((a != e).sum())
            out.append((name, 2.0 if wrong else 0.0, wrong, 0.0))
            continue
        start = actual.before[name].double()
        da, de, dt = (
            a.double() - start,
            e.double() - eager.before.get(name, start).double(),
            truth.after[name].double() - truth.before.get(name, start).double(),
        )
        if not torch.isfinite(de).all():
            if not torch.equal(torch.isfinite(de), torch.isfinite(da)):
                raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
            keep = torch.isfinite(de)
            da, de, dt = (torch.where(keep, x, 0) for x in (da, de, dt))
        eps = torch.finfo(e.dtype).eps
        if truth is eager:
            allowed = eager_check.RELATIVE[e.dtype] * float(dt.norm()) + 4 * eps * float(e.double().norm()) + moved[name]
        else:
            allowed = 4 * float((de - dt).norm()) + 16 * eps * float(dt.norm()) + 2 * eps * float(e.double().norm()) + moved[name]
        if coarse:
            allowed += eager_check.RELATIVE[torch.bfloat16] * float(dt.norm())
        error = float((da - dt).norm())
        out.append((f"the change of {name}", error / allowed if allowed else (0.0 if error == 0 else 2.0), error, allowed))
    return out


def _store(stored: dict[str, torch.Tensor], prefix: str, args: Any, kwargs: Any, eager: Outcome, allowed: dict[str, float]) -> None:
    """For ``verify``: inputs, losses, and of each tensor a few projections of its change, not the whole."""
    for i, value in enumerate(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)):
        stored[f"{prefix}/input/{i}"] = value.detach().contiguous()
    for name, loss in eager.losses.items():
        stored[f"{prefix}/expected/{name}"] = loss
        stored[f"{prefix}/allowed/{name}"] = torch.tensor(2 * allowed[name], dtype=torch.float64)  # another machine's rounding
    for name, e in eager.after.items():
        if e.is_floating_point():
            stored[f"{prefix}/expected/{name}"] = probes(eager.change(name))
            stored[f"{prefix}/allowed/{name}"] = torch.tensor(2 * allowed[f"the change of {name}"], dtype=torch.float64)


def probes(change: torch.Tensor) -> torch.Tensor:
    """Projections of ``change`` on a few random directions: each is off by at most as much as the whole."""
    flat = change.reshape(-1).double()
    generator = torch.Generator().manual_seed(eager_check.SEED)
    directions = torch.randn(_PROBES, flat.numel(), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(directions, dim=1) @ flat.cpu()


def named(outcome: Outcome) -> dict[str, torch.Tensor]:
    """What :func:`_store` keeps, of the artifact."""
    changes = {n: probes(outcome.change(n)) for n, t in outcome.after.items() if t.is_floating_point()}
    return dict(outcome.losses) | changes

"""A compiled training step against eager: the same steps from the same state, and everything that they leave behind.

Several steps are made on the example: by the artifact, in eager (the user's module, loss and optimizer, put back afterwards), and in eager with
everything in float64. What is compared is the losses, and by how much each parameter, buffer and tensor of the optimizer's state has changed: a
wrong update is small beside the parameter that it is added to. What they may be off by is stated in ``tolerance.py``. s, how far a change itself
moves, has two parts here: one where everything that goes in is rounded otherwise, as in ``eager_check.py``, and one where each gradient is off by
as much as that allows a gradient to be, in a random direction: an optimizer such as Adam divides a gradient by its own size, and makes a whole
step of one whose true value is zero (a bias before BatchNorm).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Verdict
from aot_backward_runtime.loader import Package

from ..capture import preserve, program_module
from ..capture.step import step_graph as steps
from ..capture.step.optimizer_spec import Settings
from .example_sizes import SEED, Example, sizes_to_check
from .float64 import consumed_cuda_rng, in_float64, perturbed, to_float64
from .tolerance import Comparison, Reference, Tolerance, compare, distance, norm

STEPS = 3
_PROBES = 4


@dataclass(frozen=True)
class Case:
    """What is exported: the program, its optimizer, and whether gradients can be accumulated. ``names``: of its parameters by identity."""

    program: steps.ProgramWithLoss
    optimizer: torch.optim.Optimizer
    settings: Settings
    names: dict[int, str]
    trained: tuple[str, ...]
    waiting: bool
    reduced_precision: bool  # the optimizer computes in 16 bits: what it makes is compared as such


@dataclass
class StepResults:
    """What a few steps give: the losses, and every tensor of the state before and after them, by name."""

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
    worst, labels = Comparison("", 0.0, 0.0), list[str]()
    for sized in sizes_to_check(spec, example):
        refused = False
        for waiting in (False, True) if case.waiting else (False,):
            where = f"{entry} variant {number}{' at ' + sized.label if sized.label else ''}{' with accumulated gradients' if waiting else ''}"
            try:
                with _gradients_kept(case):
                    eager = _steps_of_eager(case, sized.example, waiting)
            except Exception as error:
                if not labels:
                    raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
                refused = True
                break  # eager refuses this size: nothing to compare with
            random = consumed_cuda_rng(_device(case))
            with _gradients_kept(case):
                reference = _reference(case, sized.example, waiting, eager, random)
            actual = steps_of_entry(package, entry, sized.example, waiting)
            comparisons = _compare_steps(actual, eager, reference, case.reduced_precision)
            for comparison in comparisons:
                if comparison.wrong:
                    raise ExportError(
                        f"{where}: {comparison.name} is wrong: off by {comparison.error:.3g} from eager, {comparison.allowed:.3g} is allowed; "
                        "nothing was written"
                    )
                worst = max(comparison, worst, key=attrgetter("ratio"))
            if not labels and not waiting:
                _store(stored, f"{entry}/{number}", sized.example, eager, {c.name: c.allowed for c in comparisons})
        if not refused:
            labels.append(sized.label)
    return Verdict("verified", worst.name, round(worst.ratio, 6), tuple(filter(None, labels)))


def steps_of_entry(package: Package, entry: str, example: Example, waiting: bool) -> StepResults:
    """:data:`STEPS` steps of the loaded entry from its present state, which is put back."""
    step = package.step(entry).train(example.mode == "train")
    kept, held = step.state_dict(), [(t, t.detach().clone()) for t in step._held]
    torch.manual_seed(SEED)
    before = _flat(step.parameters, step.buffers, _full_state(step))
    losses = {}
    for i in range(STEPS):
        if waiting:
            losses[f"loss {i} first half"] = _first(step(*example.args, **example.kwargs, update=False))
        losses[f"loss {i}"] = _first(step(*example.args, **example.kwargs))
    out = StepResults(losses, before, _flat(step.parameters, step.buffers, _full_state(step)))
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


def _steps_of_eager(case: Case, example: Example, waiting: bool, noise: Noise | None = None) -> StepResults:
    """The same steps by the user's module, loss and optimizer, which are put back. ``noise``: added to the gradients."""
    module, optimizer, settings = case.program.module, case.optimizer, case.settings
    torch.manual_seed(SEED)
    trained = [p for p in module.parameters() if case.names.get(id(p)) in case.trained]
    everything = [*case.program.parameters(), *case.program.buffers()]
    loss = {} if case.program.loss_fn is None else {f"{n} of the loss": t for n, t in program_module.state_of(case.program.loss_fn).items()}
    with preserve.in_mode(module, example.mode), preserve.slots_kept(case.program), preserve.values_kept(everything), _state_kept(optimizer):
        try:
            before = _flat(dict(module.named_parameters()), dict(module.named_buffers()), loss)
            losses, gradients = {}, []
            generator = torch.Generator().manual_seed(SEED)
            scale = settings.loss_scale or 1.0
            for i in range(STEPS):
                optimizer.zero_grad(set_to_none=True)
                torch.clear_autocast_cache()
                for half in (" first half", "") if waiting else ("",):
                    with torch.enable_grad():
                        value = pytree.tree_leaves(case.program(*example.args, **example.kwargs))[0]
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
            return StepResults(losses, before, _flat(dict(module.named_parameters()), dict(module.named_buffers()), slots), gradients)
        finally:
            for p in case.program.parameters():
                p.grad = None


def _device(case: Case) -> str:
    return next(case.program.parameters()).device.type


@contextlib.contextmanager
def _gradients_kept(case: Case) -> Iterator[None]:
    """The parameters' own ``.grad`` are put aside, out of the way of parameters that become float64."""
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

    def own(parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = parameter.dtype is torch.float64 and value.is_floating_point() and value.dim() > 0
        return value.detach().clone().to(torch.float64 if wide else value.dtype)

    optimizer.state = type(kept)(dict)
    for p, slots in kept.items():
        optimizer.state[p] = {k: own(p, v) for k, v in slots.items()}
    try:
        yield
    finally:
        optimizer.state = kept
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def _reference(case: Case, example: Example, waiting: bool, eager: StepResults, random: bool) -> Reference[StepResults]:
    """The steps in float64, or eager itself where float64 is no reference (``random``: it would draw other random numbers)."""
    values = [*case.program.parameters(), *eager.losses.values()]
    wider = not random and not any(t.is_complex() for t in values) and any(t.is_floating_point() and t.dtype is not torch.float64 for t in values)
    exact, moved = eager, dict.fromkeys(eager.after, 0.0)
    with contextlib.ExitStack() as stack:
        if wider:
            try:
                wide = example.with_tensors(to_float64(example.tensors))
                with torch.autocast(_device(case), enabled=False):
                    with in_float64(case.program):
                        exact = _steps_of_eager(case, wide, waiting)
                    with in_float64(case.program, rounded=True):
                        beside = _steps_of_eager(case, wide.with_tensors(perturbed(wide.tensors)), waiting)
            except Exception:  # whatever stands against float64, eager is the next best
                exact = eager
        if exact is not eager and _is_same_computation(eager, exact):
            moved = {n: norm(beside.change(n) - exact.change(n)) for n in exact.after}
            example = wide
            stack.enter_context(torch.autocast(_device(case), enabled=False))
            stack.enter_context(in_float64(case.program))
        else:
            exact = eager
        noisy = _steps_of_eager(case, example, waiting, _noise(eager, exact))
    moved = {n: m + norm(noisy.change(n) - exact.change(n)) for n, m in moved.items()}
    return Reference(exact, moved, float64=exact is not eager)


def _is_same_computation(eager: StepResults, exact: StepResults) -> bool:
    """Whether float64 is eager with less rounding, and not another computation (other random numbers)."""
    if exact.after.keys() != eager.after.keys():
        return False
    for name, loss in eager.losses.items():
        right = float(exact.losses[name])
        if not math.isfinite(right) or abs(float(loss) - right) > 1e-2 * max(1e-3, abs(right)):
            return False
    return True


def _noise(eager: StepResults, exact: StepResults) -> Noise:
    """What ``eager_check.py`` allows each gradient to be off by; where eager itself is the reference, a quarter."""
    out = []
    for gradients, right in zip(eager.gradients, exact.gradients, strict=True):
        norms = {n: norm(g) for n, g in right.items()}
        largest = max(norms.values())
        allowed = {}
        for n, g in gradients.items():
            if exact is eager:
                allowed[n] = Tolerance.of_result(g.dtype, largest, None).allowed(norms[n]) / 4
            else:
                allowed[n] = Tolerance.of_result(g.dtype, largest, norm(g.double() - right[n].double())).allowed(norms[n])
        out.append(allowed)
    return out


def _compare_steps(actual: StepResults, eager: StepResults, reference: Reference[StepResults], reduced_precision: bool) -> list[Comparison]:
    """The losses, and the change of everything that changes. :class:`ExportError` where they are no two tensors alike."""
    out, exact = [], reference.results
    for name, loss in eager.losses.items():
        own, right = float(actual.losses[name]), float(exact.losses[name])
        if own != own and float(loss) != float(loss):
            continue  # NaN in both
        tolerance = Tolerance.of_loss(loss.dtype, abs(float(loss) - right) if reference.float64 else None, reduced_precision=reduced_precision)
        out.append(Comparison(name, abs(own - right), tolerance.allowed(abs(right))))
    for name, e in eager.after.items():
        if name not in actual.after:
            raise ExportError(f"{name} is in eager's state, and not in the compiled step's")
        a = actual.after[name]
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ExportError(f"{name} is {a.dtype} {tuple(a.shape)} in the compiled step and {e.dtype} {tuple(e.shape)} in eager")
        if not e.is_floating_point():
            out.append(Comparison(name, distance(a, e), 0.0))
            continue
        start = actual.before[name].double()
        change_a, change_e, change_t = (
            a.double() - start,
            e.double() - eager.before.get(name, start).double(),
            exact.after[name].double() - exact.before.get(name, start).double(),
        )
        if not torch.equal(torch.isfinite(change_e), torch.isfinite(change_a)) and not torch.isfinite(change_e).all():
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        tolerance = Tolerance.of_change(
            e.dtype,
            norm(e),
            distance(change_e, change_t, change_e) if reference.float64 else None,
            reference.moved[name],
            reduced_precision=reduced_precision,
        )
        out.append(compare(f"the change of {name}", change_a, change_t, tolerance, like=change_e))
    return out


def _store(stored: dict[str, torch.Tensor], prefix: str, example: Example, eager: StepResults, allowed: Mapping[str, float]) -> None:
    """For ``verify``: inputs, losses, and of each tensor a few projections of its change, not the whole."""
    for i, value in enumerate(example.tensors):
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
    generator = torch.Generator().manual_seed(SEED)
    directions = torch.randn(_PROBES, flat.numel(), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(directions, dim=1) @ flat.cpu()


def stored_results(results: StepResults) -> dict[str, torch.Tensor]:
    """What :func:`_store` keeps, of the artifact."""
    changes = {n: probes(results.change(n)) for n, t in results.after.items() if t.is_floating_point()}
    return dict(results.losses) | changes

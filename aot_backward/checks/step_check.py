"""Compare a compiled training step with eager: the same steps from the same state, with all results and state.

Several steps are made on the example: by the artifact, in eager (the user's module, loss and optimizer, restored
afterwards), and in eager with everything in float64. The check compares the losses, and the change of each parameter,
buffer and tensor of the optimizer's state. It compares changes because a wrong update is small relative to its
parameter. ``tolerance.py`` states the tolerances. s, how far a change itself moves, has two parts here. In the first,
everything that goes in is perturbed, as in ``eager_check.py``. In the second, each gradient is off in a random
direction by as much as ``eager_check.py`` allows: an optimizer such as Adam divides a gradient by its own size, and
makes a whole step even if the true gradient is zero (a bias before BatchNorm).

No run keeps more than a sketch of a large tensor (``stored_results.py``). A sketch is linear, and every measure is the
norm of a difference, so the sketch of a change is the difference of two sketches, and replaces the change everywhere.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_exporters.process_state import without_crashes
from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import VariantSpec, Verdict
from aot_backward_runtime.loader import Package

from ..capture import preserve
from ..capture.step import step_graph as steps
from ..capture.step.optimizer_graph import AVERAGE, AVERAGED
from ..capture.step.optimizer_spec import Settings
from . import stored_results
from .example_sizes import SEED, Example, Sized
from .float64 import consumed_cuda_rng, in_float64, perturbed, to_float64
from .stored_results import MAX_WHOLE_BYTES, Stored, sketch, sketch_of_finite
from .tolerance import (
    Comparison,
    Reference,
    Tolerance,
    compare,
    distance,
    distance_of_finite,
    is_finite,
    is_nan_throughout,
    norm,
    pieces,
)

STEPS = 3  # stored and repeated by verify: docs/format.md (section 5) fixes it
_PROBES = 4  # projections of a change that are stored: docs/format.md (section 5) fixes it


@dataclass(frozen=True)
class Case:
    """An exported program, its optimizer, and whether gradients can be accumulated. ``names``: parameter names by
    identity."""

    program: steps.ProgramWithLoss
    optimizer: torch.optim.Optimizer
    settings: Settings
    names: dict[int, str]
    trained: tuple[str, ...]
    waiting: bool
    # The program or the optimizer computes in 16 bits somewhere, whatever the dtype of the results
    reduced_precision: bool


@dataclass
class StepResults:
    """Results of a few steps: the losses, and every tensor of the state before and after them, by name."""

    losses: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # for each step, if they are kept
    # Dtype and shape of each sketched tensor in ``after``
    sketched: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)

    def look(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Return the tensor's dtype and shape."""
        return self.sketched.get(name, (self.after[name].dtype, self.after[name].shape))

    def change(self, name: str) -> torch.Tensor:
        """Return the change of a parameter or buffer, or the sketch of it; for the optimizer's state, which may be new,
        its value."""
        after = self.after[name].double()
        if not name.startswith(("parameter ", "buffer ")) or self.before[name].shape != after.shape:
            return after
        return after - self.before[name].double()

    @property
    def has_only_nan(self) -> bool:
        """Return whether a loss is NaN, or a tensor is NaN throughout after the last step."""
        return any(map(is_nan_throughout, (*self.losses.values(), *self.after.values())))

    @property
    def diverged(self) -> set[str]:
        """Return the large tensors that are kept whole, before the first step or after the last, because they have NaN
        or Inf there."""
        unsketched = {n for n, t in self.after.items() if n not in self.sketched and _is_large(n, t)}
        return unsketched | {n for n, t in self.after.items() if n in self.before and self.before[n].shape != t.shape}


Sketched = Callable[[str, torch.Tensor], bool]
"""Predicate of a tensor's name and the tensor: whether to keep a sketch. A tensor with NaN or Inf is kept whole."""

Noise = list[dict[str, float]]
"""For each step, the norm of the noise added to each gradient."""


def check(
    load: Callable[[], Package],
    entry: str,
    number: int,
    spec: VariantSpec,
    case: Case,
    sizes: Iterable[Sized],
    stored: Stored,
) -> Verdict:
    """Compare variant ``number`` of ``entry``, described by ``spec``, with eager at ``sizes``. Eager must accept the
    first of them. ``load`` returns the package with separate weights.

    Write the data for ``verify`` to ``stored``. Raise :class:`ExportError` naming the tensor that is wrong, and by how
    much."""
    worst, labels = Comparison("", 0.0, 0.0), list[str]()
    for number_of_size, sized in enumerate(sizes):
        is_compared = True
        for waiting in (False, True) if case.waiting else (False,):
            location = f"{entry} variant {number}{' at ' + sized.label if sized.label else ''}{' with accumulated gradients' if waiting else ''}"
            sketched = _is_large
            try:
                with _gradients_kept(case):
                    eager = _steps_of_eager(case, sized.example, waiting, sketched, keeps_gradients=True)
                    if eager.diverged:  # a sketch would hide the elements next to a NaN
                        sketched = _never
                        eager = _steps_of_eager(case, sized.example, waiting, sketched, keeps_gradients=True)
            except Exception as error:
                if number_of_size == 0:
                    raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
                is_compared = False
                break  # eager refuses this size: nothing to compare with
            random = consumed_cuda_rng(_device(case))
            with _gradients_kept(case):
                reference = _reference(case, sized.example, waiting, eager, random, sketched)
            actual = steps_of_entry(load(), entry, sized.example, waiting, sketched)
            try:
                comparisons = _compare_steps(actual, eager, reference, case.reduced_precision)
            except ExportError as error:
                raise ExportError(f"{location}: {error}; nothing was written") from error
            for comparison in comparisons:
                if comparison.wrong:
                    raise ExportError(
                        f"{location}: {comparison.name} is wrong: off by {comparison.error:.3g} from eager, {comparison.allowed:.3g} is allowed; "
                        "nothing was written"
                    )
                worst = max(comparison, worst, key=attrgetter("ratio"))
            is_compared &= not eager.has_only_nan
            if number_of_size == 0 and not waiting:
                _store(stored, f"{entry}/{number}", sized.example, eager, {c.name: c.allowed for c in comparisons})
        if is_compared:
            labels.append(sized.label)
    return Verdict("verified", worst.name, round(worst.ratio, 6), tuple(filter(None, labels)))


def steps_of_entry(package: Package, entry: str, example: Example, waiting: bool, sketched: Sketched) -> StepResults:
    """Make :data:`STEPS` steps of the loaded entry from its present state, which is not restored."""
    step = package.step(entry).train(example.mode == "train")
    torch.manual_seed(SEED)
    before = _flat(step.parameters, step.buffers, _full_state(step), sketched)
    losses = {}
    for i in range(STEPS):
        if waiting:
            losses[f"loss {i} first half"] = _first(step(*example.args, **example.kwargs, update=False))
        losses[f"loss {i}"] = _first(step(*example.args, **example.kwargs))
    return _results(losses, before, _flat(step.parameters, step.buffers, _full_state(step), sketched))


@contextlib.contextmanager
def everything_kept(case: Case, example: Example) -> Iterator[None]:
    """Allow steps of eager inside; on exit, restore parameters, ``.grad``, buffers and the optimizer's state."""
    with _gradients_kept(case), _everything_kept(case, example, [*case.program.parameters(), *case.program.buffers()]):
        yield


@contextlib.contextmanager
def _everything_kept(case: Case, example: Example, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    module = case.program.module
    with (
        preserve.in_mode(module, example.mode),
        preserve.slots_kept(case.program),
        preserve.values_kept(tensors),
        _state_kept(case.optimizer),
    ):
        try:
            yield
        finally:
            for p in case.program.parameters():
                p.grad = None


@contextlib.contextmanager
def state_kept(package: Package, entry: str) -> Iterator[None]:
    """Restore the loaded entry's state on exit."""
    step = package.step(entry)
    state, copies = step.state_dict(), [(t, t.detach().clone()) for t in step._held]
    try:
        yield
    finally:
        step.load_state_dict(state)
        with torch.no_grad():  # state_dict() lacks non-persistent buffers and the loss function's buffers
            for tensor, value in copies:
                tensor.copy_(value)


def _full_state(step: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's state and the loss function's, by name, also before the first step."""
    state = step._state
    return {f"{key} of {name}": t for key, names, t in state.all_slots for name in names} | {
        f"{n} of the loss": t for n, t in state.loss.items()
    }


_Flat = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a tensor and its copy or sketch, by name."""


def _flat(parameters: Any, buffers: Any, slots: Any, sketched: Sketched) -> _Flat:
    out = (
        {f"parameter {n}": t for n, t in parameters.items()}
        | {f"buffer {n}": t for n, t in buffers.items()}
        | dict(slots)
    )
    return {n: (t, _copy(n, t, sketched)) for n, t in out.items()}


def _copy(name: str, tensor: torch.Tensor, sketched: Sketched) -> torch.Tensor:
    """Return a copy of the tensor, or its sketch if ``sketched`` asks for one and its sums are finite."""
    sums = sketch_of_finite(tensor) if sketched(name, tensor) else None
    return tensor.detach().clone() if sums is None else sums


def _results(
    losses: dict[str, torch.Tensor], before: _Flat, after: _Flat, gradients: Sequence[dict[str, torch.Tensor]] = ()
) -> StepResults:
    sketched = {n: (t.dtype, t.shape) for n, (t, copy) in after.items() if copy.shape != t.shape}
    kept_before, kept_after = ({n: copy for n, (_, copy) in flat.items()} for flat in (before, after))
    return StepResults(losses, kept_before, kept_after, list(gradients), sketched)


def _is_large(name: str, tensor: torch.Tensor) -> bool:
    """Return whether to keep a sketch. The limit is a number of elements, because float64 is compared with float32."""
    return tensor.is_floating_point() and tensor.numel() > MAX_WHOLE_BYTES // 4


def _never(name: str, tensor: torch.Tensor) -> bool:
    return False


def _first(value: Any) -> torch.Tensor:
    return pytree.tree_leaves(value)[0].detach().clone()


def _steps_of_eager(
    case: Case,
    example: Example,
    waiting: bool,
    sketched: Sketched,
    noise: Noise | None = None,
    *,
    copies: bool = False,
    keeps_gradients: bool = False,
) -> StepResults:
    """Make the same steps with the user's module, loss and optimizer, and restore them; with ``copies``, except tensors
    that :func:`in_float64` has copied. ``noise``: added to the gradients. ``keeps_gradients``: whether the results have
    the gradients."""
    module, optimizer, settings = case.program.module, case.optimizer, case.settings
    torch.manual_seed(SEED)
    parameters = [p for p in module.parameters() if case.names.get(id(p)) in case.trained]
    tensors = [
        t for t in (*case.program.parameters(), *case.program.buffers()) if not (copies and t.is_floating_point())
    ]
    loss = (
        {}
        if case.program.loss_fn is None
        else {f"{n} of the loss": t for n, t in state_of(case.program.loss_fn).items()}
    )
    with _everything_kept(case, example, tensors), without_crashes():
        averages = {case.names[id(p)]: p.detach().clone() for p in parameters} if settings.ema is not None else {}
        before = _flat(dict(module.named_parameters()), dict(module.named_buffers()), loss, sketched)
        losses, gradients, averaged = {}, [], 0
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
            for p in parameters if settings.loss_scale is not None else ():
                if p.grad is not None:
                    # In GradScaler's precision
                    p.grad *= float(torch.tensor(scale, dtype=torch.float32).double().reciprocal().float())
            if keeps_gradients:
                gradients.append(
                    {case.names[id(p)]: _stored_gradient(p.grad, sketched) for p in parameters if p.grad is not None}
                )
            for p in parameters if noise is not None else ():
                assert p.grad is not None and noise is not None
                _add_noise(p.grad, noise[i][case.names[id(p)]], generator)
            if settings.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
            if settings.clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, settings.clip_value)
            finite = not settings.skip_nonfinite or all(is_finite(p.grad) for p in parameters if p.grad is not None)
            if finite:
                type(optimizer).step(optimizer)
                for p in parameters if settings.ema is not None else ():
                    averages[case.names[id(p)]].lerp_(p.detach(), 1 - (settings.ema or 0.0) if averaged else 1.0)
                averaged += 1
            scale *= 1.0 if finite else 0.5  # as torch.amp.GradScaler, which grows it after 2000 steps
        slots = {
            f"{key} of {case.names[id(p)]}": t
            for p, state in optimizer.state.items()
            for key, t in state.items()
            if isinstance(t, torch.Tensor) and case.names.get(id(p)) in case.trained
        }
        slots |= loss | {f"{AVERAGE} of {n}": t for n, t in averages.items()}
        slots |= {f"{AVERAGED} of {n}": torch.tensor(float(averaged), dtype=torch.float64) for n in averages}
        return _results(
            losses,
            before,
            _flat(dict(module.named_parameters()), dict(module.named_buffers()), slots, sketched),
            gradients,
        )


def _stored_gradient(gradient: torch.Tensor, sketched: Sketched) -> torch.Tensor:
    return sketch(gradient) if sketched("", gradient) else gradient.detach().clone()


def _add_noise(gradient: torch.Tensor, norm: float, generator: torch.Generator) -> None:
    """Add a random direction of that norm; for a large gradient the norm is accurate to a thousandth."""
    if not _is_large("", gradient):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64).to(gradient.device)
        gradient += (norm / max(float(direction.norm()), 1e-30) * direction).to(gradient.dtype)
        return
    for (piece,) in pieces(gradient):
        direction = torch.randn(piece.shape, generator=generator, dtype=torch.float64).to(piece.device)
        piece.add_(direction.mul_(norm / math.sqrt(gradient.numel())).to(piece.dtype))


def _device(case: Case) -> str:
    return next(case.program.parameters()).device.type


@contextlib.contextmanager
def _gradients_kept(case: Case) -> Iterator[None]:
    """Set aside the parameters' ``.grad`` inside: it would conflict with parameters that become float64."""
    gradients = [p.grad for p in case.program.parameters()]
    for p in case.program.parameters():
        p.grad = None
    try:
        yield
    finally:
        for p, grad in zip(case.program.parameters(), gradients, strict=True):
            p.grad = grad


@contextlib.contextmanager
def _state_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the optimizer work on a copy of its state inside, in the dtype of its parameters."""
    state, groups = optimizer.state, [dict(g) for g in optimizer.param_groups]

    def own(parameter: torch.Tensor, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wide = parameter.dtype is torch.float64 and value.is_floating_point() and value.dim() > 0
        return value.detach().clone().to(torch.float64 if wide else value.dtype)

    optimizer.state = type(state)(dict)
    for p, slots in state.items():
        optimizer.state[p] = {k: own(p, v) for k, v in slots.items()}
    try:
        yield
    finally:
        optimizer.state = state
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def _reference(
    case: Case, example: Example, waiting: bool, eager: StepResults, random: bool, sketched: Sketched
) -> Reference[StepResults]:
    """Return the steps in float64, or eager itself if float64 cannot be the reference (``random``: it would draw other
    random numbers)."""
    values = [*case.program.parameters(), *eager.losses.values()]
    wider = (
        not random
        and not any(t.is_complex() for t in values)
        and any(t.is_floating_point() and t.dtype is not torch.float64 for t in values)
    )
    exact, moves = eager, dict.fromkeys(eager.after, 0.0)
    with contextlib.ExitStack() as stack:
        if wider:
            try:
                wide = example.with_tensors(to_float64(example.tensors))
                with torch.autocast(_device(case), enabled=False):
                    with in_float64(case.program):
                        exact = _steps_of_eager(case, wide, waiting, sketched, copies=True, keeps_gradients=True)
                    with in_float64(case.program, rounded=True):
                        perturbed_steps = _steps_of_eager(
                            case, wide.with_tensors(perturbed(wide.tensors)), waiting, sketched, copies=True
                        )
            except Exception:  # whatever fails in float64, eager is the next best reference
                exact = eager
        if exact is not eager and _is_same_computation(eager, exact):
            moves = {n: _distance(perturbed_steps, exact, n) for n in exact.after}
            example = wide
            stack.enter_context(torch.autocast(_device(case), enabled=False))
            stack.enter_context(in_float64(case.program))
        else:
            exact = eager
        noisy = _steps_of_eager(case, example, waiting, sketched, _noise(eager, exact), copies=exact is not eager)
    moves = {n: m + _distance(noisy, exact, n) for n, m in moves.items()}
    return Reference(exact, moves, float64=exact is not eager)


def _distance(first: StepResults, second: StepResults, name: str) -> float:
    """Return the distance of two changes over elements that are finite in both; 0 if only one is a sketch (the other
    has NaN or Inf)."""
    a, b = first.change(name), second.change(name)
    return distance_of_finite(a, b) if a.shape == b.shape else 0.0


def _is_same_computation(eager: StepResults, exact: StepResults) -> bool:
    """Return whether float64 is eager with less rounding, not another computation (other random numbers)."""
    if exact.after.keys() != eager.after.keys() or exact.sketched.keys() != eager.sketched.keys():
        return False
    for name, loss in eager.losses.items():
        expected = float(exact.losses[name])
        if not math.isfinite(expected) or abs(float(loss) - expected) > 1e-2 * max(1e-3, abs(expected)):
            return False
    return True


def _noise(eager: StepResults, exact: StepResults) -> Noise:
    """Return the tolerance that ``eager_check.py`` gives each gradient; a quarter of it if eager itself is the
    reference."""
    out = []
    dtypes = {n: eager.look(f"parameter {n}")[0] for gradients in eager.gradients for n in gradients}
    for gradients, exact_gradients in zip(eager.gradients, exact.gradients, strict=True):
        norms = {n: norm(g) for n, g in exact_gradients.items()}
        largest = max(norms.values())
        allowed = {}
        for n, g in gradients.items():
            if exact is eager:
                allowed[n] = Tolerance.of_result(dtypes[n], largest, None).allowed(norms[n]) / 4
            else:
                allowed[n] = Tolerance.of_result(dtypes[n], largest, distance_of_finite(g, exact_gradients[n])).allowed(
                    norms[n]
                )
        out.append(allowed)
    return out


def _compare_steps(
    actual: StepResults, eager: StepResults, reference: Reference[StepResults], reduced_precision: bool
) -> list[Comparison]:
    """Compare the losses, and the change of everything that changes. Raise :class:`ExportError` if dtype or shape
    differ."""
    out, exact = [], reference.results
    for name, loss in eager.losses.items():
        actual_loss, expected_loss = float(actual.losses[name]), float(exact.losses[name])
        if not is_finite(loss):  # the reference is then eager itself
            if actual_loss != expected_loss and not (math.isnan(actual_loss) and math.isnan(expected_loss)):
                raise ExportError(f"{name} is {actual_loss:.6g} in the compiled step and {expected_loss:.6g} in eager")
            if not math.isnan(expected_loss):
                out.append(Comparison(name, 0.0, 0.0))
            continue
        tolerance = Tolerance.of_loss(
            loss.dtype,
            abs(float(loss) - expected_loss) if reference.float64 else None,
            reduced_precision=reduced_precision,
        )
        out.append(Comparison(name, abs(actual_loss - expected_loss), tolerance.allowed(abs(expected_loss))))
    for name, e in eager.after.items():
        if name not in actual.after:
            raise ExportError(f"{name} is in eager's state, and not in the compiled step's")
        (own_dtype, own_shape), (dtype, shape) = actual.look(name), eager.look(name)
        if own_shape != shape or own_dtype != dtype:
            raise ExportError(
                f"{name} is {own_dtype} {tuple(own_shape)} in the compiled step and {dtype} {tuple(shape)} in eager"
            )
        a = actual.after[name]
        if not e.is_floating_point():
            out.append(Comparison(name, distance(a, e), 0.0))
            continue
        if a.shape != e.shape:
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        start = actual.before[name].double()
        change_a, change_e, change_t = (
            a.double() - start,
            e.double() - eager.before.get(name, start).double(),
            exact.after[name].double() - exact.before.get(name, start).double(),
        )
        if not torch.equal(torch.isfinite(change_e), torch.isfinite(change_a)) and not torch.isfinite(change_e).all():
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        tolerance = Tolerance.of_change(
            dtype,
            norm(e),
            distance(change_e, change_t, change_e) if reference.float64 else None,
            reference.moved[name],
            reduced_precision=reduced_precision,
        )
        out.append(compare(f"the change of {name}", change_a, change_t, tolerance, like=change_e))
    return out


def _store(stored: Stored, prefix: str, example: Example, eager: StepResults, allowed: Mapping[str, float]) -> None:
    """Store inputs, losses and a few projections of each tensor's change for ``verify``."""
    for i, value in enumerate(example.tensors):
        stored[f"{prefix}/input/{i}"] = value.detach().contiguous()
    for name, loss in eager.losses.items():
        if name in allowed:  # otherwise it is NaN
            stored_results.store(stored, prefix, name, loss, 2 * allowed[name])  # another machine rounds differently
    for name, e in eager.after.items():
        if e.is_floating_point():
            change, limit = eager.change(name), 2 * allowed[f"the change of {name}"]
            if name in eager.sketched:
                stored_results.store_sketch(stored, prefix, name, change, limit)
            else:
                stored_results.store(stored, prefix, name, probes(change), limit)


def probes(change: torch.Tensor) -> torch.Tensor:
    """Return projections of ``change`` on a few random directions. The error of each is at most that of the whole."""
    flat = change.reshape(-1).double()
    generator = torch.Generator().manual_seed(SEED)
    directions = torch.randn(_PROBES, flat.numel(), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(directions, dim=1) @ flat.cpu()


def results_as_stored(
    package: Package, entry: str, example: Example, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the artifact's results in the form of :func:`_store`, for the names in ``stored``, one variant's part.
    Restore the entry's state."""
    with state_kept(package, entry):
        results = steps_of_entry(package, entry, example, False, lambda name, tensor: f"sketch/{name}" in stored)
    return _as_stored(results, stored)


def steps_as_stored(
    before: Mapping[str, torch.Tensor],
    losses: dict[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    stored: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor | None]:
    """Return the same for another runtime's :data:`STEPS` steps. The state's tensors are named as in
    :class:`StepResults`."""

    def sketched(name: str, tensor: torch.Tensor) -> bool:
        return f"sketch/{name}" in stored

    return _as_stored(_results(losses, _flat({}, {}, before, sketched), _flat({}, {}, after, sketched)), stored)


def _as_stored(results: StepResults, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    tensors: dict[str, torch.Tensor | None] = {}
    for name in stored_results.names_of(stored):
        if name in results.losses:
            tensors[name] = results.losses[name]
        elif name in results.after:
            tensors[name] = results.change(name) if name in results.sketched else probes(results.change(name))
    return tensors

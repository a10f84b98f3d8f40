"""A compiled ``module`` or ``grad`` entry against eager: every output, gradient and buffer, at the example's sizes and at others.

What a result may be off by is stated in ``tolerance.py``. It is compared with eager in float64; s, how far that moves, is found by rounding every
parameter and input otherwise (each changed by a random relative amount of up to eps), and counts for at most 1e-3·max(‖t‖, G). Where float64 is no
reference (random operators draw other numbers, the program casts by itself, an operator has no float64, the program is float64 itself) eager
itself is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import VariantSpec, Verdict
from aot_backward_runtime.loader import Package

from .example_sizes import Example, cotangents_at, sizes_to_check
from .float64 import consumed_cuda_rng, in_float64, perturbed, to_float64
from .named_results import Named, Wrt, results_of_eager, results_of_entry
from .tolerance import Comparison, Reference, Tolerance, compare, distance, is_inexact, norm

_FAR = 1e-2  # eager this far from float64 did not compute the same thing: float64 is no reference then


@dataclass(frozen=True)
class Case:
    """What is exported: the program and, of a ``grad`` entry, what is differentiated. ``reduced_precision``: it computes in 16 bits somewhere,
    whatever its results are (autocast inside the forward)."""

    program: nn.Module
    wrt: Wrt | None
    reduced_precision: bool


def check(package: Package, entry: str, number: int, case: Case, example: Example, stored: dict[str, torch.Tensor]) -> Verdict:
    """Runs variant ``number`` of ``entry`` beside the program at the example's sizes and, where a size is dynamic, at others.

    Raises :class:`ExportError` naming the tensor that is wrong. What was put in and what came out, and how far off a later run may be,
    goes to ``stored`` under ``entry/number/…``.
    """
    spec = package.manifest.entries[entry].variants[number]
    worst, labels = Comparison("", 0.0, 0.0), list[str]()
    numbers = _number_attributes(case.program)
    for sized in sizes_to_check(spec, example):
        where = f"{entry} variant {number}{' at ' + sized.label if sized.label else ''}"
        cotangents = cotangents_at(spec, sized.values)
        try:
            eager = results_of_eager(case.program, sized.example, case.wrt, spec, cotangents)
        except Exception as error:
            if not labels:
                raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
            continue  # eager refuses this size (one row for BatchNorm, an index out of range): nothing to compare with
        _refuse_sparse(entry, eager)
        reference = _reference(case, sized.example, spec, cotangents, eager)
        try:
            actual = results_of_entry(package, entry, spec, sized.example, cotangents)
        except RuntimeError as error:
            called, first = _called(package, spec), str(error).partition("\n")[0]
            raise ExportError.of(
                called[0] if len(called) == 1 else "",
                f"{where}: the compiled code fails where eager does not: {first}"
                + (f". It calls {', '.join(called)} as they are: leave them to eager" if called else ""),
            ) from error
        comparisons = compare_results(actual, eager, reference, reduced_precision=case.reduced_precision)
        _check_strides(entry, actual, eager)
        for comparison in comparisons:
            if comparison.wrong:
                raise ExportError(
                    f"{where}: {comparison.name} is wrong: off by {comparison.error:.3g} from eager, {comparison.allowed:.3g} is allowed; "
                    f"nothing was written{_changed_numbers(case.program, numbers)}"
                )
            worst = max(comparison, worst, key=attrgetter("ratio"))
        if not labels:
            accumulated = results_of_eager(case.program, sized.example, case.wrt, spec, cotangents, accumulated=True)
            _check_accumulated(entry, accumulated, eager, reference, case.reduced_precision)
            _store(stored, f"{entry}/{number}", sized.example, cotangents, eager, _allowed_of_eager(comparisons, eager, reference))
        labels.append(sized.label)
    return Verdict("verified", worst.name, round(worst.ratio, 6), tuple(filter(None, labels)))


def compare_results(actual: Named, eager: Named, reference: Reference[Named], *, reduced_precision: bool = False) -> list[Comparison]:
    """Every tensor of ``eager`` beside ``actual``'s of the same name. :class:`ExportError` where they are no two tensors alike."""
    if actual.keys() != eager.keys():
        raise ExportError(f"{sorted(actual.keys() ^ eager.keys())} exist in only one of the artifact's results and eager's")
    largest = _largest_gradient(reference.results)
    out = []
    for name, e in eager.items():
        a, t = actual[name], reference.results[name]
        if (a is None) != (e is None):
            raise ExportError(f"{name} is {'None' if a is None else 'a tensor'} in the artifact and {'None' if e is None else 'a tensor'} in eager")
        if a is None or e is None or t is None:
            continue
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ExportError(f"{name} is {a.dtype} {tuple(a.shape)} in the artifact and {e.dtype} {tuple(e.shape)} in eager")
        if not is_inexact(e):
            out.append(Comparison(name, distance(a, e), 0.0))
            continue
        if not torch.equal(torch.isfinite(e), torch.isfinite(a)):
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        error_of_eager = distance(e, t, e) if reference.float64 else None
        tolerance = Tolerance.of_result(e.dtype, largest, error_of_eager, reference.moved[name], reduced_precision=reduced_precision)
        out.append(compare(name, a, t, tolerance, like=e))
    return out


def _reference(case: Case, example: Example, spec: VariantSpec, cotangents: Sequence[torch.Tensor], eager: Named) -> Reference[Named]:
    """Eager in float64; or ``eager`` itself, where float64 computes something else."""
    itself = Reference(eager, dict.fromkeys(eager, 0.0), float64=False)
    program, values = case.program, [t for t in [*case.program.parameters(), *eager.values()] if t is not None]
    if consumed_cuda_rng(_device(eager)) or any(t.is_complex() for t in values):
        return itself
    if not any(t.is_floating_point() and t.dtype is not torch.float64 for t in values):
        return itself
    wide, cotangents = example.with_tensors(to_float64(example.tensors)), [c.double() for c in cotangents]
    try:
        near = wide.with_tensors(perturbed(wide.tensors))
        with torch.autocast(_device(eager), enabled=False):
            with in_float64(program):
                exact = results_of_eager(program, wide, case.wrt, spec, cotangents)
            with in_float64(program, rounded=True):
                beside = results_of_eager(program, near, case.wrt, spec, cotangents)
    except Exception:  # whatever stands against float64, eager is the next best
        return itself
    if {n: None if t is None else t.shape for n, t in exact.items()} != {n: None if e is None else e.shape for n, e in eager.items()}:
        return itself
    largest = _largest_gradient(exact)
    moved = {n: min(_distance(beside[n], t), 1e-3 * max(norm(t), largest)) for n, t in exact.items() if t is not None}
    return Reference(exact, moved, float64=True) if _is_same_computation(eager, exact, moved, case.reduced_precision) else itself


def _is_same_computation(eager: Named, exact: Named, moved: Mapping[str, float], reduced_precision: bool) -> bool:
    """Whether float64 is eager with less rounding, and not another computation (other random numbers)."""
    low = (
        reduced_precision
        or any(t is not None and t.dtype in (torch.float16, torch.bfloat16) for t in eager.values())
        or torch.is_autocast_enabled(_device(eager))
    )
    scale = max((norm(t) for t in exact.values() if t is not None and t.is_floating_point()), default=0.0)
    for name, e in eager.items():
        t = exact[name]
        if e is None or t is None or not e.is_floating_point():
            continue
        if not torch.isfinite(t).all() or (not low and _distance(e, t) > _FAR * max(norm(t), 1e-3 * scale) + 100 * moved[name]):
            return False
    return True


def _check_accumulated(entry: str, accumulated: Named, eager: Named, reference: Reference[Named], reduced_precision: bool) -> None:
    """A real ``backward()`` leaves in ``.grad`` what ``torch.autograd.grad`` gives, unless something hangs on the nodes that accumulate it."""
    expected = Reference({n: reference.results[n] for n in accumulated}, reference.moved, reference.float64)
    for comparison in compare_results(accumulated, {n: eager[n] for n in accumulated}, expected, reduced_precision=reduced_precision):
        if comparison.wrong:
            raise ExportError(
                f"{entry}: in eager, backward() leaves another {comparison.name} in .grad than torch.autograd.grad gives, by {comparison.error:.3g}: "
                "something hangs on the parameter's AccumulateGrad node, which no package would run; export without it"
            )


def _check_strides(entry: str, actual: Named, eager: Named) -> None:
    """Strides are part of what a caller may rely on."""
    for name, e in eager.items():
        a = actual[name]
        if a is None or e is None or e.numel() == 0:
            continue
        if any(n > 1 and s != w for n, s, w in zip(e.shape, a.stride(), e.stride(), strict=True)) and name.startswith("output"):
            raise ExportError(f"{entry}: {name} has strides {a.stride()}, eager's has {e.stride()}: return it with .contiguous(), alike in both")


def _refuse_sparse(entry: str, eager: Named) -> None:
    for name, tensor in eager.items():
        if tensor is not None and tensor.layout is not torch.strided:
            raise ExportError(
                f"{entry}: {name} has layout {tensor.layout} in eager, and compiled code gives dense tensors only: leave out sparse=True (of an "
                "Embedding or EmbeddingBag; its dense gradient has the same values)"
            )


def _called(package: Package, spec: VariantSpec) -> list[str]:
    """The operators that are not compiled, but called."""
    calls = [plan.call for plan in (spec.forward, spec.backward, spec.inference, spec.gradient) if plan is not None and plan.call is not None]
    return sorted({o for call in calls for o in package.manifest.libraries[call.library].operators})


def _number_attributes(program: nn.Module) -> dict[str, Any]:
    """Plain attributes that are numbers, by name."""
    modules = program.named_modules()
    return {f"{p}.{n}" if p else n: v for p, m in modules for n, v in m.__dict__.items() if type(v) in (int, float) and n != "training"}


def _changed_numbers(program: nn.Module, before: Mapping[str, Any]) -> str:
    names = [n for n, v in _number_attributes(program).items() if before.get(n, v) != v]
    return (
        f". The forward changes {names}, which a package does not hold: register such a number as a buffer, and change that in place" if names else ""
    )


def _allowed_of_eager(comparisons: Sequence[Comparison], eager: Named, reference: Reference[Named]) -> dict[str, float]:
    """What ``verify``, which has eager's results alone, allows: what was allowed here, and how far eager is from float64."""
    return {c.name: c.allowed + (_distance(eager[c.name], reference.results[c.name]) if reference.float64 else 0.0) for c in comparisons}


def _store(
    stored: dict[str, torch.Tensor], prefix: str, example: Example, cotangents: Sequence[torch.Tensor], eager: Named, allowed: Mapping[str, float]
) -> None:
    for i, value in enumerate(example.tensors):
        stored[f"{prefix}/input/{i}"] = value.detach().contiguous()
    for i, value in enumerate(cotangents):
        stored[f"{prefix}/cotangent/{i}"] = value.contiguous()
    for name, result in eager.items():
        if result is not None:
            stored[f"{prefix}/expected/{name}"] = result.contiguous()
            stored[f"{prefix}/allowed/{name}"] = torch.tensor(allowed.get(name, 0.0), dtype=torch.float64)


def _largest_gradient(named: Named) -> float:
    return max((norm(g) for n, g in named.items() if g is not None and n.startswith("gradient")), default=0.0)


def _device(named: Named) -> str:
    return next((t.device.type for t in named.values() if t is not None), "cpu")


def _distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    """‖a − b‖ over the elements that are finite in both, 0 where one of them is None."""
    return 0.0 if a is None or b is None else norm(a.double() - b.double())

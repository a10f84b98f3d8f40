"""Compare a compiled ``module`` or ``grad`` entry with eager: every output, gradient and buffer, at the example's sizes
and at others.

``tolerance.py`` states the tolerances. The reference is eager in float64. To estimate s, how far the reference moves,
every parameter and input is changed by a random relative amount of up to eps; s counts for at most 1e-3·max(‖t‖, G).
For a single number such as a loss, both s and eager's error may happen to be zero. Before such a number is refused, s
is raised to at least an eighth of the most that such changes can make of it (:func:`_largest_move`); a sum of many
terms that cancel needs this. If float64 is not a valid reference (random operators draw other numbers, the program
casts by itself, an operator has no float64, the program is float64 itself, or eager is far from it, which is not
eager's own rounding), the reference is eager itself.

A large model's float64 gradients never exist all at once, nor together with eager's (:class:`_OneAtATime`): an export
takes less than four times the memory of the weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import VariantSpec, Verdict
from aot_backward_runtime.loader import Package

from . import stored_results
from .example_sizes import Example, Sized, cotangents_at, sizes_to_check
from .float64 import consumed_cuda_rng, in_float64, perturbed, to_float64
from .named_results import Named, Overwritten, Take, Wrt, has_inference_code, results_of_eager, results_of_entry
from .stored_results import Stored, is_large, sketch, sketch_of_finite, sketched_distance
from .tolerance import (
    Comparison,
    Reference,
    Tolerance,
    compare,
    distance,
    distance_of_finite,
    finite_alike,
    is_finite,
    is_inexact,
    is_nan_throughout,
    norm,
)

_FAR = 1e-2  # if eager differs from float64 by more than this, float64 may have computed something else; a guess
_FARTHEST = 0.05  # and by more than this it did, however far eager moves if its inputs are perturbed; a guess


@dataclass(frozen=True)
class Case:
    """An exported program, and the ``wrt`` of a ``grad`` entry. ``reduced_precision``: it computes in 16 bits
    somewhere, whatever the dtype of its results (autocast inside the forward)."""

    program: nn.Module
    wrt: Wrt | None
    reduced_precision: bool


def check(
    load: Callable[[], Package],
    entry: str,
    number: int,
    spec: VariantSpec,
    case: Case,
    sizes: Iterable[Sized],
    stored: Stored,
) -> Verdict:
    """Compare variant ``number`` of ``entry``, described by ``spec``, with the program at ``sizes``. Eager must accept
    the first of them. ``load`` returns the package with separate weights, which are freed while eager runs.

    Write inputs, results and the tolerances for later runs to ``stored`` under ``entry/number/…``. Raise
    :class:`ExportError` naming the tensor that is wrong.
    """
    worst, labels = Comparison("", 0.0, 0.0), list[str]()
    numbers = _number_attributes(case.program)
    for number_of_size, sized in enumerate(sizes):
        location = f"{entry} variant {number}{' at ' + sized.label if sized.label else ''}"
        cotangents = cotangents_at(spec, sized.values)
        eager_run = _EagerCase(case, sized.example, spec, cotangents)
        try:
            eager = eager_run.results()
        except Exception as error:
            if number_of_size == 0:
                raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
            continue  # eager refuses this size (one row for BatchNorm, an index out of range): nothing to compare with
        _refuse_sparse(entry, eager)
        reference, sketches = _reference(eager_run, eager)
        package = load()
        actual = _results_of_entry(package, entry, eager_run, location)
        inferred = (
            _results_of_entry(package, entry, eager_run, location, inference=True) if has_inference_code(spec) else {}
        )
        del package
        comparisons = compare_results(actual, eager, reference, reduced_precision=case.reduced_precision)
        if names := [c.name for c in comparisons if c.wrong and reference.float64 and _is_single_output(c.name, eager)]:
            reference = _with_largest_moves(eager_run, reference, eager, names)
            comparisons = compare_results(actual, eager, reference, reduced_precision=case.reduced_precision)
        _check_strides(entry, actual, eager)
        inference_comparisons = compare_results(
            inferred, {n: eager[n] for n in inferred}, reference, reduced_precision=case.reduced_precision
        )
        for comparison in (
            *comparisons,
            *(dataclasses.replace(c, name=f"{c.name} without gradients") for c in inference_comparisons),
        ):
            if comparison.wrong:
                raise ExportError(
                    f"{location}: {comparison.name} is wrong: off by {comparison.error:.3g} from eager, {comparison.allowed:.3g} is allowed; "
                    f"nothing was written{_changed_numbers(case.program, numbers)}"
                )
            worst = max(comparison, worst, key=attrgetter("ratio"))
        del actual
        if number_of_size == 0:
            _check_accumulated(entry, eager_run.results(accumulated=True), eager, reference, case.reduced_precision)
            allowed = _allowed_of_eager(comparisons, eager, reference)
            _store(stored, f"{entry}/{number}", sized.example, cotangents, eager, allowed, sketches)
        if not any(e is not None and is_nan_throughout(e) for e in eager.values()):
            labels.append(sized.label)
    return Verdict("verified", worst.name, round(worst.ratio, 6), tuple(filter(None, labels)))


def is_right(entry: str, case: Case, example: Example, package: Package, spec: VariantSpec) -> bool:
    """Return whether ``entry`` of ``package``, with ``spec`` as its only variant, agrees with eager on the example.
    This is a weaker check than :func:`check`: the reference is eager itself."""
    values = next(sizes_to_check(spec, example)).values
    cotangents = cotangents_at(spec, values)
    try:
        eager = results_of_eager(case.program, example, case.wrt, spec, cotangents)
        actual = results_of_entry(package, entry, spec, example, cotangents)
        reference = Reference(eager, dict.fromkeys(eager, 0.0), float64=False)
        return not any(c.wrong for c in compare_results(actual, eager, reference, reduced_precision=True))
    except (ExportError, RuntimeError):
        return False


def compare_results(
    actual: Named, eager: Named, reference: Reference[Named], *, reduced_precision: bool = False
) -> list[Comparison]:
    """Compare each tensor of ``actual`` with ``eager``'s of the same name. Raise :class:`ExportError` if dtype or shape
    differ."""
    if actual.keys() != eager.keys():
        raise ExportError(
            f"results in only one of eager and the package: {', '.join(sorted(actual.keys() ^ eager.keys()))}"
        )
    largest = _largest_gradient(reference.results)
    out = []
    for name, e in eager.items():
        a, t = actual[name], reference.results[name]
        if (a is None) != (e is None):
            raise ExportError(
                f"{name} is {'None' if a is None else 'a tensor'} in the artifact and {'None' if e is None else 'a tensor'} in eager"
            )
        if a is None or e is None or t is None:
            continue
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ExportError(
                f"{name} is {a.dtype} {tuple(a.shape)} in the artifact and {e.dtype} {tuple(e.shape)} in eager"
            )
        if not is_inexact(e):
            out.append(Comparison(name, distance(a, e), 0.0))
            continue
        if not finite_alike(e, a):
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        error_of_eager = _error_of_eager(name, e, reference) if reference.float64 else None
        tolerance = Tolerance.of_result(
            e.dtype, largest, error_of_eager, reference.moved[name], reduced_precision=reduced_precision
        )
        out.append(compare(name, a, t, tolerance, like=e))
    return out


@dataclass(frozen=True)
class _EagerCase:
    """A case and the inputs that it runs on."""

    case: Case
    example: Example
    spec: VariantSpec
    cotangents: Sequence[torch.Tensor]

    def results(self, *, accumulated: bool = False, take: Take | None = None) -> Named:
        """Return eager's results."""
        return results_of_eager(
            self.case.program,
            self.example,
            self.case.wrt,
            self.spec,
            self.cotangents,
            accumulated=accumulated,
            take=take,
        )

    def in_float64(self, *, rounded: bool, take: Take | None) -> Named:
        """Return eager's results in float64; with ``rounded``, on :func:`perturbed` parameters and inputs."""
        inputs = to_float64(self.example.tensors)
        example = self.example.with_tensors(perturbed(inputs) if rounded else inputs)
        float64_run = dataclasses.replace(self, example=example, cotangents=[c.double() for c in self.cotangents])
        with in_float64(self.case.program, rounded=rounded):
            return float64_run.results(take=take)


class _OneAtATime:
    """Gradients of a large model, taken one at a time. Only a sketch of eager's is kept. Each float64 gradient is
    rounded to float32 when backward has computed it, an error of a hundredth of the tolerance. The error of eager and
    the move of float64 are distances of two sketches."""

    def __init__(self, eager: Named, *, frees: bool):
        """Replace the large gradients in ``eager`` by sketches. ``frees``: free a float64 parameter once its gradient
        is computed, because no later operator of the backward reads it. Any other reader, such as a hook, finds NaN."""
        self._frees = frees
        self.sketches = dict[str, torch.Tensor]()
        self.errors, self.moved, self.finite = dict[str, float](), dict[str, float](), True
        self._eager, self._beside = eager, dict[str, torch.Tensor]()
        for name, e in eager.items():
            if (
                e is not None
                and name.startswith("gradient of ")
                and e.dtype is torch.float32
                and is_large(e)
                and (sums := sketch_of_finite(e)) is not None
            ):
                self.sketches[name] = sums
                eager[name] = e.new_zeros(()).expand(e.shape)

    def take_beside(self, name: str, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Sketch the gradient of the perturbed run; called before :meth:`take`."""
        if name not in self.sketches:
            return gradient
        self._beside[name] = sketch(gradient)
        self._free(leaf)
        return gradient.new_zeros(()).expand(gradient.shape)

    def take(self, name: str, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if name not in self.sketches:
            return gradient
        exact = sketch(gradient)
        self.errors[name] = sketched_distance(self.sketches[name], exact)
        self.moved[name] = sketched_distance(self._beside[name], exact)
        self.finite &= is_finite(exact)
        self._eager[name] = rounded = gradient.to(torch.float32)
        self._free(leaf)
        return rounded

    def _free(self, leaf: torch.Tensor) -> None:
        if self._frees and leaf.dtype is torch.float64:
            leaf.data = leaf.data.new_full((), math.nan).expand(leaf.shape)


def _reference(eager_run: _EagerCase, eager: Named) -> tuple[Reference[Named], Mapping[str, torch.Tensor]]:
    """Return eager in float64, or ``eager`` itself if float64 computes something else. Also return sketches of the
    results in ``eager`` that float64 results have replaced."""
    program = eager_run.case.program
    eager_reference = Reference(eager, dict.fromkeys(eager, 0.0), float64=False)
    dtypes = {t.dtype for t in [*program.parameters(), *eager.values()] if t is not None}
    if consumed_cuda_rng(_device(eager)) or any(d.is_complex for d in dtypes):
        return eager_reference, {}
    if not any(d.is_floating_point and d is not torch.float64 for d in dtypes):
        return eager_reference, {}
    has_hooks = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in program.parameters())
    for frees in (False,) if has_hooks else (True, False):
        large = _OneAtATime(eager if len(eager_run.spec.orders) == 1 else {}, frees=frees)
        reference = _in_float64(eager_run, eager, large)
        if reference is not None:
            return reference, large.sketches
        if not large.sketches:
            break
        eager.update(eager_run.results())
    return eager_reference, {}


def _in_float64(eager_run: _EagerCase, eager: Named, large: _OneAtATime) -> Reference[Named] | None:
    """Return eager's results in float64, or None if float64 computes something else."""
    shapes = {n: None if e is None else e.shape for n, e in eager.items()}
    try:
        with torch.autocast(_device(eager), enabled=False):
            perturbed_results = eager_run.in_float64(rounded=True, take=large.take_beside if large.sketches else None)
            exact = eager_run.in_float64(rounded=False, take=large.take if large.sketches else None)
    except Exception:  # whatever fails in float64, eager is the next best reference
        exact = {}
    if (
        {n: None if t is None else t.shape for n, t in exact.items()} == shapes
        and large.finite
        and large.errors.keys() == large.sketches.keys()
    ):
        largest = _largest_gradient(exact)
        moves = dict[str, float]()
        for name, t in exact.items():
            if t is not None:
                perturbed_result = perturbed_results[name]
                move = (
                    large.moved[name]
                    if name in large.moved or perturbed_result is None
                    else distance_of_finite(perturbed_result, t)
                )
                moves[name] = min(move, 1e-3 * max(norm(t), largest))
        reference = Reference(exact, moves, float64=True, eager_errors=large.errors)
        far = _far_from_eager(eager, reference, eager_run.case.reduced_precision)
        if not far or _moves_as_far(eager_run, {**eager, **large.sketches}, reference, far):
            return reference
    return None


def _is_single_output(name: str, eager: Named) -> bool:
    tensor = eager[name]
    return name.startswith("output[") and tensor is not None and tensor.numel() == 1 and tensor.is_floating_point()


def _with_largest_moves(
    eager_run: _EagerCase, reference: Reference[Named], eager: Named, names: Sequence[str]
) -> Reference[Named]:
    """Return ``reference`` with each of ``names``, outputs of one number, moving by at least an eighth of its largest
    move."""
    moves, largest = dict(reference.moved), _largest_gradient(reference.results)
    for name in names:
        e, t = eager[name], reference.results[name]
        assert e is not None and t is not None
        move = _largest_move(eager_run, int(name[len("output[") : -1]), e) / 8
        moves[name] = max(moves[name], min(move, 1e-3 * max(norm(t), largest)))
    return dataclasses.replace(reference, moved=moves)


def _largest_move(eager_run: _EagerCase, output: int, eager: torch.Tensor) -> float:
    """Return Σ eps·|x·∂t/∂x| over all numbers x of parameters and inputs, for t the single-number output ``output``. To
    first order, t moves by at most this much if each x changes by eps of its dtype, or of the dtype of ``eager`` (t in
    eager) if that is coarser. Return 0 if t cannot be differentiated by them."""
    parameters = {n: p for n, p in eager_run.case.program.named_parameters() if p.is_floating_point()}
    inputs = {i: t for i, t in enumerate(eager_run.example.tensors) if t.is_floating_point()}
    wrt = (*(("parameter", n) for n in parameters), *(("input", i) for i in inputs))
    example = eager_run.example.with_tensors(
        [t.requires_grad_() if i in inputs else t for i, t in enumerate(to_float64(eager_run.example.tensors))]
    )
    try:
        with in_float64(eager_run.case.program), torch.autocast(eager.device.type, enabled=False):
            results = results_of_eager(eager_run.case.program, example, wrt, eager_run.spec, (), root=output)
    except RuntimeError:  # the output cannot be differentiated, or the program writes to an input
        return 0.0
    values = {
        n: t.detach()
        for n, t in [*parameters.items(), *((eager_run.spec.inputs[i].name, t) for i, t in inputs.items())]
    }
    gradients = {n: results[f"gradient of {n}"] for n in values}
    eps = {n: max(torch.finfo(t.dtype).eps, torch.finfo(eager.dtype).eps) for n, t in values.items()}
    return sum(eps[n] * float((g * values[n]).abs().sum()) for n, g in gradients.items() if g is not None)


def _error_of_eager(name: str, eager: torch.Tensor, reference: Reference[Named]) -> float:
    """Return ‖e − t‖ over the finite elements of e, or inf if other elements of t are finite."""
    exact = reference.results[name]
    return (
        reference.eager_errors[name]
        if name in reference.eager_errors or exact is None
        else distance(eager, exact, eager)
    )


def _far_from_eager(eager: Named, reference: Reference[Named], reduced_precision: bool) -> list[str]:
    """Return the results for which float64 is perhaps not eager with less rounding, but another computation (other
    random numbers)."""
    exact = reference.results
    low = (
        reduced_precision
        or any(t is not None and t.dtype in (torch.float16, torch.bfloat16) for t in eager.values())
        or torch.is_autocast_enabled(_device(eager))
    )
    scale = _largest_norm(exact)
    far = []
    for name, e in eager.items():
        t = exact[name]
        if e is None or t is None or not e.is_floating_point():
            continue
        if not is_finite(t) or (
            not low and _distance(name, e, reference) > _FAR * max(norm(t), 1e-3 * scale) + 100 * reference.moved[name]
        ):
            far.append(name)
    return far


def _largest_norm(results: Named) -> float:
    return max((norm(t) for t in results.values() if t is not None and t.is_floating_point()), default=0.0)


def _moves_as_far(eager_run: _EagerCase, eager: Named, reference: Reference[Named], names: Sequence[str]) -> bool:
    """Return whether float64 is at most four times as far from eager, in each of ``names``, as eager is from itself on
    :func:`perturbed` inputs. Then the difference is eager's rounding. BatchNorm over channels-last images, for
    instance, adds up in float32: eager's gradients of a MobileNet are off by 2 %. The parameters are not perturbed."""
    example = eager_run.example.with_tensors(perturbed(eager_run.example.tensors))
    try:
        moved = dataclasses.replace(eager_run, example=example).results()
    except Exception:  # whatever fails on other numbers, eager itself is the next best reference
        return False
    scale = _largest_norm(reference.results)
    for name in names:
        e, m, t = eager[name], moved[name], reference.results[name]
        if e is None or m is None or t is None or not is_finite(t):
            return False
        move = sketched_distance(e, sketch(m)) if name in reference.eager_errors else distance_of_finite(m, e)
        if not _distance(name, e, reference) <= min(4 * move, _FARTHEST * max(norm(t), 1e-3 * scale)):
            return False
    return True


def _results_of_entry(
    package: Package, entry: str, eager_run: _EagerCase, location: str, *, inference: bool = False
) -> Named:
    """Return the entry's results. Raise :class:`ExportError` if the compiled code fails."""
    try:
        return results_of_entry(
            package, entry, eager_run.spec, eager_run.example, eager_run.cotangents, inference=inference
        )
    except Overwritten as error:
        raise ExportError(f"{location}: {error}; nothing was written") from error
    except RuntimeError as error:
        operators, message = _called_kernels(package, eager_run.spec), str(error).partition("\n")[0]
        raise ExportError.of(
            operators[0] if len(operators) == 1 else "",
            f"{location}: the compiled code fails, and eager does not: {message}"
            + (
                f". The code calls operators that are not compiled: {', '.join(operators)}. Leave them to eager"
                if operators
                else ""
            ),
        ) from error


def _check_accumulated(
    entry: str, accumulated: Named, eager: Named, reference: Reference[Named], reduced_precision: bool
) -> None:
    """Check that ``backward()`` leaves in ``.grad`` the result of ``torch.autograd.grad``. Hooks on the AccumulateGrad
    nodes can change it."""
    expected = dataclasses.replace(reference, results={n: reference.results[n] for n in accumulated})
    for comparison in compare_results(
        accumulated, {n: eager[n] for n in accumulated}, expected, reduced_precision=reduced_precision
    ):
        if comparison.wrong:
            raise ExportError(
                f"{entry}: in eager, the {comparison.name} that backward() leaves in .grad differs by {comparison.error:.3g} from the result of "
                "torch.autograd.grad: the parameter's AccumulateGrad node has a hook, and a package would not run it. Export without it"
            )


def _check_strides(entry: str, actual: Named, eager: Named) -> None:
    """Check the strides of outputs: callers may rely on them."""
    for name, e in eager.items():
        a = actual[name]
        if a is None or e is None or e.numel() == 0:
            continue
        differ = any(n > 1 and s != w for n, s, w in zip(e.shape, a.stride(), e.stride(), strict=True))
        if differ and name.startswith("output"):
            raise ExportError(
                f"{entry}: {name}: expected eager's strides {e.stride()}, got {a.stride()}. Return it with .contiguous(): both then agree"
            )


def _refuse_sparse(entry: str, eager: Named) -> None:
    for name, tensor in eager.items():
        if tensor is not None and tensor.layout is not torch.strided:
            raise ExportError(
                f"{entry}: {name}: expected a dense tensor from eager, got layout {tensor.layout}, which compiled code cannot return. Omit "
                "sparse=True of an Embedding or EmbeddingBag: its dense gradient has the same values"
            )


def _called_kernels(package: Package, spec: VariantSpec) -> list[str]:
    """Return the operators that are called, not compiled."""
    calls = [
        plan.call
        for plan in (spec.forward, spec.backward, spec.inference, spec.gradient)
        if plan is not None and plan.call is not None
    ]
    return sorted({o for call in calls for o in package.manifest.libraries[call.library].operators})


def _number_attributes(program: nn.Module) -> dict[str, Any]:
    """Return plain attributes that are numbers, by name."""
    modules = program.named_modules()
    return {
        f"{p}.{n}" if p else n: v
        for p, m in modules
        for n, v in m.__dict__.items()
        if type(v) in (int, float) and n != "training"
    }


def _changed_numbers(program: nn.Module, before: Mapping[str, Any]) -> str:
    names = [n for n, v in _number_attributes(program).items() if before.get(n, v) != v]
    text = ", ".join(map(repr, names))
    return (
        f". The forward changes {text}, which a package does not store: register it as a buffer, and change that in place"
        if names
        else ""
    )


def _allowed_of_eager(comparisons: Sequence[Comparison], eager: Named, reference: Reference[Named]) -> dict[str, float]:
    """Return the tolerances for ``verify``, which only has eager's results: the tolerance of this check plus eager's
    distance from float64."""
    return {
        c.name: c.allowed + (_distance(c.name, eager[c.name], reference) if reference.float64 else 0.0)
        for c in comparisons
    }


def _store(
    stored: Stored,
    prefix: str,
    example: Example,
    cotangents: Sequence[torch.Tensor],
    eager: Named,
    allowed: Mapping[str, float],
    sketches: Mapping[str, torch.Tensor],
) -> None:
    """Store inputs, incoming gradients and results. ``sketches``: of results that are no longer in ``eager``."""
    for i, value in enumerate(example.tensors):
        stored[f"{prefix}/input/{i}"] = value.detach().contiguous()
    for i, value in enumerate(cotangents):
        stored[f"{prefix}/cotangent/{i}"] = value.contiguous()
    for name, result in eager.items():
        if name in sketches:
            stored_results.store_sketch(stored, prefix, name, sketches[name], allowed[name])
        elif result is not None:
            stored_results.store(stored, prefix, name, result, allowed.get(name, 0.0))


def _largest_gradient(results: Named) -> float:
    return max((norm(g) for n, g in results.items() if g is not None and n.startswith("gradient")), default=0.0)


def _device(results: Named) -> str:
    return next((t.device.type for t in results.values() if t is not None), "cpu")


def _distance(name: str, eager: torch.Tensor | None, reference: Reference[Named]) -> float:
    """Return ‖e − t‖ over the elements that are finite in both, or 0 if e or t is None."""
    exact = reference.results[name]
    if name in reference.eager_errors:
        return reference.eager_errors[name]
    return 0.0 if eager is None or exact is None else distance_of_finite(eager, exact)

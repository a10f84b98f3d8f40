"""The artifact against eager, and the measure of "equal".

Per tensor, with a the artifact's, e eager's and t eager's in float64 ("the truth"):

    ‖a − t‖ ≤ 4·‖e − t‖ + 32·eps·max(‖t‖, 0.1·G) + 8·s

where eps is that of the tensor's dtype, G the largest gradient's norm, and s = ‖t' − t‖ how far the truth itself moves when every parameter
and input is rounded otherwise (each changed by a random relative amount of up to eps; at most 1e-3·max(‖t‖, G)). So the artifact may be as
far from the truth as eager is; a gradient whose true value is zero (a bias before BatchNorm) is not compared noise with noise; and where the
program is ill-conditioned (BatchNorm over two rows), eager's luck is not the measure. Where float64 is no truth (random operators draw other
numbers, the program casts by itself, an operator has no float64, the program is float64 itself) eager stands for it, with the plain
tolerances below.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError, InputError
from aot_backward_runtime.format.manifest import Manifest, SymbolSpec, VariantSpec, Verdict
from aot_backward_runtime.loader import Package, device_of
from aot_backward_runtime.native.guards import Contract

from .. import torch_api
from ..capture import layer_patches, preserve

SEED = 20
RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}
RELATIVE |= {torch.complex64: 2e-4, torch.complex128: 1e-9, torch.complex32: 3e-2}
"""‖a − e‖ / ‖e‖ allowed where eager stands for the truth."""
_FAR = 1e-2  # eager this far from float64 did not compute the same thing: float64 is no truth then

Named = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Example:
    """One call: arguments (real tensors, leaves), mode, and for a ``grad`` entry what is differentiated. ``coarse``: the program computes in 16 bits
    somewhere, whatever its results are (autocast inside the forward)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: str
    wrt: tuple[tuple[str, Any], ...] | None
    coarse: bool = False


@dataclass(frozen=True)
class Difference:
    """How one tensor compares; ``ratio`` above 1 is wrong."""

    name: str
    ratio: float
    error: float
    allowed: float


class _Unwritten:
    """Stands for an archive whose libraries still lie where the compiler put them."""

    def __init__(self, manifest: Manifest, libraries: Mapping[str, Path]):
        self.manifest, self._libraries, self.path, self.manifest_digest = manifest, libraries, Path("the package being built"), ""

    def library(self, name: str) -> Path:
        return self._libraries[name]


def loaded(manifest: Manifest, libraries: Mapping[str, Path], weights: Mapping[str, torch.Tensor]) -> Package:
    """The package as the runtime would load it, on copies of the weights."""
    device = device_of(manifest)
    copies = {k: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for k, t in weights.items()}
    return Package(_Unwritten(manifest, libraries), copies, {}, device)  # type: ignore[arg-type]


def check(package: Package, entry: str, number: int, program: nn.Module, example: Example, stored: dict[str, torch.Tensor]) -> Verdict:
    """Runs variant ``number`` of ``entry`` beside ``program`` at the example's sizes and, where a size is dynamic, at others.

    Raises :class:`ExportError` naming the tensor that is wrong. What was put in and what came out, and how far off a later run may be,
    goes to ``stored`` under ``entry/number/…``.
    """
    spec = package.manifest.entries[entry].variants[number]
    worst, sizes = Difference("", 0.0, 0.0, 0.0), list[str]()
    numbers = _numbers(program)
    for values, args, kwargs in sizes_of(spec, example):
        at = ", ".join(f"{s.label}={values[s.name]}" for s in spec.symbols)
        cotangents = cotangents_at(spec, values)
        try:
            expected = _eager(program, example, args, kwargs, cotangents, spec)
        except Exception as error:
            if not sizes:
                raise ExportError(f"{entry}: the program itself fails on its example inputs: {error}") from error
            continue  # eager refuses this size (one row for BatchNorm, an index out of range): nothing to compare with
        _refuse_sparse(entry, expected)
        truth, moved = (expected, {}) if drew(_device(expected)) else _truth(program, example, args, kwargs, cotangents, spec, expected)
        try:
            actual = artifact(package, entry, spec, example.mode, args, kwargs, cotangents)
        except RuntimeError as error:
            called, first = _called(package, spec), str(error).partition("\n")[0]
            raise ExportError.of(
                called[0] if len(called) == 1 else "",
                f"{entry} variant {number}{' at ' + at if at else ''}: the compiled code fails where eager does not: {first}"
                + (f". It calls {', '.join(called)} as they are: leave them to eager" if called else ""),
            ) from error
        differences = compare(actual, expected, truth, moved, example.coarse)
        _same_form(entry, actual, expected)
        for difference in differences:
            if not difference.ratio <= 1:
                raise ExportError(
                    f"{entry} variant {number}{' at ' + at if at else ''}: {difference.name} is wrong: off by {difference.error:.3g} from eager, "
                    f"{difference.allowed:.3g} is allowed; nothing was written{_changed(program, numbers)}"
                )
            if difference.ratio >= worst.ratio:
                worst = difference
        if not sizes:
            _check_filled(entry, _eager(program, example, args, kwargs, cotangents, spec, filled=True), expected, truth, moved, example.coarse)
            allowed = {d.name: d.allowed + _norm(_minus(expected[d.name], truth[d.name])) for d in differences}
            _store(stored, f"{entry}/{number}", args, kwargs, cotangents, expected, allowed)
        sizes.append(at)
    return Verdict("verified", worst.name, round(worst.ratio, 6), tuple(s for s in sizes if s))


def _check_filled(entry: str, filled: Named, expected: Named, truth: Named, moved: Mapping[str, float], coarse: bool) -> None:
    """A real ``backward()`` fills ``.grad`` with what ``torch.autograd.grad`` gives, unless something hangs on the nodes that accumulate it."""
    eager = {n: expected[n] for n in filled}
    right = eager if truth is expected else {n: truth[n] for n in filled}
    for difference in compare(filled, eager, right, moved, coarse):
        if not difference.ratio <= 1:
            raise ExportError(
                f"{entry}: in eager, backward() leaves another {difference.name} in .grad than torch.autograd.grad gives, by {difference.error:.3g}: "
                "something hangs on the parameter's AccumulateGrad node, which no package would run; export without it"
            )


def _called(package: Package, spec: VariantSpec) -> list[str]:
    """The operators that are not compiled, but called."""
    calls = [plan.call for plan in (spec.forward, spec.backward, spec.inference, spec.gradient) if plan is not None and plan.call is not None]
    return sorted({o for call in calls for o in package.manifest.libraries[call.library].operators})


def _numbers(program: nn.Module) -> dict[str, Any]:
    """Plain attributes that are numbers, by name."""
    modules = program.named_modules()
    return {f"{p}.{n}" if p else n: v for p, m in modules for n, v in m.__dict__.items() if type(v) in (int, float) and n != "training"}


def _changed(program: nn.Module, before: Mapping[str, Any]) -> str:
    names = [n for n, v in _numbers(program).items() if before.get(n, v) != v]
    return (
        f". The forward changes {names}, which a package does not hold: register such a number as a buffer, and change that in place" if names else ""
    )


def _refuse_sparse(entry: str, expected: Named) -> None:
    for name, tensor in expected.items():
        if tensor is not None and tensor.layout is not torch.strided:
            raise ExportError(
                f"{entry}: {name} has layout {tensor.layout} in eager, and compiled code gives dense tensors only: leave out sparse=True (of an "
                "Embedding or EmbeddingBag; its dense gradient has the same values)"
            )


def artifact(package: Package, entry: str, spec: VariantSpec, mode: str, args: Any, kwargs: Any, cotangents: Sequence[torch.Tensor]) -> Named:
    """Everything that the loaded entry gives, by name: outputs, gradients and buffers."""
    out: Named = {}
    args, kwargs = _leaves_again(args, kwargs)
    kind = package.manifest.entries[entry].kind
    torch.manual_seed(SEED)
    if kind == "grad":
        grad = package.grad(entry)
        if mode:
            grad.train(mode == "train")
        with undone({n: t for n, t in grad.parameters.items() if not t.requires_grad}):
            value, grads = grad(*args, **kwargs)
            _outputs(out, value)
            names = package.manifest.entries[entry].names
            grads = {names[0]: grads} if package.manifest.entries[entry].single else grads
            out.update({f"gradient of {n}": g for n, g in grads.items()})
            return {n: None if v is None else v.detach().clone() for n, v in out.items()}
    module = package.module(entry).train(mode == "train")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets = _targets(spec, parameters, args, kwargs)
    with undone(dict(module.named_buffers())), preserve.requiring_alone(parameters.values(), targets.values()), torch.enable_grad():
        value = module(*args, **kwargs)
        flat = _outputs(out, value)
        if targets and spec.differentiable:
            outputs = [flat[i] for i in spec.differentiable]
            _gradients(out, outputs, targets, cotangents, _order(spec))
        out.update({f"buffer {n}": b for n, b in module.named_buffers()})
        return {n: None if v is None else v.detach().clone() for n, v in out.items()}


def _eager(
    program: nn.Module, example: Example, args: Any, kwargs: Any, cotangents: Sequence[torch.Tensor], spec: VariantSpec, *, filled: bool = False
) -> Named:
    """The same names from eager. ``program``'s buffers are put back. ``filled``: only what ``backward()`` leaves in ``.grad`` of the parameters."""
    out: Named = {}
    args, kwargs = _leaves_again(args, kwargs)
    parameters = dict(program.named_parameters(remove_duplicate=False))
    if example.wrt is not None:
        flat_in = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        targets = {(spec.inputs[w].name if k == "input" else w): (flat_in[w] if k == "input" else parameters[w]) for k, w in example.wrt}
    else:
        targets = _targets(spec, parameters, args, kwargs)
    torch.manual_seed(SEED)
    torch.clear_autocast_cache()  # it keeps casts of weights for as long as the caller's autocast lasts, whatever becomes of the weights
    with (
        preserve.in_mode(program, example.mode),
        preserve.slots_kept(program),
        undone(dict(program.named_buffers())),
        preserve.requiring_alone(parameters.values(), targets.values()),
        layer_patches.plain_checkpoints(),
        torch.enable_grad(),
    ):
        value = program(*args, **kwargs)
        flat = _outputs(out, value)
        if filled:
            outputs = flat[:1] if example.wrt is not None else [flat[i] for i in spec.differentiable]
            given = None if example.wrt is not None else [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
            own = {id(p) for p in parameters.values()}
            return _filled(outputs, given, {n: t for n, t in targets.items() if id(t) in own})
        if example.wrt is not None:
            gradients = torch.autograd.grad(flat[0], list(targets.values()), allow_unused=True)
            out.update({f"gradient of {n}": g for n, g in zip(targets, gradients, strict=True)})
        elif targets and spec.differentiable:
            outputs = [flat[i] for i in spec.differentiable]
            _gradients(out, outputs, targets, [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)], _order(spec))
        if example.wrt is None:
            out.update({f"buffer {n}": b for n, b in program.named_buffers()})
        return {n: None if v is None else v.detach().clone() for n, v in out.items()}


def _filled(outputs: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor] | None, parameters: Mapping[str, torch.Tensor]) -> Named:
    """``.grad`` of ``parameters`` after a backward of ``outputs``, by ``gradient of NAME``. Their own ``.grad`` are put aside."""
    if not parameters or not outputs:
        return {}
    before = [(p, p.grad) for p in parameters.values()]
    try:
        for p, _ in before:
            p.grad = None
        torch.autograd.backward(outputs, cotangents, inputs=list(parameters.values()))
        return {f"gradient of {n}": p.grad for n, p in parameters.items()}
    finally:
        for p, grad in before:
            p.grad = grad


def _order(spec: VariantSpec) -> int:
    return 1 if spec.double is None else 1 + _order(spec.double)


def _gradients(
    out: Named, outputs: Sequence[torch.Tensor], targets: Mapping[str, torch.Tensor], cotangents: Sequence[torch.Tensor], order: int
) -> None:
    """Notes the gradients of ``outputs``; then those of the gradients themselves, also with regard to the incoming ones, up to ``order``."""
    sources, prefix = dict(targets), ""
    for level in range(1, order + 1):
        last = level == order
        if not last:
            cotangents = [c.detach().clone().requires_grad_() for c in cotangents]
        gradients = torch.autograd.grad(outputs, list(sources.values()), list(cotangents), allow_unused=True, create_graph=not last)
        out.update({f"{prefix}gradient of {n}": g for n, g in zip(sources, gradients, strict=True)})
        if last:
            return
        sources |= {f"incoming {prefix}gradient {i}": c for i, c in enumerate(cotangents)}
        outputs = [g for g in gradients if g is not None]
        generator = torch.Generator().manual_seed(SEED + level)
        draws = [torch.randn(g.shape, generator=generator, dtype=torch.complex64 if g.is_complex() else torch.float32) for g in outputs]
        cotangents = [c.to(g) for c, g in zip(draws, outputs, strict=True)]
        prefix = ("second-order ", "third-order ", "fourth-order ")[level - 1]


def drew(device: str) -> bool:
    """Whether what ran since the seed was set has drawn random numbers on a GPU: there float64 draws others than narrower types do. The seed is set
    again."""
    if device != "cuda":
        return False
    after = torch.cuda.get_rng_state()
    torch.manual_seed(SEED)
    return not torch.equal(after, torch.cuda.get_rng_state())


def _truth(
    program: nn.Module, example: Example, args: Any, kwargs: Any, cotangents: Sequence[torch.Tensor], spec: VariantSpec, eager: Named
) -> tuple[Named, dict[str, float]]:
    """Eager in float64 and how far it moves with the rounding of what goes in; or ``eager`` itself, where float64 computes something else."""
    values = [t for t in [*program.parameters(), *eager.values()] if t is not None]
    if any(t.is_complex() for t in values) or not any(t.is_floating_point() and t.dtype is not torch.float64 for t in values):
        return eager, {}
    (args, kwargs), cotangents = doubled(args, kwargs), [c.double() for c in cotangents]
    try:
        with torch.autocast(_device(eager), enabled=False):
            with in_float64(program):
                truth = _eager(program, example, args, kwargs, cotangents, spec)
            with in_float64(program, rounded=True):
                near = _eager(program, example, rounded_values(args), rounded_values(kwargs), cotangents, spec)
    except Exception:  # whatever stands against float64, eager is the next best
        return eager, {}
    if {n: None if t is None else t.shape for n, t in truth.items()} != {n: None if e is None else e.shape for n, e in eager.items()}:
        return eager, {}
    largest = _largest_gradient(truth)
    moved = {n: min(_norm(_minus(near[n], t)), 1e-3 * max(_norm(t), largest)) for n, t in truth.items() if t is not None}
    return (truth, moved) if _computes_the_same(eager, truth, moved, example.coarse) else (eager, {})


def _computes_the_same(eager: Named, truth: Named, moved: Mapping[str, float], coarse: bool) -> bool:
    """Whether float64 is eager with less rounding, and not another computation (other random numbers)."""
    low = (
        coarse
        or any(t is not None and t.dtype in (torch.float16, torch.bfloat16) for t in eager.values())
        or torch.is_autocast_enabled(_device(eager))
    )
    scale = max((_norm(t) for t in truth.values() if t is not None and t.is_floating_point()), default=0.0)
    for name, e in eager.items():
        t = truth[name]
        if e is None or t is None or not e.is_floating_point():
            continue
        if not torch.isfinite(t).all() or (not low and _norm(_minus(e, t)) > _FAR * max(_norm(t), 1e-3 * scale) + 100 * moved[name]):
            return False
    return True


def _largest_gradient(named: Named) -> float:
    return max((_norm(g) for n, g in named.items() if g is not None and n.startswith("gradient")), default=0.0)


def compare(actual: Named, eager: Named, truth: Named, moved: Mapping[str, float], coarse: bool = False) -> list[Difference]:
    """Every tensor of ``eager`` against ``actual``'s of the same name. ``moved``: s of the measure above; eager stands for the truth where
    ``truth`` is ``eager``."""
    if actual.keys() != eager.keys():
        raise ExportError(f"the artifact gives {sorted(actual.keys() ^ eager.keys())} otherwise than eager")
    largest = _largest_gradient(truth)
    out = []
    for name, e in eager.items():
        a, t = actual[name], truth[name]
        if (a is None) != (e is None):
            raise ExportError(f"{name} is {'None' if a is None else 'a tensor'} in the artifact and {'None' if e is None else 'a tensor'} in eager")
        if a is None or e is None or t is None:
            continue
        if a.shape != e.shape or a.dtype != e.dtype:
            raise ExportError(f"{name} is {a.dtype} {tuple(a.shape)} in the artifact and {e.dtype} {tuple(e.shape)} in eager")
        if not (e.is_floating_point() or e.is_complex()):
            error = float((a != e).sum())
            out.append(Difference(name, 2.0 if error else 0.0, error, 0.0))
            continue
        finite = torch.isfinite(e)
        if not torch.equal(finite, torch.isfinite(a)):
            raise ExportError(f"{name} has NaN or Inf where eager has none, or the reverse")
        a, e, t = (torch.where(finite, x, torch.zeros_like(x)) for x in (a, e, t))
        scale = max(_norm(t), 1e-3 * largest)
        if truth is eager:
            allowed = max(RELATIVE[e.dtype], RELATIVE[torch.bfloat16] if coarse else 0.0) * scale
        else:
            scale = max(scale, 0.1 * largest)  # what is zero but for rounding, as a bias before BatchNorm, has the rounding of the others
            allowed = 4 * _norm(_minus(e, t)) + 32 * torch.finfo(e.dtype).eps * scale + 8 * moved[name]
        error = _norm(_minus(a, t))
        out.append(Difference(name, error / allowed if allowed else (0.0 if error == 0 else 2.0), error, allowed))
    return out


def plain_ratio(actual: torch.Tensor, expected: torch.Tensor, largest: float, coarsest: float) -> float:
    """‖a − e‖ over r·max(‖e‖, 1e-2·``largest``), r the tolerance of the dtype or of the coarsest one in the computation;
    of integers and booleans 0 or 2."""
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else 2.0
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(actual)):
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, e = (torch.where(finite, t.to(wide), 0) for t in (actual, expected))
    allowed = max(RELATIVE[expected.dtype], coarsest) * max(float(torch.linalg.vector_norm(e)), 1e-2 * largest)
    error = float(torch.linalg.vector_norm(a - e))
    return error / allowed if allowed else (0.0 if error == 0 else 2.0)


def _same_form(entry: str, actual: Named, eager: Named) -> None:
    """Strides are part of what a caller may rely on."""
    for name, e in eager.items():
        a = actual[name]
        if a is None or e is None or e.numel() == 0:
            continue
        if any(n > 1 and s != w for n, s, w in zip(e.shape, a.stride(), e.stride(), strict=True)) and name.startswith("output"):
            raise ExportError(f"{entry}: {name} has strides {a.stride()}, eager's has {e.stride()}: return it with .contiguous(), alike in both")


def sizes_of(spec: VariantSpec, example: Example) -> Iterator[tuple[dict[str, int], Any, Any]]:
    """The example as it is, then, where sizes are dynamic, at others: one larger, and the smallest allowed."""
    flat = [v for v in pytree.tree_leaves((example.args, example.kwargs)) if isinstance(v, torch.Tensor)]
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    first = contract.solve(flat)
    yield first, example.args, example.kwargs
    if not spec.symbols:
        return
    for choose in (_larger, _smallest):
        values = choose(contract, spec.symbols, first)
        if values is not None and values != first:
            resized = [_resized(t, s, spec, values) for t, s in zip(flat, spec.inputs, strict=True)]
            rest = iter(resized)
            args, kwargs = pytree.tree_map(lambda v: next(rest) if isinstance(v, torch.Tensor) else v, (example.args, example.kwargs))  # noqa: B023
            yield values, args, kwargs


def without_refused_emptiness(spec: VariantSpec, program: nn.Module, mode: str, args: Any, kwargs: Any) -> VariantSpec:
    """``spec`` with each size that may be 0, and at which eager refuses the program, from 1: compiled code would read what is not there (``x[0]``).
    Sizes that must be equal are 0 together."""
    flat = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    contract = Contract(spec.inputs, spec.symbols, spec.guards)
    open_ended = [s.name for s in spec.symbols if s.minimum == 0 and s.offset == 0]
    refused: set[str] = set()
    for names in ([[n] for n in open_ended] + [open_ended]) if open_ended else []:
        values = {**contract.solve(flat), **dict.fromkeys(names, 0)}
        if not refused.isdisjoint(names) or not _allowed(contract, spec.symbols, values):
            continue
        rest = iter([_resized(t, s, spec, values) for t, s in zip(flat, spec.inputs, strict=True)])
        given, named = pytree.tree_map(lambda v: next(rest) if isinstance(v, torch.Tensor) else v, (args, kwargs))  # noqa: B023
        with preserve.in_mode(program, mode), preserve.slots_kept(program), undone(dict(program.named_buffers())), torch.no_grad():
            try:
                program(*given, **named)
            except Exception:  # eager's own refusal, whatever it is
                refused.update(names)
    return dataclasses.replace(spec, symbols=tuple(dataclasses.replace(s, minimum=1) if s.name in refused else s for s in spec.symbols))


def _larger(contract: Contract, symbols: Sequence[SymbolSpec], first: dict[str, int]) -> dict[str, int] | None:
    """Every size changed, each by another amount, so that two that were mixed up show."""
    for factor in (1, 2, 3, 4, 6, 8, -1):
        values = {s.name: first[s.name] + factor * (i + 1) if factor != 8 else first[s.name] * 2 for i, s in enumerate(symbols)}
        if _allowed(contract, symbols, values):
            return values
    return None


def _smallest(contract: Contract, symbols: Sequence[SymbolSpec], first: dict[str, int]) -> dict[str, int] | None:
    values = {s.name: max(1, s.minimum) for s in symbols}
    return values if _allowed(contract, symbols, values) else None


def _allowed(contract: Contract, symbols: Sequence[SymbolSpec], values: dict[str, int]) -> bool:
    from aot_backward_runtime.format.expressions import evaluate

    inside = all(s.minimum <= values[s.name] and (s.maximum is None or values[s.name] <= s.maximum) for s in symbols)
    return inside and all(evaluate(g, values) for g in contract.guards)


def _resized(tensor: torch.Tensor, spec: Any, variant: VariantSpec, values: Mapping[str, int]) -> torch.Tensor:
    """``tensor`` with its rows taken again or left out along each dynamic dimension: values stay such as the program expects."""
    from aot_backward_runtime.format.expressions import evaluate

    out = tensor.detach()
    for d, size in enumerate(spec.shape):
        wanted = evaluate(size, values)
        if out.shape[d] != wanted:
            if out.shape[d] == 0:
                raise InputError(f"{spec.name}: an example of size 0 cannot be enlarged")
            out = out.index_select(d, torch.arange(wanted, device=out.device) % out.shape[d])
            if out.is_floating_point():
                out = out + 0.01 * torch.randn_like(out)  # repeated rows would hide a mixed-up batch
    if out.is_complex() or out.is_floating_point():
        laid = torch.empty_strided(out.shape, [evaluate(s, values) for s in spec.stride], dtype=out.dtype, device=out.device)
        out = laid.copy_(out)
    return out.requires_grad_(tensor.requires_grad)


def cotangents_at(spec: VariantSpec, values: Mapping[str, int]) -> list[torch.Tensor]:
    """Incoming gradients of those sizes, the same ones each time."""
    from aot_backward_runtime.format.expressions import evaluate
    from aot_backward_runtime.native.guards import dtype_of

    generator = torch.Generator().manual_seed(SEED)
    out = []
    for c in spec.cotangents:
        shape = [evaluate(s, values) for s in c.shape]
        dtype = dtype_of(c.dtype)
        draw = torch.complex64 if dtype.is_complex else torch.float32
        out.append(torch.randn(shape, generator=generator, dtype=draw).to(dtype).to(c.device))
    return out


def _targets(spec: VariantSpec, parameters: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """What a ``module`` variant gives gradients of, by name."""
    flat = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    out = {}
    for gradient in spec.backward.gradients if spec.backward else ():
        kind, _, where = gradient.of.partition(":")
        if kind == "parameter":
            out[where] = parameters[where]
        else:
            out[spec.inputs[int(where)].name] = flat[int(where)]
    return out


def _outputs(out: Named, value: Any) -> list[torch.Tensor]:
    """Notes the output's tensors by number; a dict stands in the order of its keys, as both sides return it."""
    flat = [v for v in _ordered_leaves(value) if isinstance(v, torch.Tensor)]
    out.update({f"output[{i}]": v for i, v in enumerate(flat)})
    return flat


def _ordered_leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves(value)


def _leaves_again(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pytree.tree_map(lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v, (args, kwargs))


def doubled(args: Any, kwargs: Any) -> tuple[Any, Any]:
    def double(v: Any) -> Any:
        return v.detach().double().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) and v.is_floating_point() else v

    return pytree.tree_map(double, (args, kwargs))


def rounded_values(value: Any) -> Any:
    """``value`` with each floating-point element changed by a random relative amount of up to float32's eps."""

    def other(v: Any) -> Any:
        if not (isinstance(v, torch.Tensor) and v.is_floating_point()):
            return v
        generator = torch.Generator(v.device).manual_seed(SEED)
        change = torch.rand(v.shape, generator=generator, dtype=v.dtype, device=v.device) * 2 - 1
        return (v.detach() * (1 + torch.finfo(torch.float32).eps * change)).requires_grad_(v.requires_grad)

    return pytree.tree_map(other, value)


@contextlib.contextmanager
def in_float64(program: nn.Module, *, rounded: bool = False) -> Iterator[None]:
    """The program's own parameters and buffers as float64, wherever the program reaches them from; put back afterwards.

    The Python objects change places with others of what they stand for. Giving them other ``.data`` would make torch forget the node on which the
    gradient of each is accumulated, and the hooks on it, and ``.grad`` would stand in the way. Hooks on the gradients themselves run here too."""
    default = torch.get_default_dtype()
    swap, swapped = torch_api._swap_tensor_impl, list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        for tensor in {id(t): t for t in [*program.parameters(), *program.buffers()]}.values():
            if tensor.is_floating_point():
                wide = tensor.detach().double()
                other = (rounded_values(wide) if rounded else wide).requires_grad_(tensor.requires_grad)
                if tensor._backward_hooks:
                    other._backward_hooks = tensor._backward_hooks
                swap(tensor, other)
                swapped.append((tensor, other))
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, other in swapped:
            swap(tensor, other)


@contextlib.contextmanager
def undone(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    before = [(t, t.detach().clone()) for t in tensors.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


def _store(
    stored: dict[str, torch.Tensor],
    prefix: str,
    args: Any,
    kwargs: Any,
    cotangents: Sequence[torch.Tensor],
    expected: Named,
    allowed: dict[str, float],
) -> None:
    for i, value in enumerate(v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)):
        stored[f"{prefix}/input/{i}"] = value.detach().contiguous()
    for i, value in enumerate(cotangents):
        stored[f"{prefix}/cotangent/{i}"] = value.contiguous()
    for name, result in expected.items():
        if result is not None:
            stored[f"{prefix}/expected/{name}"] = result.contiguous()
            stored[f"{prefix}/allowed/{name}"] = torch.tensor(allowed.get(name, 0.0), dtype=torch.float64)


def _device(named: Named) -> str:
    return next((t.device.type for t in named.values() if t is not None), "cpu")


def _minus(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    return a.to(wide) - b.to(wide)


def _norm(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    return float(torch.linalg.vector_norm(tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)))

"""Whether the plans of a variant agree with the libraries that they call: operands, results, gradients and constants, by dtype, size and name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from ..errors import PackageError
from ..format.dtypes import is_floating
from ..format.manifest import EntrySpec, LibrarySpec, Manifest, Plan, StepSpec, TensorSpec, VariantSpec, WeightSpec
from .tensor_checks import check_symbols, check_tensor, describe, equal_sizes, fits

_ROLES = {"module": ("forward", "backward", "inference"), "grad": ("gradient",), "step": ("step", "accumulate")}
_SOURCE = re.compile(r"(input|saved|cotangent|result):(0|[1-9][0-9]{0,8})")
_OTHER = re.compile(r"[^A-Za-z0-9]")


def check_plans(entry: EntrySpec, variant: VariantSpec, manifest: Manifest) -> None:
    """That the variant has the plans which its entry's kind is called with, and that each agrees with its library."""
    roles = {r: p for r in ("forward", "backward", "inference", "gradient", "step", "accumulate") if (p := getattr(variant, r)) is not None}
    if entry.kind in _ROLES:
        if strange := sorted(roles.keys() - set(_ROLES[entry.kind])):
            raise PackageError(f"an entry of kind {entry.kind!r} has no plan {strange[0]!r}")
        waits = entry.step is not None and entry.step.update is not None
        if entry.kind == "module":
            right = "forward" in roles if "backward" in roles else bool(roles)
        else:
            right = entry.kind in ("grad", "step") and ("gradient" in roles or "step" in roles) and ("accumulate" in roles) == waits
        if not right:
            raise PackageError(f"its plans are {sorted(roles) or 'none'}, with which it cannot be called")
    for role, plan in roles.items():
        try:
            check_plan(entry, variant, role, plan, manifest)
        except PackageError as error:
            raise PackageError(f"{role}: {error}") from error


def check_plan(entry: EntrySpec, variant: VariantSpec, role: str, plan: Plan, manifest: Manifest) -> None:
    library = manifest.libraries[plan.call.library] if plan.call else None
    names = {s.name for s in variant.symbols}
    if library is not None:
        for spec in (*library.inputs, *library.outputs):
            check_tensor(spec, names)
        _check_operands(variant, role, plan, library, manifest)
        check_constants(entry, plan, library)
    made = library.outputs if library is not None else ()
    used = _check_results(entry, variant, role, plan, made, manifest)
    left = [i for i in range(len(made)) if i not in used]
    flags = flags_of(entry.step) if role == "step" and entry.step is not None else []
    if role in ("step", "accumulate"):
        check_flags(flags, [made[i] for i in left])
    elif left:
        raise PackageError(f"result {left[0]} of the library, {made[left[0]].name!r}, is nothing that the plan gives")
    if any(not 0 <= n < len(_saved(variant)) for n in plan.consumes) or (plan.consumes and role != "backward"):
        raise PackageError(f"it consumes the saved tensors {list(plan.consumes)[:20]}; there are {len(_saved(variant))}")


def _check_operands(variant: VariantSpec, role: str, plan: Plan, library: LibrarySpec, manifest: Manifest) -> None:
    assert plan.call is not None
    if len(plan.call.operands) != len(library.inputs):
        raise PackageError(f"the library {plan.call.library} takes {len(library.inputs)} tensors; {len(plan.call.operands)} operands are listed")
    names = {s.name for s in variant.symbols}
    for operand, wanted in zip(plan.call.operands, library.inputs, strict=True):
        kind, where = source(operand)
        if kind == "size":
            check_symbols(operand, where, names)
            if len(wanted.shape) != 2 or wanted.shape[1] != 0 or not equal_sizes((where,), wanted.shape[:1], variant.symbols):
                raise PackageError(f"{operand} is passed where the library takes {wanted.name}, {describe(wanted)}")
            continue
        if kind not in ("input", "saved", "cotangent") or (kind != "input" and role != "backward"):
            raise PackageError(f"{operand!r} is no operand of it")
        given, called = _operand(variant, kind, int(where), manifest)
        if not fits(given, wanted, variant.symbols) or wanted.name not in called:
            raise PackageError(f"{operand} is {called[0]}, {describe(given)}; the library takes {wanted.name}, {describe(wanted)}, there")


def _operand(variant: VariantSpec, kind: str, where: int, manifest: Manifest) -> tuple[TensorSpec, list[str]]:
    """What an operand is, and what a library that is compiled for it calls its input."""
    tensors = {"input": variant.inputs, "cotangent": variant.cotangents, "saved": _saved(variant)}[kind]
    if where >= len(tensors):
        raise PackageError(f"the operand {kind}:{where} does not exist: there are {len(tensors)}")
    if kind != "saved":
        spec = tensors[where]
        assert isinstance(spec, TensorSpec)
        return spec, [spec.name.removeprefix("the ") if kind == "cotangent" else spec.name]
    forward = variant.forward
    assert forward is not None
    origin, number = source(forward.saved[where])
    made = manifest.libraries[forward.call.library].outputs if forward.call else ()
    known = variant.inputs if origin == "input" else made
    if origin not in ("input", "result") or int(number) >= len(known):
        raise PackageError(f"the saved tensor {where} is {forward.saved[where]!r}, which does not exist")
    spec, called = known[int(number)], f"saved[{where}]"
    if variant.backward is not None and where in variant.backward.consumes:
        return spec, [f"{called}, consumed", called]
    return spec, [called if spec.name == called else f"{called} = {spec.name}", called]


def _saved(variant: VariantSpec) -> tuple[str, ...]:
    return variant.forward.saved if variant.forward is not None else ()


def check_constants(entry: EntrySpec, plan: Plan, library: LibrarySpec) -> None:
    """That the plan reads what the library is bound to, and that no constant has another's name."""
    own = {s.name: s.weight for s in entry.state}
    for what, listed in (("reads", plan.reads), ("writes", plan.writes)):
        if strange := [n for n in listed if n not in own]:
            raise PackageError(f"it {what} {strange[0]!r}, which is no state of the entry")
    called: dict[str, set[str]] = {}
    for name, weight in own.items():
        called.setdefault(spelled(name), set()).add(weight)
        called.setdefault(spelled(weight), set()).add(weight)
    for build in library.every_build:
        bound = Counter(c.name for c in build.constants)
        for constant in build.constants:
            meant = called.get(constant.name.rstrip("_"), set())
            if bound[constant.name] > 1 or (meant and constant.weight in own.values() and constant.weight not in meant):
                raise PackageError(f"the library's constant {constant.name!r} is bound to {constant.weight!r}, or twice")
        read = {c.weight for c in build.constants} & set(own.values())
        if read != {own[n] for n in plan.reads} or not {own[n] for n in plan.writes} <= read:
            odd = sorted(read ^ {own[n] for n in plan.reads}) or list(plan.writes)
            raise PackageError(f"it reads and writes other weights than its library is bound to: {odd[0]!r}")


@lru_cache(maxsize=1 << 14)  # each is asked for once for every plan
def spelled(name: str) -> str:
    """What the constant of a library is called that is the state ``name``."""
    word = _OTHER.sub("_", name)
    return (f"constant_{word}" if word[:1].isdigit() else word).rstrip("_")


def _check_results(
    entry: EntrySpec, variant: VariantSpec, role: str, plan: Plan, made: Sequence[TensorSpec], manifest: Manifest
) -> dict[int, list[str]]:
    """The library's results that the plan uses, by number, each with the names that it may have."""
    own = {s.name: manifest.weights[s.weight] for s in entry.state}
    used: dict[int, list[str]] = {}

    def result(where: str, *called: str) -> TensorSpec:
        number = int(where)
        if number >= len(made):
            raise PackageError(f"{called[0]} is result {number} of the library; there are {len(made)}")
        used.setdefault(number, []).extend(called)
        return made[number]

    expected = () if role == "backward" else variant.outputs
    if len(plan.outputs) != len(expected):
        raise PackageError(f"it gives {len(plan.outputs)} outputs; there are {len(expected)}")
    for text, output in zip(plan.outputs, expected, strict=True):
        kind, where = source(text)
        if kind == "result":
            given: TensorSpec | WeightSpec | None = result(where, output.name)
        elif kind == "input":
            given = variant.inputs[int(where)] if int(where) < len(variant.inputs) else None
        else:
            given = own.get(where) if kind == "parameter" else None
        if given is None or not fits(given, output, variant.symbols):
            raise PackageError(f"{output.name}, {describe(output)}, is {text!r}, which is another tensor, or none")
    if plan.saved and role != "forward":
        raise PackageError("it saves tensors, which only a forward does")
    for number, text in enumerate(plan.saved):
        kind, where = source(text)
        if kind == "result":
            result(where, f"saved[{number}]")
        elif kind != "input" or int(where) >= len(variant.inputs):
            raise PackageError(f"saved[{number}] is {text!r}, which does not exist")
    for text in plan.watched:
        kind, where = source(text)
        there = len(variant.inputs) if kind == "input" else len(made)
        if where not in own if kind == "parameter" else kind not in ("input", "result") or int(where) >= there:
            raise PackageError(f"it watches {text!r}, which does not exist")
    parameters = {s.name: own[s.name] for s in entry.state if s.parameter}
    _check_gradients(variant, role, plan, parameters, result)
    for number, called in used.items():
        name = made[number].name
        stated = name.startswith(("output[", "saved[", "gradient of "))
        if name not in called and (role in ("forward", "backward", "inference") or stated):
            raise PackageError(f"{called[0]} is result {number} of the library, which is {name!r}")
    return used


def _check_gradients(variant: VariantSpec, role: str, plan: Plan, own: Mapping[str, WeightSpec], result: Callable[..., TensorSpec]) -> None:
    if plan.gradients and role not in ("backward", "gradient"):
        raise PackageError("it gives gradients, which only a backward does")
    if len({g.of for g in plan.gradients}) != len(plan.gradients):
        raise PackageError("it gives the gradient of something twice")
    for gradient in plan.gradients:
        what, label = target(gradient.of, variant.inputs, own)
        if not is_floating(what.dtype):
            raise PackageError(f"it gives a gradient of {label}, which is of {what.dtype}")
        if any(not 0 <= n < len(variant.cotangents) for n in gradient.cotangents):
            raise PackageError(f"the gradient of {label} depends on the incoming gradients {list(gradient.cotangents)[:20]}")
        if not gradient.source:
            continue
        kind, where = source(gradient.source)
        if kind != "result":
            raise PackageError(f"the gradient of {label} is {gradient.source!r}, which is no result")
        reached = ", ".join(map(str, gradient.cotangents))
        given = result(where, f"gradient of {label} from {reached}", f"gradient of {label}")
        if given.dtype != what.dtype or not equal_sizes(given.shape, what.shape, variant.symbols):
            raise PackageError(f"the gradient of {label}, {what.dtype} {list(what.shape)}, is {gradient.source}, {describe(given)}")


def target(text: str, inputs: Sequence[TensorSpec], own: Mapping[str, WeightSpec]) -> tuple[TensorSpec | WeightSpec, str]:
    """What ``parameter:NAME`` or ``input:I`` is, and what it is called."""
    kind, where = source(text)
    if kind == "parameter" and where in own:
        return own[where], where
    if kind == "input" and int(where) < len(inputs):
        return inputs[int(where)], inputs[int(where)].name
    raise PackageError(f"{text[:80]!r} is neither an input nor a parameter")


def source(text: str) -> tuple[str, str]:
    """``input:3`` -> ("input", "3"); of a size or a parameter the rest is text."""
    kind, _, rest = text.partition(":")
    if kind not in ("size", "parameter") and not _SOURCE.fullmatch(text):
        raise PackageError(f"{text[:80]!r} is not the name of a tensor in a plan")
    return kind, rest


def flags_of(step: StepSpec) -> list[str]:
    return [*(["norm"] if step.norm else []), *(["finite"] if step.finite else [])]


def check_flags(flags: Sequence[str], left: Sequence[TensorSpec]) -> None:
    if len(flags) != len(left):
        raise PackageError(f"its library gives {len(left)} results more than its outputs; expected {len(flags)}: {' and '.join(flags) or 'none'}")
    for flag, spec in zip(flags, left, strict=True):
        if spec.shape or (spec.dtype == "bool") != (flag == "finite"):
            raise PackageError(f"its library gives {describe(spec)} as {flag!r}")

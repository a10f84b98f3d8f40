"""Whether a manifest agrees with itself, looked at when it is read: native code checks nothing, so what a plan says of a library is checked against
what the manifest says of that library, of the variant's own tensors and of the weights, by looks and by names.

Everything is stated at least twice (an operand ``saved:2`` is passed as the library's input called ``saved[2]``), so a single field that is
not as it was written contradicts another one. What the library says of itself is compared when it is opened (:mod:`.plan`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from keyword import iskeyword
from typing import Any

import torch

from ..errors import PackageError
from ..format.expressions import evaluate, symbols_of
from ..format.manifest import (
    Ambient,
    EntrySpec,
    LibrarySpec,
    Manifest,
    Plan,
    Size,
    StepSpec,
    SymbolSpec,
    Target,
    TensorSpec,
    Tree,
    VariantSpec,
    WeightSpec,
)
from ..format.safetensors_header import DTYPES
from ..training.param_groups import inside, options_in, options_of
from .recorded_pass_checks import check_looks, check_symbols, check_symbols_of

DTYPE_NAMES = frozenset(DTYPES) | {"complex128", "complex32"}
_DEVICES = ("cpu", "cuda")
_FLOATING = ("float", "bfloat", "complex")
_LARGEST = 1 << 60  # elements
_PRECISIONS = ("highest", "high", "medium")
_CALLABLE = ("module", "grad", "step")
_ROLES = {"module": ("forward", "backward", "inference"), "grad": ("gradient",), "step": ("step", "accumulate")}
_SOURCE = re.compile(r"(input|saved|cotangent|result):(0|[1-9][0-9]{0,8})")
_OTHER = re.compile(r"[^A-Za-z0-9]")
_CONTROLLED = ("clip_norm", "clip_value", "loss_scale")  # numbers of the entry's own


def check_targets(targets: Sequence[Target]) -> None:
    for target in targets:
        if target.device not in _DEVICES:
            raise PackageError(f"its code is for the device {target.device[:40]!r}; expected {' or '.join(_DEVICES)}")


def check_weights(weights: Mapping[str, WeightSpec]) -> None:
    """:class:`PackageError` names a weight that no tensor could be."""
    for name, spec in weights.items():
        if spec.dtype not in DTYPE_NAMES:
            raise PackageError(f"weight {name!r} has the dtype {spec.dtype[:40]!r}, which is unknown")
        if len(spec.shape) > 64 or min(spec.shape, default=0) < 0 or math.prod(max(n, 1) for n in spec.shape) >= _LARGEST:
            raise PackageError(f"weight {name!r} has the shape {str(list(spec.shape))[:80]}, which no tensor has")
        if spec.fill is not None and not _holds(spec.dtype, spec.fill):
            raise PackageError(f"weight {name!r} is filled with {spec.fill!r}, which {spec.dtype} cannot hold")


def state_names(manifest: Manifest) -> set[tuple[str, str]]:
    """Each weight with what the entries call it, with and without the entry's own name before that."""
    return {(s.weight, n) for e, entry in manifest.entries.items() for s in entry.state for n in (s.name, f"{e}.{s.name}")}


def check_entry(entry: EntrySpec, manifest: Manifest, named: set[tuple[str, str]]) -> None:
    """:class:`PackageError` names the field of the entry that contradicts another one. The weights and libraries that it refers to must be there.
    ``named``: :func:`state_names`."""
    _check_state(entry, manifest, named)
    for number, variant in enumerate(entry.variants):
        _check_variant(f"variant {number}", entry, variant, manifest)
    if entry.kind not in _CALLABLE:
        return
    if not entry.variants:
        raise PackageError("it has no variants")
    if entry.kind == "grad":
        _check_asked(entry)
    if entry.step is not None:
        _check_step(entry, entry.step, manifest)


# state


def _check_state(entry: EntrySpec, manifest: Manifest, named: set[tuple[str, str]]) -> None:
    known: dict[str, tuple[bool, bool]] = {}
    counted = Counter(s.name for s in entry.state)
    for path in (*counted, *entry.modules):
        if not all(path.split(".")):
            raise PackageError(f"{path!r} is no name for a part of a module")
    for state in entry.state:
        if counted[state.name] > 1:
            raise PackageError(f"the state {state.name!r} is listed twice")
        kind = (state.parameter, state.requires_grad)
        if known.setdefault(state.weight, kind) != kind:
            raise PackageError(f"the state {state.name!r} is another kind of tensor than the one that it is tied to")
        if state.requires_grad and not manifest.weights[state.weight].dtype.startswith(_FLOATING):
            raise PackageError(f"the state {state.name!r} requires a gradient and is of {manifest.weights[state.weight].dtype}")
        spec = manifest.weights[state.weight]
        if state.requires_grad and any(n > 1 and s == 0 for n, s in zip(spec.shape, spec.stride, strict=False)):
            raise PackageError(f"the state {state.name!r} requires a gradient, and its strides {list(spec.stride)} put several elements in one place")
        if (state.weight, state.weight) not in named:
            raise PackageError(f"the state {state.name!r} is bound to the weight {state.weight!r}, which is no state of that name")


# variants


def _check_variant(what: str, entry: EntrySpec, variant: VariantSpec, manifest: Manifest) -> None:
    try:
        names = check_symbols_of(variant.symbols, [s.shape for s in variant.inputs])
        for spec in (*variant.inputs, *variant.outputs, *variant.cotangents):
            check_tensor(spec, names)
        for guard in variant.guards:
            check_symbols("a guard", guard, names)
        check_ambient(variant.ambient)
        _check_arguments(variant)
        leaves = [t.index for t in _leaves(variant.out_tree, names) if t.kind == "tensor"]
        if leaves != list(range(len(variant.outputs))):
            raise PackageError(f"its results hold the tensors {leaves[:20]}; there are {len(variant.outputs)}, which come in their order")
        _check_differentiable(variant)
        _check_plans(entry, variant, manifest)
    except PackageError as error:
        raise PackageError(f"{what}: {error}") from error
    if variant.double is not None:
        _check_variant(f"{what}, differentiated", entry, variant.double, manifest)


def check_tensor(spec: TensorSpec, names: set[str]) -> None:
    check_looks(spec, names)
    if spec.dtype not in DTYPE_NAMES or spec.device not in _DEVICES:
        raise PackageError(f"{spec.name} is {spec.dtype[:40]!r} on {spec.device[:40]!r}, which is unknown")


def check_ambient(ambient: Ambient) -> None:
    if (ambient.autocast and ambient.autocast not in DTYPE_NAMES) or ambient.matmul_precision not in _PRECISIONS:
        raise PackageError(
            f"it was captured under autocast {ambient.autocast[:40]!r}, precision {ambient.matmul_precision[:40]!r}, which are unknown"
        )


def _check_arguments(variant: VariantSpec) -> None:
    tree = variant.in_tree
    if tree.kind != "tuple" or [c.kind for c in tree.children] != ["tuple", "dict"]:
        raise PackageError("its arguments are no tuple of a tuple and a dict")
    leaves = [t for t in _leaves(tree, set()) if t.kind == "tensor"]
    if [t.index for t in leaves] != list(range(len(variant.inputs))):
        raise PackageError(f"its arguments hold the tensors {[t.index for t in leaves][:20]}; there are {len(variant.inputs)}, in their order")
    positional, keywords = tree.children
    if len(variant.argument_names) > len(positional.children) or not all(isinstance(k, str) for k in keywords.keys):
        raise PackageError("its arguments have other names than places")
    named = [*zip(variant.argument_names, positional.children, strict=False), *zip(keywords.keys, keywords.children, strict=True)]
    for label, child in named:
        for leaf in _leaves(child, set()):
            if leaf.kind == "tensor" and not _below(variant.inputs[leaf.index].name, str(label)):
                raise PackageError(f"the argument {str(label)!r} holds a tensor that is called {variant.inputs[leaf.index].name!r}")


def _leaves(tree: Tree, symbols: set[str]) -> Iterator[Tree]:
    """The leaves in their order, each node having been checked. ``symbols``: what sizes among them may need."""
    kind = tree.kind
    if kind in ("tensor", "constant", "size"):
        if tree.children or tree.keys:
            raise PackageError(f"a tree's {kind} has children")
        if kind == "size":
            check_symbols("a result", tree.expression, symbols)
        yield tree
        return
    if kind not in ("tuple", "list", "dict", "namedtuple", "object"):
        raise PackageError(f"a tree of unknown kind {kind[:40]!r}")
    if kind in ("tuple", "list"):
        if tree.keys:
            raise PackageError(f"a tree's {kind} has keys")
    elif len(tree.keys) != len(tree.children) or len(set(tree.keys)) != len(tree.keys):
        raise PackageError(f"a tree's {kind} has {len(tree.children)} children and the keys {str(list(tree.keys))[:80]}")
    if kind == "namedtuple":
        for word in (tree.type_name.rpartition(".")[2], *tree.keys):
            if not isinstance(word, str) or not word.isidentifier() or iskeyword(word) or (word.startswith("_") and word in tree.keys):
                raise PackageError(f"a tree's namedtuple {tree.type_name[:80]!r} has the name or field {str(word)[:40]!r}")
    for child in tree.children:
        yield from _leaves(child, symbols)


def _check_differentiable(variant: VariantSpec) -> None:
    if len(set(variant.differentiable)) != len(variant.differentiable) or len(variant.differentiable) != len(variant.cotangents):
        raise PackageError(f"{len(variant.cotangents)} incoming gradients are listed, of the outputs {list(variant.differentiable)[:20]}")
    for number, cotangent in zip(variant.differentiable, variant.cotangents, strict=True):
        if not 0 <= number < len(variant.outputs):
            raise PackageError(f"output {number} has a gradient; there are {len(variant.outputs)} outputs")
        output = variant.outputs[number]
        same = (output.dtype, output.device) == (cotangent.dtype, cotangent.device) and _alike(output.shape, cotangent.shape, variant.symbols)
        if not same or cotangent.name != f"the gradient of {output.name}":
            raise PackageError(f"{cotangent.name}, {_looks(cotangent)}, is listed as the gradient of {output.name}, {_looks(output)}")


# plans


def _check_plans(entry: EntrySpec, variant: VariantSpec, manifest: Manifest) -> None:
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
        _check_constants(entry, plan, library, manifest)
    made = library.outputs if library is not None else ()
    used = _check_results(entry, variant, role, plan, made, manifest)
    left = [i for i in range(len(made)) if i not in used]
    flags = _flags(entry.step) if role == "step" and entry.step is not None else []
    if role in ("step", "accumulate"):
        _check_flags(flags, [made[i] for i in left])
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
            if len(wanted.shape) != 2 or wanted.shape[1] != 0 or not _alike((where,), wanted.shape[:1], variant.symbols):
                raise PackageError(f"{operand} is passed where the library takes {wanted.name}, {_looks(wanted)}")
            continue
        if kind not in ("input", "saved", "cotangent") or (kind != "input" and role != "backward"):
            raise PackageError(f"{operand!r} is no operand of it")
        given, called = _operand(variant, kind, int(where), manifest)
        if not _same(given, wanted, variant.symbols) or wanted.name not in called:
            raise PackageError(f"{operand} is {called[0]}, {_looks(given)}; the library takes {wanted.name}, {_looks(wanted)}, there")


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


def _check_constants(entry: EntrySpec, plan: Plan, library: LibrarySpec, manifest: Manifest) -> None:
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
    """The library's results that the plan gives to somebody, each with what it should be called."""
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
        if given is None or not _same(given, output, variant.symbols):
            raise PackageError(f"{output.name}, {_looks(output)}, is {text!r}, which is another tensor, or none")
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
        if not what.dtype.startswith(_FLOATING):
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
        if given.dtype != what.dtype or not _alike(given.shape, what.shape, variant.symbols):
            raise PackageError(f"the gradient of {label}, {what.dtype} {list(what.shape)}, is {gradient.source}, {_looks(given)}")


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


# grad and step entries


def _check_asked(entry: EntrySpec) -> None:
    if len(entry.wrt) != len(entry.names) or len(set(entry.names)) != len(entry.names) or (entry.single and len(entry.wrt) != 1):
        raise PackageError(f"it gives gradients of {len(entry.wrt)} tensors by {len(entry.names)} names")
    for number, variant in enumerate(entry.variants):
        assert variant.gradient is not None
        given = {g.of for g in variant.gradient.gradients}
        if given != set(entry.wrt):
            raise PackageError(f"variant {number} gives the gradients of {sorted(given)[:5]}, the entry those of {sorted(entry.wrt)[:5]}")
    for of, name in zip(entry.wrt, entry.names, strict=True):
        kind, where = source(of)
        called = entry.variants[0].inputs[int(where)].name if kind == "input" else where
        if name != called:
            raise PackageError(f"the gradient of {called} is called {name!r}")


def _flags(step: StepSpec) -> list[str]:
    return [*(["norm"] if step.norm else []), *(["finite"] if step.finite else [])]


def _check_flags(flags: Sequence[str], left: Sequence[TensorSpec]) -> None:
    if len(flags) != len(left):
        raise PackageError(f"its library gives {len(left)} results more than its outputs; expected {len(flags)}: {' and '.join(flags) or 'none'}")
    for flag, spec in zip(flags, left, strict=True):
        if spec.shape or (spec.dtype == "bool") != (flag == "finite"):
            raise PackageError(f"its library gives {_looks(spec)} as {flag!r}")


def _check_step(entry: EntrySpec, step: StepSpec, manifest: Manifest) -> None:
    weights = {s.name: manifest.weights[s.weight] for s in entry.state}
    parameters = {s.name.removeprefix("module.") for s in entry.state if s.parameter and s.name.startswith("module.")}
    grouped = [p for g in step.groups for p in g.parameters]
    if len(set(grouped)) != len(grouped) or not parameters.issuperset(grouped):
        raise PackageError("its groups hold a parameter twice, or something that is no parameter")
    if weights["numbers"].dtype != "float64":
        raise PackageError(f"its vector of numbers is of {weights['numbers'].dtype}; expected float64")
    _check_numbers(step)
    for slot in step.state:
        if not slot.parameters or not set(grouped).issuperset(slot.parameters) or slot.state != f"optimizer.{slot.key}.{slot.parameters[0]}":
            raise PackageError(f"the state {slot.state!r} is listed as {slot.key!r} of {list(slot.parameters)[:5]}")
        fill = weights[slot.state].fill
        if (
            slot.starts_as >= 0
            and fill is not None
            and step.fresh
            and fill != _rounded(step.numbers[slot.starts_as].value, weights[slot.state].dtype)
        ):
            raise PackageError(f"the state {slot.state!r} is {fill!r}, and starts as the number {step.numbers[slot.starts_as].value!r}")
    for what, listed in (("optimizer.", [s.state for s in step.state]), ("gradient.", [g.state for g in step.gradients])):
        if sorted(listed) != sorted(n for n in weights if n.startswith(what)):
            raise PackageError(f"of the state that begins with {what!r} some is not listed, or twice, as what it is")
    for gradient in step.gradients:
        like = weights.get(f"module.{gradient.parameter}")
        own = weights[gradient.state]
        if gradient.state != f"gradient.{gradient.parameter}" or like is None or (own.dtype, own.shape) != (like.dtype, like.shape):
            raise PackageError(f"{gradient.state!r} is listed as the gradient of {gradient.parameter!r}")
    if (step.update is not None) != bool(step.gradients):
        raise PackageError("gradients can wait where there is a plan 'update' and tensors for them; it has one of the two")
    if step.update is not None:
        _check_update(entry, step, step.update, manifest)
    for number, variant in enumerate(entry.variants):
        if (
            not variant.outputs
            or variant.outputs[0].shape
            or (not variant.outputs[0].dtype.startswith("float") and variant.outputs[0].dtype != "bfloat16")
        ):
            raise PackageError(f"variant {number}: its first result is no loss")


def _check_update(entry: EntrySpec, step: StepSpec, plan: Plan, manifest: Manifest) -> None:
    if plan.call is None or plan.call.operands or plan.outputs or plan.saved or plan.watched or plan.gradients or plan.consumes:
        raise PackageError("its plan 'update' is a call without operands, and gives nothing")
    library = manifest.libraries[plan.call.library]
    if library.inputs:
        raise PackageError(f"update: the library {plan.call.library} takes {len(library.inputs)} tensors; no operands are listed")
    for spec in library.outputs:
        check_tensor(spec, set())
    _check_constants(entry, plan, library, manifest)
    if _flags(step) or len(library.outputs) != 1:
        _check_flags(_flags(step), library.outputs)


def _check_numbers(step: StepSpec) -> None:
    options_in(step.defaults, "the optimizer's defaults")
    groups = [options_of(g) for g in step.groups]
    seen = set()
    for number in step.numbers:
        place = (number.group, number.key, number.position)
        label = f"the number {number.key[:80]!r} of group {number.group}"
        if place in seen:
            raise PackageError(f"{label} is listed twice")
        seen.add(place)
        if number.group < 0:
            if number.key not in _CONTROLLED or number.position != -1:
                raise PackageError(f"{label} is none of {', '.join(_CONTROLLED)}")
            value: Any = number.value
        else:
            value = groups[number.group].get(number.key)
            if number.position != -1:
                value = value[number.position] if isinstance(value, list) and 0 <= number.position < len(value) else None
        if not isinstance(value, (int, float)) or value != number.value:
            raise PackageError(f"{label} is {number.value!r}; the group's options say {str(value)[:40]!r}")
        if number.allowed and not any(inside(number.value, i) for i in number.allowed):
            raise PackageError(f"{label} is {number.value!r}, which is in none of the intervals that the code was compiled for")


# looks


def _same(given: TensorSpec | WeightSpec, wanted: TensorSpec, symbols: Sequence[SymbolSpec]) -> bool:
    if given.dtype != wanted.dtype or (isinstance(given, TensorSpec) and given.device != wanted.device):
        return False
    if not _alike(given.shape, wanted.shape, symbols):
        return False
    strides = [(a, b) for n, a, b in zip(wanted.shape, given.stride, wanted.stride, strict=True) if n not in (0, 1)]
    return 0 in wanted.shape or _alike([a for a, _ in strides], [b for _, b in strides], symbols)


def _alike(a: Sequence[Size], b: Sequence[Size], symbols: Sequence[SymbolSpec]) -> bool:
    """Whether these are the same sizes: written the same, or equal wherever they are tried."""
    if len(a) != len(b):
        return False
    odd = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    if any(isinstance(x, int) and isinstance(y, int) for x, y in odd):
        return False
    if any(len(symbols_of(x) | symbols_of(y)) > len(symbols) for x, y in odd):
        return False
    tried = [{s.name: max(s.minimum, 2) + factor * (n + 1) for n, s in enumerate(symbols)} for factor in (0, 7, 1009)] if odd else []
    return all(evaluate(x, values) == evaluate(y, values) for values in tried for x, y in odd)


def _looks(spec: TensorSpec | WeightSpec) -> str:
    return f"{spec.dtype} {str(list(spec.shape))[:80]} with strides {str(list(spec.stride))[:80]}"


def _below(name: str, label: str) -> bool:
    return name == label or (name.startswith(label) and name[len(label)] in "[.")


def _rounded(number: float, dtype: str) -> float:
    return torch.tensor(number, dtype=getattr(torch, dtype)).item()


def _holds(dtype: str, fill: float) -> bool:
    if dtype.startswith(_FLOATING):
        return abs(fill) <= torch.finfo(getattr(torch, dtype)).max
    if dtype == "bool":
        return fill in (0.0, 1.0)
    bits = int(dtype.lstrip("uint"))
    low, high = (0, 1 << bits) if dtype.startswith("u") else (-1 << bits - 1, 1 << bits - 1)
    return fill.is_integer() and low <= fill < high


def check_orders(what: str, variant: VariantSpec) -> None:
    """That gradients which can be differentiated again take the inputs and the incoming gradients, and give what the backward gives; and that
    outputs which share memory are there."""
    for s in variant.shared:
        numbers, same = range(len(variant.outputs)), s.output == s.base
        if same or s.output not in numbers or s.base not in numbers or variant.outputs[s.output].dtype != variant.outputs[s.base].dtype:
            raise PackageError(f"{what}: output {s.output} cannot lie in the memory of output {s.base}")
        if s.stride and len(s.stride) != len(variant.outputs[s.output].shape):
            raise PackageError(f"{what}: output {s.output} has {len(variant.outputs[s.output].shape)} dimensions and {len(s.stride)} strides")
        for expression in (s.offset, *s.stride):
            check_symbols(f"{what}: the place of output {s.output}", expression, {symbol.name for symbol in variant.symbols})
    for first, again in pairwise(variant.orders):
        if first.backward is None or again.forward is None or again.backward is None or len(again.gives) != len(again.forward.outputs):
            raise PackageError(f"{what}: its gradients cannot be differentiated again as it says")
        kinds = [(s.dtype, s.device, s.shape) for s in (*first.inputs, *first.cotangents)]
        if kinds != [(s.dtype, s.device, s.shape) for s in again.inputs] or first.symbols != again.symbols:
            raise PackageError(f"{what}: its gradients take other inputs and incoming gradients than it does")
        if [g.of for g in first.backward.gradients if g.of in again.gives] != list(again.gives):
            raise PackageError(f"{what}: its differentiable gradients are of {sorted(again.gives)}, the backward's are not")

"""Whether an entry agrees with itself, with its variants and with the package's weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import PackageError
from ..format.dtypes import is_floating, rounded
from ..format.manifest import EntrySpec, Manifest, Plan, StepSpec
from ..format.param_groups import inside, options_in, options_of
from .plan_checks import check_constants, check_flags, flags_of, source
from .tensor_checks import check_tensor
from .variant_checks import check_variant

_CALLABLE = ("module", "grad", "step")
_CONTROLLED = ("clip_norm", "clip_value", "loss_scale")  # numbers of the entry's own


def state_names(manifest: Manifest) -> set[tuple[str, str]]:
    """Each weight with what the entries call it, with and without the entry's own name before that."""
    return {(s.weight, n) for e, entry in manifest.entries.items() for s in entry.state for n in (s.name, f"{e}.{s.name}")}


def check_entry(entry: EntrySpec, manifest: Manifest, named: set[tuple[str, str]]) -> None:
    """:class:`PackageError` names the field of the entry that contradicts another one. The weights and libraries that it refers to must be there.
    ``named``: :func:`state_names`."""
    _check_state(entry, manifest, named)
    for number, variant in enumerate(entry.variants):
        check_variant(f"variant {number}", entry, variant, manifest)
    if entry.kind not in _CALLABLE:
        return
    if not entry.variants:
        raise PackageError("it has no variants")
    if entry.kind == "grad":
        _check_wrt(entry)
    if entry.step is not None:
        _check_step(entry, entry.step, manifest)


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
        if state.requires_grad and not is_floating(manifest.weights[state.weight].dtype):
            raise PackageError(f"the state {state.name!r} requires a gradient and is of {manifest.weights[state.weight].dtype}")
        spec = manifest.weights[state.weight]
        if state.requires_grad and any(n > 1 and s == 0 for n, s in zip(spec.shape, spec.stride, strict=False)):
            raise PackageError(f"the state {state.name!r} requires a gradient, and its strides {list(spec.stride)} put several elements in one place")
        if (state.weight, state.weight) not in named:
            raise PackageError(f"the state {state.name!r} is bound to the weight {state.weight!r}, which is no state of that name")


def _check_wrt(entry: EntrySpec) -> None:
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
        if slot.starts_as >= 0 and fill is not None and step.fresh and fill != rounded(step.numbers[slot.starts_as].value, weights[slot.state].dtype):
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
        found = "the tensors" if step.gradients else "the plan 'update'"
        raise PackageError(
            f"a step that accumulates gradients has tensors for them and the plan 'update'; this one has only {found}: export it again"
        )
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
    check_constants(entry, plan, library)
    if flags_of(step) or len(library.outputs) != 1:
        check_flags(flags_of(step), library.outputs)


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

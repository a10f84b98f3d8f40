"""Check that every name, number and symbol by which one part of a manifest refers to another exists.

The manifest's SHA-256 proves that it is unchanged (``format/manifest_json.py``), and its writer asserted that it is
consistent (``aot_backward/packaging/consistency.py``). These checks turn a dangling reference into an error, for
example in a damaged package of a format before 1.15. ``docs/format.md``, section 8, lists them.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from ..errors import PackageError
from ..format.dtypes import DTYPES, can_hold
from ..format.expressions import symbols_of
from ..format.manifest import (
    EntrySpec,
    LibrarySpec,
    Manifest,
    PassSpec,
    Plan,
    Size,
    StateSpec,
    StepSpec,
    StructureSpec,
    SymbolSpec,
    TensorSpec,
    Tree,
    UpdateSpec,
    VariantSpec,
)
from .targets import targets_of

DEVICES = ("cpu", "cuda")
ROLES = {
    "module": ("forward", "backward", "inference"),
    "function": ("inference",),
    "grad": ("gradient",),
    "step": ("step", "accumulate"),
    "replay": (),
}
"""The kinds of entries, and the plans that a variant of each may have."""
_NUMBERED = re.compile(r"(input|saved|cotangent|result|value):(0|[1-9][0-9]{0,8})")
_VERSION = re.compile(r"([0-9]{1,9}(\.[0-9]{1,9})*)?")
_MOST_ELEMENTS = 1 << 60  # exclusive: a tensor's bytes then fit 64 bits, because an element has at most 16


def check_references(manifest: Manifest) -> None:
    """Raise :class:`PackageError` with the part and the reference if a reference does not exist."""
    for target in targets_of(manifest):
        if target.device not in DEVICES:
            raise PackageError(
                f"target {target.label!r}: device {target.device[:40]!r} is unknown, expected {' or '.join(DEVICES)}"
            )
    for name, weight in manifest.weights.items():
        if weight.dtype not in DTYPES or len(weight.shape) != len(weight.stride) or min(weight.shape, default=0) < 0:
            raise PackageError(
                f"weight {name!r}: not a tensor: {weight.dtype[:40]} {str(weight.shape)[:80]} with strides {str(weight.stride)[:80]}"
            )
        if math.prod(max(n, 1) for n in weight.shape) >= _MOST_ELEMENTS:
            raise PackageError(f"weight {name!r}: the shape {str(weight.shape)[:80]} is too large for a tensor")
        if weight.fill is not None and not can_hold(weight.dtype, weight.fill):
            raise PackageError(f"weight {name!r}: {weight.dtype} cannot hold its fill {weight.fill!r}")
    for name, library in manifest.libraries.items():
        with _within(f"library {name}"):
            _check_library(library, manifest)
    for name, entry in manifest.entries.items():
        with _within(f"entry {name}"):
            if entry.standalones:
                _count("standalones", entry.standalones, manifest.targets, "the further targets")
            _Entry(entry, manifest).check()


@contextlib.contextmanager
def _within(label: str) -> Iterator[None]:
    """Put ``label`` before the message of a :class:`PackageError`."""
    try:
        yield
    except PackageError as error:
        raise PackageError(f"{label}: {error}") from error


def _find(label: str, key: Any, items: Any) -> Any:
    """Return ``items[key]``, or raise :class:`PackageError` if it does not exist."""
    item = items.get(key) if isinstance(items, Mapping) else items[key] if 0 <= key < len(items) else None
    if item is None:
        raise PackageError(f"{label} refers to {key!r}, which the manifest does not have")
    return item


def _count(label: str, items: Sequence[Any], expected: Sequence[Any] | int, subject: str) -> None:
    number = expected if isinstance(expected, int) else len(expected)
    if len(items) != number:
        raise PackageError(f"{len(items)} {label} are listed, expected {number}, one for each of {subject}")


def _check_library(library: LibrarySpec, manifest: Manifest) -> None:
    _count("further builds", library.builds, manifest.targets, "the further targets")
    for build in library.every_build:
        for member in (build.member, build.metadata, build.extern):
            if member or member is not build.extern:
                _find("a build", member, manifest.members)
        if not (_VERSION.fullmatch(build.glibc) and _VERSION.fullmatch(build.glibcxx)):
            raise PackageError(f"{build.glibc!r} and {build.glibcxx!r} are not both versions")
        for constant in build.constants:
            _find(f"constant {constant.name}", constant.weight, manifest.weights)
    if library.graph:
        _find("its graph", library.graph, manifest.members)


def _check_tensors(specs: Iterable[TensorSpec], symbols: Set[str]) -> None:
    for spec in specs:
        if spec.dtype not in DTYPES or spec.device not in DEVICES or len(spec.shape) != len(spec.stride):
            raise PackageError(
                f"{spec.name}: not a tensor: {spec.dtype[:40]} {str(spec.shape)[:80]} with strides {str(spec.stride)[:80]} on {spec.device[:40]!r}"
            )
        _check_sizes(spec.name, (*spec.shape, *spec.stride), symbols)


def _check_sizes(label: str, sizes: Iterable[Size], symbols: Set[str]) -> None:
    for size in sizes:
        if not isinstance(size, int) and (unknown := symbols_of(size) - symbols):
            raise PackageError(f"{label}: the expression {size[:80]!r} needs the unknown symbol {min(unknown)!r}")


def _symbols(
    symbols: Sequence[SymbolSpec], inputs: Sequence[TensorSpec], sizes: Sequence[Size] | None = None
) -> set[str]:
    for symbol in symbols:
        places = (
            sizes
            if symbol.input == -1 and sizes is not None
            else _find(f"symbol {symbol.name}", symbol.input, inputs).shape
        )
        if not 0 <= symbol.dim < len(places) or symbol.scale < 1:
            raise PackageError(
                f"symbol {symbol.name}: expected a scale of at least 1 and one of {len(places)} sizes, got the scale {symbol.scale} and "
                f"size {symbol.dim}"
            )
    return {symbol.name for symbol in symbols}


def _leaves(tree: Tree) -> Iterator[Tree]:
    if tree.kind in ("tensor", "constant", "size"):
        yield tree
    elif tree.kind in ("dict", "namedtuple", "object"):
        _count(f"keys of a {tree.kind}", tree.keys, tree.children, "its children")
    elif tree.kind not in ("tuple", "list"):
        raise PackageError(f"a tree of the unknown kind {tree.kind[:40]!r}")
    for child in tree.children:
        yield from _leaves(child)


def _check_tree(label: str, tree: Tree, tensors: Sequence[TensorSpec]) -> None:
    indices = [t.index for t in _leaves(tree) if t.kind == "tensor"]
    if indices != list(range(len(tensors))):
        expected = f"the tensors 0 to {len(tensors) - 1} in their order" if tensors else "no tensors"
        raise PackageError(f"{label}: expected {expected}, got {indices[:20] or 'none'}")


@dataclass(frozen=True)
class _Entry:
    spec: EntrySpec
    manifest: Manifest

    @cached_property
    def _state(self) -> dict[str, StateSpec]:
        return {s.name: s for s in self.spec.state}

    def check(self) -> None:
        spec = self.spec
        if spec.kind not in ROLES:
            return  # from a later format
        for state in spec.state:
            _find(f"state {state.name!r}", state.weight, self.manifest.weights)
        if len(self._state) != len(spec.state):
            raise PackageError("two of its states have the same name")
        if (spec.kind == "step") != (spec.step is not None) or (spec.kind == "replay") == bool(spec.variants):
            raise PackageError(
                f"an entry of kind {spec.kind!r} has {len(spec.variants)} variants and {'a' if spec.step else 'no'} training step"
            )
        if spec.step is not None:
            self._check_step(spec.step)
        for number, variant in enumerate(spec.variants):
            with _within(f"variant {number}"):
                _count("verdicts", variant.verdicts, self.manifest.targets, "the further targets")
                self._check_variant(variant)
        if spec.kind == "grad":
            _count("names", spec.names, spec.wrt, "its gradients")
            for variant in spec.variants:
                for target in spec.wrt:
                    _find(
                        f"the gradient of {target}",
                        target,
                        {g.of: g for g in variant.gradient.gradients} if variant.gradient else {},
                    )
        for structure in spec.structures:
            with _within(f"structure {structure.fingerprint[:12]}"):
                self._check_structure(structure)
        for written in spec.in_place:
            library = _find("a graph that writes in place", written.library, self.manifest.libraries)
            _check_tensors((*library.inputs, *library.outputs), set())
            _count("verdicts", written.verdicts, self.manifest.targets, "the further targets")
        for number, update in enumerate(spec.updates):
            with _within(f"optimizer step {number}"):
                self._check_update(update)

    # variants

    def _check_variant(self, variant: VariantSpec) -> None:
        symbols = _symbols(variant.symbols, variant.inputs)
        _check_tensors((*variant.inputs, *variant.outputs, *variant.cotangents), symbols)
        _check_sizes("a guard", variant.guards, symbols)
        if variant.in_tree.kind != "tuple" or [c.kind for c in variant.in_tree.children] != ["tuple", "dict"]:
            kinds = ", ".join(c.kind for c in variant.in_tree.children[:5]) or "nothing"
            raise PackageError(f"in_tree: expected (args, kwargs), got a {variant.in_tree.kind} of {kinds}")
        _check_tree("its arguments", variant.in_tree, variant.inputs)
        _check_tree("its results", variant.out_tree, variant.outputs)
        _check_sizes("a result", [t.expression for t in _leaves(variant.out_tree) if t.kind == "size"], symbols)
        _count("incoming gradients", variant.cotangents, variant.differentiable, "its differentiable outputs")
        for number in variant.differentiable:
            _find("an incoming gradient", number, variant.outputs)
        for shared in variant.shared:
            output, _ = (
                _find("an output in shared memory", number, variant.outputs) for number in (shared.output, shared.base)
            )
            if shared.stride:
                _count("strides", shared.stride, output.shape, f"the dimensions of {output.name}")
            _check_sizes(output.name, (shared.offset, *shared.stride), symbols)
        plans = {
            role: plan for roles in ROLES.values() for role in roles if (plan := getattr(variant, role)) is not None
        }
        for role, plan in plans.items():
            with _within(role):
                self._check_plan(variant, role, plan, symbols)
        waits = self.spec.step is not None and self.spec.step.update is not None
        needed = (
            {"forward"}
            if "backward" in plans
            else {"gradient"}
            if self.spec.kind == "grad"
            else {"step"}
            if self.spec.step
            else set()
        )
        if (
            not plans
            or not plans.keys() >= needed | ({"accumulate"} if waits else set())
            or not plans.keys() <= set(ROLES[self.spec.kind])
        ):
            raise PackageError(
                f"a variant of kind {self.spec.kind!r} cannot be called with the plans {', '.join(plans) or 'none'}"
            )
        for first, again in pairwise(variant.orders):
            if first.backward is None or again.forward is None or again.backward is None:
                raise PackageError(
                    "its gradients cannot be differentiated again: expected a forward and a backward of each order"
                )
            _count(
                "inputs of its gradients",
                again.inputs,
                (*first.inputs, *first.cotangents),
                "its inputs and incoming gradients",
            )
            _count("gradients", again.gives, again.outputs, "the outputs")
            for target in again.gives:
                _find("a differentiable gradient", target, {g.of: g for g in first.backward.gradients})
        if variant.double is not None:
            self._check_variant(variant.double)

    def _check_plan(self, variant: VariantSpec, role: str, plan: Plan, symbols: Set[str]) -> None:
        library = _find("its call", plan.call.library, self.manifest.libraries) if plan.call else None
        results = library.outputs if library else ()
        saved = variant.forward.saved if variant.forward else ()
        tensors: dict[str, Sequence[Any]] = {
            "input": variant.inputs,
            "saved": saved,
            "cotangent": variant.cotangents,
            "result": results,
        }
        sources = {
            k: v for k, v in tensors.items() if k == "input" or (k in ("saved", "cotangent") and role == "backward")
        }
        if library is not None and plan.call is not None:
            _check_tensors((*library.inputs, *library.outputs), symbols)
            _count("operands", plan.call.operands, library.inputs, f"the inputs of library {plan.call.library}")
            for operand in plan.call.operands:
                self._resolve(operand, sources, symbols)
        for output in plan.outputs:
            self._resolve(output, {k: tensors[k] for k in ("input", "result")})
        if role != "backward":
            _count("outputs", plan.outputs, variant.outputs, "the outputs of the variant")
        for text in (*plan.saved, *plan.watched):
            self._resolve(text, {k: tensors[k] for k in ("input", "result")})
        for gradient in plan.gradients:
            self._resolve(gradient.of, {"input": variant.inputs})
            if gradient.source:
                self._resolve(gradient.source, {"result": results})
            for number in gradient.cotangents:
                _find(f"the gradient of {gradient.of}", number, variant.cotangents)
        for number in plan.consumes:
            _find("what it consumes", number, saved)
        self._check_state_names((*plan.reads, *plan.writes))

    def _resolve(self, text: str, tensors: Mapping[str, Sequence[Any]], symbols: Set[str] | None = None) -> None:
        """Check the reference ``text``: ``input:3``, ``saved:0``, …; ``parameter:NAME``, or with ``symbols``,
        ``size:EXPRESSION``."""
        kind, _, rest = text.partition(":")
        if kind == "size" and symbols is not None:
            _check_sizes(text, [rest], symbols)
        elif kind == "parameter" and symbols is None:
            self._check_state_names([rest])
        elif not _NUMBERED.fullmatch(text) or kind not in tensors or int(rest) >= len(tensors[kind]):
            there = ", ".join(f"{len(v)} of kind {k!r}" for k, v in tensors.items())
            raise PackageError(f"it refers to {text[:80]!r}, which does not exist: there are {there}")

    def _check_state_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._state:
                raise PackageError(f"it refers to {name!r}, which is not among its parameters and buffers")

    # training steps

    def _check_step(self, step: StepSpec) -> None:
        for group in step.groups:
            for parameter in group.parameters:
                _find("a parameter group", f"module.{parameter}", self._state)
        for state in (
            *(s.state for s in step.state),
            *(g.state for g in step.gradients),
            *(f"module.{g.parameter}" for g in step.gradients),
        ):
            _find("the step", state, self._state)
        vector = self.manifest.weights[_find("the step", "numbers", self._state).weight]
        if (vector.dtype, vector.shape) != ("float64", (len(step.numbers) + 2,)):
            raise PackageError(
                f"its numbers are {vector.dtype} of shape {vector.shape}, expected float64 of shape ({len(step.numbers) + 2},)"
            )
        for number in step.numbers:
            if number.group != -1:
                _find(f"the number {number.key!r}", number.group, step.groups)
        for slot in step.state:
            if slot.starts_as != -1:
                _find(f"the state {slot.state!r}", slot.starts_as, step.numbers)
            _find(f"the state {slot.state!r}", 0, slot.parameters)
        if (step.update is None) != (not step.gradients):
            raise PackageError(
                "a step that accumulates gradients has tensors for them and the plan 'update'; this one has only one of the two"
            )
        if step.update is not None:
            library = _find("the update", step.update.call.library if step.update.call else "", self.manifest.libraries)
            _count("inputs of the update", library.inputs, 0, "its operands")
            self._check_state_names((*step.update.reads, *step.update.writes))

    # recorded passes and optimizer steps

    def _check_structure(self, structure: StructureSpec) -> None:
        for number, spec in enumerate(structure.variants):
            with _within(f"variant {number}"):
                self._check_pass(structure, spec)

    def _check_pass(self, structure: StructureSpec, spec: PassSpec) -> None:
        symbols = _symbols(spec.symbols, spec.inputs, spec.sizes)
        _check_tensors(spec.inputs, symbols)
        _check_sizes("a size", spec.sizes, symbols)
        _check_sizes("a guard", spec.guards, symbols)
        _count("verdicts", spec.verdicts, self.manifest.targets, "the further targets")
        operations = structure.operations if structure.operations < 1 << 20 else 0
        if sorted(n for s in spec.segments for n in s.ops) != list(range(operations)):
            raise PackageError(f"its segments: expected each of its {structure.operations} operations once, got others")
        values = set[int]()
        for segment in spec.segments:
            if not segment.library:
                _count("operations", segment.ops, 1, "a segment without a compiled graph")
                continue
            library = _find("a segment", segment.library, self.manifest.libraries)
            _check_tensors((*library.inputs, *library.outputs), symbols)
            _count("operands", segment.operands, library.inputs, f"the inputs of library {segment.library}")
            _count("results", segment.results, library.outputs, f"the outputs of library {segment.library}")
            for operand in segment.operands:
                kind, where = parse_operand(operand)
                if kind == "input":
                    _find("a segment", where, spec.inputs)
                elif kind == "size":
                    _check_sizes(operand, [where], symbols)
            values |= {*segment.results, *segment.undefined}
        if min(values, default=0) < 0:
            raise PackageError(f"a segment gives the value {min(values)}, expected a number of at least 0")

    def _check_update(self, update: UpdateSpec) -> None:
        places = [p for g in update.groups for p in g.parameters]
        for parameter in (*update.trained, *(s.parameter for s in update.state)):
            if parameter not in places:
                raise PackageError(f"it refers to parameter {parameter!r}, which is in none of its groups")
        for number in update.numbers:
            _find(f"the number {number.key!r}", number.group, update.groups)
        library = self.manifest.libraries[update.library]
        _count(
            "inputs of its library",
            library.inputs,
            2 * len(update.trained) + len(update.state) + 1,
            "its gradients, parameters, state and numbers",
        )


def parse_operand(text: str) -> tuple[str, Any]:
    """Parse ``input:3`` as ("input", 3), ``value:3`` likewise, and ``size:E`` as ("size", "E")."""
    kind, _, rest = text.partition(":")
    if kind == "size" and rest:
        return kind, rest
    if kind not in ("input", "value") or not _NUMBERED.fullmatch(text):
        raise PackageError(f"operand {text[:80]!r}: expected input:I, value:I or size:E")
    return kind, int(rest)

"""What is drawn together: a variant's forward and backward side by side, any other graph by itself; and what the inputs and results of each are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aot_backward_runtime.manifest import EntrySpec, Manifest, PassSpec, Plan, TensorSpec, VariantSpec

from .drawing import Drawing
from .memory import Use, use


@dataclass(frozen=True)
class Column:
    """One graph in a view. ``given``: what each placeholder is, by its node; ``gives``: what each result is, by the node behind it.
    ``labels``: the author's names for the sizes in it."""

    role: str  # "forward"
    drawing: Drawing
    given: Mapping[int, str]
    gives: Mapping[int, tuple[str, ...]]
    use: Use
    labels: Mapping[str, str]


@dataclass(frozen=True)
class View:
    """``links``: saved tensors, as a node of the first column and a placeholder of the second."""

    title: str
    entry: str
    columns: tuple[Column, ...]
    links: tuple[tuple[int, int], ...] = ()
    saved: int = 0  # bytes of the saved tensors

    @property
    def in_words(self) -> str:
        return " and ".join(c.role for c in self.columns)


@dataclass(frozen=True)
class _Maker:
    drawings: Mapping[str, Drawing]
    uses: dict[str, Use] = field(default_factory=dict)

    def column(self, role: str, library: str, given: Sequence[str], gives: Sequence[tuple[int, str]], labels: Mapping[str, str]) -> Column | None:
        """``given``: what the library's inputs are, in its order; ``gives``: what its results are, by their number."""
        drawing = self.drawings.get(library)
        if drawing is None:
            return None
        results: dict[int, tuple[str, ...]] = {}
        for number, what in gives:
            if 0 <= number < len(drawing.results) and drawing.results[number] >= 0:
                node = drawing.results[number]
                results[node] = (*results.get(node, ()), what)
        if library not in self.uses:
            self.uses[library] = use(drawing)
        return Column(role, drawing, dict(zip(drawing.placeholders, given, strict=False)), results, self.uses[library], labels)


def views(manifest: Manifest, drawings: Mapping[str, Drawing]) -> list[View]:
    """Everything there is to draw, in the manifest's order."""
    maker = _Maker(drawings)
    return [view for name, entry in manifest.entries.items() for view in _of_entry(name, entry, maker) if view.columns]


def _of_entry(name: str, entry: EntrySpec, maker: _Maker) -> Iterator[View]:
    for number, variant in enumerate(entry.variants):
        for order, program in enumerate(variant.orders, 1):
            title = f"{name}, {variant_title(number, program)}"
            yield from _of_variant(title if order == 1 else f"{title}, {order_in_words(order)}", name, program, maker)
    if entry.step is not None and entry.step.update is not None:
        yield View(f"{name}, update alone", name, _columns(_column(maker, "update", entry.step.update, (), (), {})))
    for structure in entry.structures:
        for number, compiled in enumerate(structure.variants):
            yield from _of_pass(f"{name}, structure {structure.fingerprint[:12]}, variant {number}", name, compiled, maker)


def variant_title(number: int, variant: VariantSpec) -> str:
    return f"variant {number}, {variant.mode} mode" if variant.mode else f"variant {number}"


def order_in_words(order: int) -> str:
    return {1: "gradients", 2: "second derivatives", 3: "third derivatives"}.get(order, f"derivatives of order {order}")


def _of_variant(title: str, entry: str, v: VariantSpec, maker: _Maker) -> Iterator[View]:
    labels = {s.name: s.label for s in v.symbols}
    forward = _column(maker, "forward", v.forward, v.inputs, v.outputs, labels) if v.forward else None
    backward = _column(maker, "backward", v.backward, v.inputs, v.outputs, labels, v.cotangents) if v.backward else None
    links = tuple(_links(v, forward, backward)) if forward and backward else ()
    placeholders = {b for _, b in links}
    saved = sum(looks.bytes for b in placeholders if backward for looks in backward.drawing.nodes[b].looks if looks)
    yield View(title, entry, _columns(forward, backward), links, saved)
    for role, plan in (("inference", v.inference), ("gradient", v.gradient), ("step", v.step), ("accumulate", v.accumulate)):
        if plan is not None:
            yield View(title, entry, _columns(_column(maker, role, plan, v.inputs, v.outputs, labels)))


def _columns(*columns: Column | None) -> tuple[Column, ...]:
    return tuple(c for c in columns if c is not None)


def _column(
    maker: _Maker,
    role: str,
    plan: Plan,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    labels: Mapping[str, str],
    cotangents: Sequence[TensorSpec] = (),
) -> Column | None:
    if plan.call is None:
        return None
    given = [_operand(o, inputs, cotangents, labels) for o in plan.call.operands]
    gives = [(_result(o), f"result {outputs[i].name}" if i < len(outputs) else f"result {i}") for i, o in enumerate(plan.outputs)]
    gives += [(_result(o), f"saved {i}") for i, o in enumerate(plan.saved)]
    gives += [(_result(g.source), f"gradient of {_owner(g.of, inputs)}") for g in plan.gradients]
    return maker.column(role, plan.call.library, given, [(n, what) for n, what in gives if n >= 0], labels)


def _of_pass(title: str, entry: str, spec: PassSpec, maker: _Maker) -> Iterator[View]:
    labels = {s.name: s.label for s in spec.symbols}
    for segment in spec.segments:
        if segment.library:
            given = [_operand(o, spec.inputs, (), labels) for o in segment.operands]
            column = maker.column("backward", segment.library, given, [(i, f"value {n}") for i, n in enumerate(segment.results)], labels)
            yield View(title, entry, _columns(column))


def _operand(operand: str, inputs: Sequence[TensorSpec], cotangents: Sequence[TensorSpec], labels: Mapping[str, str]) -> str:
    kind, _, rest = operand.partition(":")
    number = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 10 else -1
    if kind == "input" and 0 <= number < len(inputs):
        return inputs[number].name
    if kind == "cotangent" and 0 <= number < len(cotangents):
        return cotangents[number].name
    return f"{kind} {spelled(rest, labels)}"


def spelled(expression: str, labels: Mapping[str, str]) -> str:
    """An expression with the author's names for its symbols."""
    return re.sub(r"[A-Za-z_]\w*", lambda m: labels.get(m[0], m[0]), expression)


def _owner(of: str, inputs: Sequence[TensorSpec]) -> str:
    kind, _, rest = of.partition(":")
    return inputs[int(rest)].name if kind == "input" and rest.isdigit() and int(rest) < len(inputs) else rest


def _result(source: str) -> int:
    kind, _, rest = source.partition(":")
    return int(rest) if kind == "result" and rest.isascii() and rest.isdigit() and len(rest) < 10 else -1


def _links(v: VariantSpec, forward: Column, backward: Column) -> Iterator[tuple[int, int]]:
    if v.forward is None or v.backward is None or v.forward.call is None or v.backward.call is None:
        return
    sources = dict(zip(v.forward.call.operands, forward.drawing.placeholders, strict=False))
    for operand, placeholder in zip(v.backward.call.operands, backward.drawing.placeholders, strict=False):
        kind, _, rest = operand.partition(":")
        if kind == "input" and operand in sources:
            yield sources[operand], placeholder
        if kind == "saved" and rest.isascii() and rest.isdigit() and int(rest) < len(v.forward.saved):
            saved = v.forward.saved[int(rest)]
            node = forward.drawing.results[_result(saved)] if 0 <= _result(saved) < len(forward.drawing.results) else sources.get(saved, -1)
            if node >= 0:
                yield node, placeholder

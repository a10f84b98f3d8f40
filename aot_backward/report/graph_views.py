"""Views of graphs: a variant's forward and backward side by side, any other graph by itself; and names of the inputs
and results of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aot_backward_runtime.format.manifest import (
    ClippingSpec,
    EntrySpec,
    LibrarySpec,
    Manifest,
    PassSpec,
    Plan,
    SymbolSpec,
    TensorSpec,
    UpdateSpec,
    VariantSpec,
)

from .graph_model import Drawing
from .markup import clean
from .memory import MemoryUse, memory_use

_LONGEST_LABEL = 40  # characters of a symbol's name, which is repeated in every shape


@dataclass(frozen=True)
class Column:
    """One graph in a view. ``given``: a description of each placeholder, by its node; ``gives``: descriptions of
    results, by the node behind them. ``labels``: the author's names for the sizes in it."""

    role: str  # "forward"
    drawing: Drawing
    use: MemoryUse
    given: Mapping[int, str]
    gives: Mapping[int, tuple[str, ...]]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class View:
    """Graphs side by side. ``links``: saved tensors, as a node of the first column and a placeholder of the second."""

    title: str
    columns: tuple[Column, ...]
    links: tuple[tuple[int, int], ...] = ()

    @property
    def in_words(self) -> str:
        return " and ".join(c.role for c in self.columns)

    @property
    def saved(self) -> int:
        """Return the bytes of the saved tensors."""
        return sum(
            tensor.bytes
            for node in {b for _, b in self.links}
            for tensor in self.columns[1].drawing.nodes[node].tensors
            if tensor
        )


_Drawn = Mapping[str, tuple[Drawing, MemoryUse]]


def views(manifest: Manifest, drawings: Mapping[str, Drawing]) -> list[View]:
    """Return all views, in the manifest's order."""
    graphs = {name: (drawing, memory_use(drawing)) for name, drawing in drawings.items()}
    all_views = [
        view for name, entry in manifest.entries.items() for view in _of_entry(name, entry, graphs) if view.columns
    ]
    for name, entry in manifest.entries.items():
        all_views += [
            view for u in entry.updates for view in _of_update(name, u, manifest.libraries[u.library], graphs)
        ]
        all_views += [
            view for c in entry.clippings for view in _of_clipping(name, c, manifest.libraries[c.library], graphs)
        ]
    return all_views


def _of_entry(name: str, entry: EntrySpec, graphs: _Drawn) -> Iterator[View]:
    for number, variant in enumerate(entry.variants):
        for order, program in enumerate(variant.orders, 1):
            title = f"{name}, {variant_title(number, variant)}"
            yield from _of_variant(title if order == 1 else f"{title}, {order_in_words(order)}", program, graphs)
    if entry.step is not None and entry.step.update is not None:
        yield View(f"{name}, update alone", _planned(graphs, ("update", entry.step.update)))
    for structure in entry.structures:
        for number, spec in enumerate(structure.variants):
            yield from _of_pass(f"{name}, structure {structure.fingerprint[:12]}, variant {number}", spec, graphs)


def _of_update(name: str, update: UpdateSpec, library: LibrarySpec, graphs: _Drawn) -> Iterator[View]:
    if update.library in graphs:
        input_names = [spec.name for spec in library.inputs]
        yield View(
            f"{name}, step of {update.optimizer.rpartition('.')[2]}",
            (_column("update", graphs[update.library], input_names, [(0, "nothing")], {}),),
        )


def _of_clipping(name: str, clipping: ClippingSpec, library: LibrarySpec, graphs: _Drawn) -> Iterator[View]:
    if clipping.library in graphs:
        input_names, result = [spec.name for spec in library.inputs], "norm" if clipping.norm_type else "nothing"
        yield View(
            f"{name}, {clipping.function}",
            (_column("clipping", graphs[clipping.library], input_names, [(0, result)], {}),),
        )


def variant_title(number: int, variant: VariantSpec) -> str:
    return f"variant {number}, {variant.mode} mode" if variant.mode else f"variant {number}"


def order_in_words(order: int) -> str:
    return {1: "gradients", 2: "second derivatives", 3: "third derivatives"}.get(order, f"derivatives of order {order}")


def _of_variant(title: str, v: VariantSpec, graphs: _Drawn) -> Iterator[View]:
    training = _planned(graphs, ("forward", v.forward), ("backward", v.backward), of=v)
    yield View(
        title,
        training,
        tuple(_links(v.forward, v.backward, *training)) if v.forward and v.backward and len(training) == 2 else (),
    )
    for plan in (("inference", v.inference), ("gradient", v.gradient), ("step", v.step), ("accumulate", v.accumulate)):
        yield View(title, _planned(graphs, plan, of=v))


def _of_pass(title: str, spec: PassSpec, graphs: _Drawn) -> Iterator[View]:
    for segment in spec.segments:
        if segment.library in graphs:
            labels = _labels(spec.symbols)
            input_names = [_operand(o, spec.inputs, (), labels) for o in segment.operands]
            result_names = [(i, f"value {n}") for i, n in enumerate(segment.results)]
            yield View(title, (_column("backward", graphs[segment.library], input_names, result_names, labels),))


def _planned(graphs: _Drawn, *plans: tuple[str, Plan | None], of: VariantSpec | None = None) -> tuple[Column, ...]:
    """Return a column for each plan that calls a graph that the package holds as data."""
    inputs, outputs, cotangents = (of.inputs, of.outputs, of.cotangents) if of else ((), (), ())
    labels = _labels(of.symbols) if of else {}
    columns = []
    for role, plan in plans:
        if plan is not None and plan.call is not None and plan.call.library in graphs:
            input_names = [_operand(o, inputs, cotangents, labels) for o in plan.call.operands]
            result_names = [
                (_result(o), f"result {outputs[i].name}" if i < len(outputs) else f"result {i}")
                for i, o in enumerate(plan.outputs)
            ]
            result_names += [(_result(o), f"saved {i}") for i, o in enumerate(plan.saved)]
            result_names += [(_result(g.source), f"gradient of {owner(g.of, inputs)}") for g in plan.gradients]
            columns.append(_column(role, graphs[plan.call.library], input_names, result_names, labels))
    return tuple(columns)


def _column(
    role: str,
    graph: tuple[Drawing, MemoryUse],
    input_names: Sequence[str],
    result_names: Sequence[tuple[int, str]],
    labels: Mapping[str, str],
) -> Column:
    """Return a column. ``input_names``: descriptions of the library's inputs, in its order; ``result_names``:
    descriptions of its results, by their number."""
    drawing, memory = graph
    results: dict[int, tuple[str, ...]] = {}
    for number, label in result_names:
        node = drawing.results[number] if 0 <= number < len(drawing.results) else -1
        if node >= 0:
            results[node] = (*results.get(node, ()), label)
    return Column(role, drawing, memory, dict(zip(drawing.placeholders, input_names, strict=False)), results, labels)


def _links(first: Plan, second: Plan, forward: Column, backward: Column) -> Iterator[tuple[int, int]]:
    assert first.call is not None and second.call is not None
    inputs = dict(zip(first.call.operands, forward.drawing.placeholders, strict=False))
    for operand, placeholder in zip(second.call.operands, backward.drawing.placeholders, strict=False):
        kind, _, rest = operand.partition(":")
        saved = first.saved[number_of(rest)] if kind == "saved" and 0 <= number_of(rest) < len(first.saved) else operand
        result = _result(saved)
        node = forward.drawing.results[result] if 0 <= result < len(forward.drawing.results) else inputs.get(saved, -1)
        if node >= 0:
            yield node, placeholder


def _operand(
    operand: str, inputs: Sequence[TensorSpec], cotangents: Sequence[TensorSpec], labels: Mapping[str, str]
) -> str:
    """Return a description of a call's operand."""
    kind, _, rest = operand.partition(":")
    specs = {"input": inputs, "cotangent": cotangents}.get(kind, ())
    return specs[number_of(rest)].name if 0 <= number_of(rest) < len(specs) else f"{kind} {with_labels(rest, labels)}"


def owner(of: str, inputs: Sequence[TensorSpec]) -> str:
    """Return the name behind ``parameter:NAME`` or ``input:I``."""
    kind, _, rest = of.partition(":")
    return inputs[number_of(rest)].name if kind == "input" and 0 <= number_of(rest) < len(inputs) else rest


def _result(source: str) -> int:
    """Return I of ``result:I``, otherwise -1."""
    kind, _, rest = source.partition(":")
    return number_of(rest) if kind == "result" else -1


def number_of(text: str) -> int:
    """Return a number of a plan, or -1 if the text is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def _labels(symbols: Sequence[SymbolSpec]) -> dict[str, str]:
    return {s.name: clean(s.label)[:_LONGEST_LABEL] for s in symbols}


def with_labels(expression: str, labels: Mapping[str, str]) -> str:
    """Return an expression with the author's names for its symbols."""
    return re.sub(r"[A-Za-z_]\w*", lambda m: labels.get(m[0], m[0]), expression)

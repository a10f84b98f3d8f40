"""Describe a package's entries: the inputs, results and conditions of each variant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from aot_backward_runtime.format.manifest import (
    ClippingSpec,
    EntrySpec,
    GroupSpec,
    LayerSpec,
    NumberSpec,
    PassSpec,
    StructureSpec,
    TensorSpec,
    Tree,
    UpdateSpec,
    VariantSpec,
    Verdict,
)
from aot_backward_runtime.format.param_groups import allowed_words, options_of
from aot_backward_runtime.native.pytree import describe, signature
from aot_backward_runtime.package.archive import Archive
from aot_backward_runtime.package.targets import standalone_by_target, targets_of

from .blocks import SHOWN, code, facts, folded, line, section
from .graph_views import order_in_words, owner, variant_title
from .markup import Child, Html, element
from .wording import (
    Words,
    ambient_in_words,
    counted,
    pass_speed_in_words,
    speed_in_words,
    standalone_in_words,
    verdict_in_words,
)


def entries(archive: Archive) -> Html:
    return section(
        "entries", "Entries", [_entry(name, entry, archive) for name, entry in archive.manifest.entries.items()]
    )


def _layer(layer: LayerSpec) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in layer.settings.items())
    return f"{layer.name or '(the module)'}: {layer.kind.rpartition('.')[2]}({settings})"


def _entry(name: str, entry: EntrySpec, archive: Archive) -> Html:
    specs = entry.program_state
    parameters = [s for s in specs if s.parameter]
    frozen = [s.name for s in specs if s.parameter and not s.requires_grad]
    elements = sum(math.prod(archive.manifest.weights[key].shape) for key in {s.weight for s in parameters})
    ties = len(specs) - len({s.weight for s in specs})
    state = (
        f"{counted(len(parameters), 'parameter')} with {elements:,} elements, {counted(len(specs) - len(parameters), 'buffer')}"
        if specs
        else ""
    )
    rows: list[tuple[str, Child]] = [
        ("State", f"{state}{f', {ties} tied to others' if ties else ''}" if state else None),
        ("Frozen", folded(list(map(code, frozen)), "parameters") if frozen else None),
        ("Gradients of", folded(list(map(code, entry.names)), "gradients") if entry.names else None),
        *_step(entry),
        ("Layers", folded([code(_layer(layer)) for layer in entry.layers], "layers") if entry.layers else None),
        ("Metadata", entry.metadata or None),
        (
            "Without PyTorch",
            standalone_in_words(standalone_by_target(archive.manifest, name)) if entry.kind != "replay" else None,
        ),
    ]
    parts = [_variant(number, v, entry, archive) for number, v in enumerate(entry.variants)]
    parts += [_structure(s, archive) for s in entry.structures]
    parts += [_update(u, archive) for u in entry.updates]
    parts += [_clipping(c, archive) for c in entry.clippings]
    title = element("h3", name, " ", element("span", entry.kind, class_="kind"))
    return element("article", title, facts(rows), parts, class_="entry")


def _update(update: UpdateSpec, archive: Archive) -> Html:
    """Describe an optimizer step of a recorded script."""
    rows: list[tuple[str, Child]] = [
        (
            "Parameters",
            f"{len(update.trained):,} with a gradient; state: {', '.join(sorted({s.key for s in update.state})) or 'none'}",
        ),
        *_groups(update.groups, update.numbers),
        *_in_place(update, archive),
    ]
    return element("div", element("h4", "Steps of ", code(update.optimizer)), facts(rows), class_="variant")


def _clipping(clipping: ClippingSpec, archive: Archive) -> Html:
    """Describe a recorded script's clipping of gradients."""
    gradients = len(archive.manifest.libraries[clipping.library].inputs) - 1
    rows: list[tuple[str, Child]] = [
        (
            "Gradients",
            f"{gradients:,}{f', by their norm of order {clipping.norm_type}' if clipping.norm_type else ', by value'}",
        ),
        *_in_place(clipping, archive),
    ]
    return element(
        "div", element("h4", "Calls of ", code(f"torch.nn.utils.{clipping.function}")), facts(rows), class_="variant"
    )


def _in_place(spec: UpdateSpec | ClippingSpec, archive: Archive) -> Iterator[tuple[str, Child]]:
    """Describe code that writes to a script's own tensors."""
    yield "Code", f"the graph {spec.library}"
    yield from _compared(spec.verdict, spec.verdicts, archive)
    yield "Speed when it was recorded", list(map(line, pass_speed_in_words(spec.speed))) if spec.speed else None


def _step(entry: EntrySpec) -> Iterator[tuple[str, Child]]:
    step = entry.step
    if step is None:
        return
    origin = "before its first step" if step.fresh else "after steps made before the export"
    yield "Optimizer", [code(step.optimizer), f", {origin}; {counted(len(step.state), 'tensor')} of state"]
    yield from _groups(step.groups, step.numbers)
    numbers = {n.key: n.value for n in step.numbers if n.group == -1}
    yield "Clipping", ", ".join(f"{key} = {value:g}" for key, value in numbers.items() if key.startswith("clip_"))
    yield "Average of parameters", f"with decay {numbers['ema']:g}" if "ema" in numbers else None
    yield (
        "Loss scale",
        f"{numbers['loss_scale']:g} at first, then by torch.amp.GradScaler's rule" if "loss_scale" in numbers else None,
    )
    yield "Gradients", "can be accumulated over calls" if step.update else "every call is an update"
    yield "Not finite", "an update is skipped if the gradients have Inf or NaN" if step.finite else None


def _groups(groups: Sequence[GroupSpec], specs: Sequence[NumberSpec]) -> Iterator[tuple[str, Child]]:
    for number, group in enumerate(groups):
        own = [n for n in specs if n.group == number]
        fixed = {k: v for k, v in options_of(group).items() if k not in {n.key for n in own}}
        numbers = ", ".join(map(_number, own)) or "nothing"
        note = f"fixed: {', '.join(f'{k} = {v}' for k, v in fixed.items())}"
        text = f"{counted(len(group.parameters), 'parameter')}; a schedule may change {numbers}"
        yield f"Group {number}", [text, element("p", note, class_="quiet") if fixed else None]


def _number(spec: NumberSpec) -> str:
    place = "" if spec.position < 0 else f"[{spec.position}]"
    limits = f" ({allowed_words(spec.allowed)})" if spec.allowed else ""
    return f"{spec.key}{place} = {spec.value:g}{limits}"


def _variant(number: int, v: VariantSpec, entry: EntrySpec, archive: Archive) -> Html:
    words = Words(v.inputs, v.symbols, v.guards)
    single = len(entry.variants) == 1 and not v.mode
    call = [code(f"{signature(v.in_tree, v.argument_names)} → {describe(v.out_tree)}")]
    rows: list[tuple[str, Child]] = [
        ("Call", call),
        ("Arguments", _tensors(v.inputs, words, entry.kind == "module")),
        ("Results", _tensors(v.outputs, words)),
        (
            "Sizes",
            [
                line(element("b", label), f": {bounds}", f" ({place})" if place else "")
                for label, bounds, place in words.ranges()
            ],
        ),
        ("Only if", [line(c) for c in (*words.conditions(), *_constants(v), *ambient_in_words(v.ambient))]),
        ("In the other mode", folded(list(map(code, v.set_apart)), "submodules") if v.set_apart else None),
        ("Gradients of", _gradients(v) if not entry.names else None),
        ("Never reached", folded([code(owner(u, v.inputs)) for u in v.unreached], "tensors") if v.unreached else None),
        (
            "Derivatives",
            ", ".join(order_in_words(i) for i in range(1, len(v.orders) + 1)) if len(v.orders) > 1 else None,
        ),
        ("Randomness", "draws random numbers" if v.random else None),
        ("Changes", _changes(v)),
        *_compared(v.verdict, v.verdicts, archive),
        ("Speed when it was exported", list(map(line, speed_in_words(v.speed))) if v.speed else None),
    ]
    title = None if single else element("h4", variant_title(number, v).capitalize())
    return element("div", title, facts(rows), class_="variant")


def _tensors(specs: Sequence[TensorSpec], words: Words, gradients: bool = False) -> Child:
    """Describe tensors. ``gradients``: mark the tensors that may get one."""
    rows = [
        line(element("b", s.name), f": {words.tensor(s)}{', gets a gradient' if gradients and s.requires_grad else ''}")
        for s in specs
    ]
    if len(rows) <= SHOWN + 3:
        return rows
    return [*rows[:SHOWN], element("details", element("summary", f"and {len(rows) - SHOWN:,} more"), rows[SHOWN:])]


def _constants(v: VariantSpec) -> Iterator[str]:
    """Yield arguments that are not tensors, which must be equal to the exported values."""
    positional, keywords = v.in_tree.children if len(v.in_tree.children) == 2 else (v.in_tree, v.in_tree)
    labels = [*v.argument_names, *(f"args[{i}]" for i in range(len(v.argument_names), len(positional.children)))]
    for label, child in [
        *zip(labels, positional.children, strict=False),
        *zip(map(str, keywords.keys), keywords.children, strict=False),
    ]:
        yield from _fixed(child, label)


def _fixed(tree: Tree, path: str) -> Iterator[str]:
    if tree.kind == "constant":
        yield f"{path} is {tree.value!r}"
    keys = tree.keys or range(len(tree.children))
    for key, child in zip(keys, tree.children, strict=False):
        yield from _fixed(child, f"{path}[{key!r}]")


def _gradients(v: VariantSpec) -> Child:
    plan = v.backward or v.gradient
    names = [owner(g.of, v.inputs) for g in plan.gradients if g.source] if plan else []
    missing = [owner(g.of, v.inputs) for g in plan.gradients if not g.source] if plan else []
    parts = [folded(list(map(code, names)), "tensors") if names else None]
    return (
        [*parts, line("None, as in eager: ", folded(list(map(code, missing)), "tensors"))]
        if missing
        else parts
        if names
        else None
    )


def _changes(v: VariantSpec) -> Child:
    plans = (v.forward, v.inference, v.gradient, v.step)
    names = list(dict.fromkeys(n for plan in plans if plan for n in plan.writes))
    return folded(list(map(code, names)), "tensors") if names else None


def _compared(first: Verdict, rest: Sequence[Verdict], archive: Archive) -> Iterator[tuple[str, Child]]:
    targets = targets_of(archive.manifest)
    lines = []
    for target, verdict in zip(targets, (first, *rest), strict=False):
        is_verified = verdict.status == "verified"
        lines.append(
            line(
                f"{target.label}: " if rest else "",
                element("span", verdict_in_words(verdict), class_="good" if is_verified else "open"),
            )
        )
    yield "Compared", lines


def _structure(s: StructureSpec, archive: Archive) -> Html:
    counts = Counter(n.rpartition("::")[2] for n in s.nodes)
    nodes = [[code(n), f" × {k}" if k > 1 else ""] for n, k in counts.items()]
    rows: list[tuple[str, Child]] = [
        ("Recorded pass", f"{counted(len(s.nodes), 'autograd node')}, {counted(s.operations, 'operation')}"),
        ("Nodes", folded(nodes, "kinds")),
        ("Uncompiled", f"{s.seconds * 1e6:,.0f} µs when it was recorded" if s.seconds else None),
    ]
    variants = [_pass(number, v, archive) for number, v in enumerate(s.variants)]
    return element(
        "div", element("h4", "Structure ", code(s.fingerprint[:12])), facts(rows), variants, class_="variant"
    )


def _pass(number: int, v: PassSpec, archive: Archive) -> Html:
    words = Words(v.inputs, v.symbols, v.guards)
    rows: list[tuple[str, Child]] = [
        (f"Variant {number}", ", ".join(steps_in_words(v)) or "nothing to run"),
        ("Tensors", _tensors(v.inputs, words)),
        (
            "Sizes",
            [
                line(element("b", label), f": {bounds}", f" ({place})" if place else "")
                for label, bounds, place in words.ranges()
            ],
        ),
        ("Only if", [line(c) for c in (*words.conditions(), *ambient_in_words(v.ambient))]),
        ("Numbers", ", ".join(f"{n:g}" for n in v.scalars)),
        *_compared(v.verdict, v.verdicts, archive),
        ("Speed when it was recorded", list(map(line, pass_speed_in_words(v.speed))) if v.speed else None),
    ]
    return facts(rows)


def steps_in_words(v: PassSpec) -> Iterator[str]:
    """Yield what a recorded pass runs, in order; neighbours that run without native code are counted together."""
    for kind, group in groupby(v.segments, lambda s: "graph" if s.library else "leaf" if s.operands else "recorded"):
        segments = list(group)
        if kind == "graph":
            yield from (f"{counted(len(s.ops), 'operation')} in the graph {s.library}" for s in segments)
        elif kind == "leaf":
            yield f"{counted(len(segments), 'gradient')} handed to the leaves"
        else:
            yield f"{counted(len(segments), 'operation')} as recorded"

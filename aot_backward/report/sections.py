"""What the page says above its graphs: what a package is, what it offers and asks for, where its bytes and its kernels are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from aot_backward_runtime.archive import Archive
from aot_backward_runtime.manifest import (
    EXAMPLES_MEMBER,
    GRAPH_FOLDER,
    WEIGHTS_MEMBER,
    EntrySpec,
    PassSpec,
    StateSpec,
    StructureSpec,
    Target,
    TensorSpec,
    Tree,
    VariantSpec,
    Verdict,
)
from aot_backward_runtime.parameter_groups import options_of
from aot_backward_runtime.signatures import signature_beside
from aot_backward_runtime.targets import targets_of
from aot_backward_runtime.tree import describe, signature

from .drawing import Drawing
from .markup import Child, Html, element
from .views import order_in_words, owner, variant_title
from .words import Words, ambient_in_words, counted, size_in_words, verdict_in_words

_SHOWN = 12  # of a long list, before the rest is folded away


def section(name: str, title: str, *children: Child) -> Html:
    return element("section", element("h2", title), children, id=name)


def facts(rows: Iterable[tuple[str, Child]]) -> Html:
    """A list of terms and what they are; rows without content are left out."""
    return element("dl", [(element("dt", term), element("dd", what)) for term, what in rows if what], class_="facts")


def table(header: Sequence[str], rows: Sequence[Sequence[Child]], numbers: Sequence[int] = (), total: Sequence[Child] = ()) -> Html:
    """``numbers``: the columns that are right-aligned."""

    def row(cells: Sequence[Child], tag: str = "td") -> Html:
        return element("tr", [element(tag, cell, class_="n" if i in numbers else None) for i, cell in enumerate(cells)])

    foot = element("tfoot", row(total)) if total else None
    return element("div", element("table", element("thead", row(header, "th")), element("tbody", map(row, rows)), foot), class_="wide")


def folded(items: Sequence[Child], what: str) -> Child:
    """The items, of many the first ones and the rest behind a click."""

    def listed(some: Sequence[Child]) -> list[Child]:
        return [x for i, item in enumerate(some) for x in ((", ", item) if i else (item,))]

    if len(items) <= _SHOWN + 3:
        return listed(items)
    rest = element("details", element("summary", f"and {len(items) - _SHOWN:,} more {what}"), listed(items[_SHOWN:]))
    return [*listed(items[:_SHOWN]), " ", rest]


def code(text: str) -> Html:
    return element("code", text)


# What it is


def package(archive: Archive, drawings: Mapping[str, Drawing]) -> Html:
    manifest, size = archive.manifest, archive.path.stat().st_size
    version = ".".join(map(str, manifest.format_version))
    kinds = ", ".join(f"{name} ({e.kind})" for name, e in manifest.entries.items())
    graphs = f"{len(drawings)} of {len(manifest.libraries)} are in the package as data" if len(drawings) < len(manifest.libraries) else ""
    weights = sum(math.prod(w.shape) for w in manifest.weights.values())
    signature = signature_beside(archive.path)
    stored = "" if manifest.has_weights else ", not in the package: load(path, weights={…})"
    return section(
        "package",
        "Package",
        _verdicts(archive),
        facts(
            [
                ("Offers", kinds),
                ("Built by", f"{manifest.producer}, {manifest.created or 'no date'}; format {version}"),
                ("Runs on", f"torch {manifest.torch}"),
                ("Size", element("span", size_in_words(size), title=f"{size:,} bytes")),
                ("Weights", f"{counted(len(manifest.weights), 'tensor')}, {weights:,} elements{stored}" if manifest.weights else "none"),
                ("Graphs", graphs),
                ("Features it asks for", ", ".join(manifest.required_features)),
                *((f"Note: {key}", text) for key, text in manifest.notes.items()),
                ("Signature", f"{signature.name} lies beside it, and was not looked at" if signature else None),
                ("Manifest", ["SHA-256 ", element("code", archive.manifest_digest, class_="digest")]),
            ]
        ),
        _targets(archive),
    )


def _judged(archive: Archive) -> Iterator[tuple[str, Target, Verdict]]:
    """Every verdict of the package: of what, and for which target."""
    targets = targets_of(archive.manifest)
    for name, entry in archive.manifest.entries.items():
        for number, variant in enumerate(entry.variants):
            for program in variant.orders:
                for target, verdict in zip(targets, (program.verdict, *program.verdicts), strict=False):
                    yield f"{name}, {variant_title(number, program)}", target, verdict
        for structure in entry.structures:
            for number, compiled in enumerate(structure.variants):
                for target, verdict in zip(targets, (compiled.verdict, *compiled.verdicts), strict=False):
                    yield f"{name}, structure {structure.fingerprint[:12]}, variant {number}", target, verdict


def _verdicts(archive: Archive) -> Html:
    judged = list(_judged(archive))
    missing = [(what, target, v) for what, target, v in judged if v.status != "verified"]
    if not judged:
        return element("p", "Nothing in it was compared with eager.", class_="verdict open")
    if missing:
        what, target, verdict = missing[0]
        open_ = f"{len(missing)} of {counted(len(judged), 'comparison')} with eager missing: {what} for {target.label}: {verdict.status}"
        return element("p", open_, class_="verdict open")
    _, _, worst = max(judged, key=lambda j: j[2].error)
    said = element("strong", "Verified against eager PyTorch")
    tail = f"; the worst tensor, {worst.worst}, is at {worst.error:.1%} of what is allowed" if worst.worst else ""
    return element("p", said, f": {counted(len(judged), 'comparison')}{tail}.", class_="verdict good")


def _targets(archive: Archive) -> Html:
    manifest, members = archive.manifest, archive.members()
    rows: list[list[Child]] = []
    for number, target in enumerate(targets_of(manifest)):
        size = sum(members[spec.every_build[number].member].size for spec in manifest.libraries.values())
        where = " ".join(filter(None, (target.device, target.machine, target.march, target.cuda_arch, target.cuda and f"CUDA {target.cuda}")))
        flags = " ".join(target.cpu_flags) or "none beyond that"
        rows.append([element("span", target.label, class_="whole"), element("span", where, class_="whole"), flags, _bytes(size)])
    return table(("Target", "Machine", "Processor flags it needs", "Native code"), rows, numbers=(3,))


def _bytes(size: int) -> Html:
    return element("span", size_in_words(size), title=f"{size:,} bytes")


# What it offers


def entries(archive: Archive) -> Html:
    return section("entries", "Entries", [_entry(name, entry, archive) for name, entry in archive.manifest.entries.items()])


def _entry(name: str, entry: EntrySpec, archive: Archive) -> Html:
    own = _of_the_program(entry)
    parameters, frozen = [s for s in own if s.parameter], [s.name for s in own if s.parameter and not s.requires_grad]
    elements = sum(math.prod(archive.manifest.weights[key].shape) for key in {s.weight for s in parameters})
    ties = len(own) - len({s.weight for s in own})
    state = f"{counted(len(parameters), 'parameter')} with {elements:,} elements, {counted(len(own) - len(parameters), 'buffer')}" if own else ""
    rows: list[tuple[str, Child]] = [
        ("State", f"{state}{f', {ties} tied to others' if ties else ''}" if state else None),
        ("Frozen", folded(list(map(code, frozen)), "parameters") if frozen else None),
        ("Gradients of", folded(list(map(code, entry.names)), "gradients") if entry.names else None),
        *_step(entry),
    ]
    parts = [_variant(number, v, entry, archive) for number, v in enumerate(entry.variants)]
    parts += [_structure(s, archive) for s in entry.structures]
    title = element("h3", name, " ", element("span", entry.kind, class_="kind"))
    return element("article", title, facts(rows), parts, class_="entry")


def _of_the_program(entry: EntrySpec) -> list[StateSpec]:
    """Without what a training step adds to them."""
    step = entry.step
    added = {"numbers", *(s.state for s in step.state), *(g.state for g in step.gradients)} if step else set()
    return [s for s in entry.state if s.name not in added]


def _step(entry: EntrySpec) -> Iterator[tuple[str, Child]]:
    step = entry.step
    if step is None:
        return
    made = "before its first step" if step.fresh else "after steps made before the export"
    yield "Optimizer", [code(step.optimizer), f", {made}; {counted(len(step.state), 'tensor')} of state"]
    for number, group in enumerate(step.groups):
        moved = [(n.key if n.position < 0 else f"{n.key}[{n.position}]", n.value) for n in step.numbers if n.group == number]
        fixed = {k: v for k, v in options_of(group).items() if k not in {n.partition("[")[0] for n, _ in moved}}
        numbers = ", ".join(f"{k} = {v:g}" for k, v in moved) or "nothing"
        still = f"fixed: {', '.join(f'{k} = {v}' for k, v in fixed.items())}"
        said = f"{counted(len(group.parameters), 'parameter')}; a schedule may move {numbers}"
        yield f"Group {number}", [said, element("p", still, class_="quiet") if fixed else None]
    clips = [f"{n.key} = {n.value:g}" for n in step.numbers if n.group == -1]
    yield "Clipping", ", ".join(clips)
    yield "Gradients", "can wait: accumulated over calls" if step.update else "every call is an update"
    yield "Not finite", "an update whose gradients have Inf or NaN is skipped" if step.finite else None


def _variant(number: int, v: VariantSpec, entry: EntrySpec, archive: Archive) -> Html:
    words = Words(v.inputs, v.symbols, v.guards)
    single = len(entry.variants) == 1 and not v.mode
    call = [code(f"{signature(v.in_tree, v.argument_names)} → {describe(v.out_tree)}")]
    rows: list[tuple[str, Child]] = [
        ("Call", call),
        ("Arguments", _tensors(v.inputs, words, entry.kind == "module")),
        ("Results", _tensors(v.outputs, words)),
        ("Sizes", [_line(element("b", label), f": {said}", f" ({where})" if where else "") for label, said, where in words.ranges()]),
        ("Only where", [_line(c) for c in (*words.conditions(), *_constants(v), *ambient_in_words(v.ambient))]),
        ("In the other mode", folded(list(map(code, v.set_apart)), "submodules") if v.set_apart else None),
        ("Gradients of", _gradients(v) if not entry.names else None),
        ("Never reached", folded([code(owner(u, v.inputs)) for u in v.unreached], "tensors") if v.unreached else None),
        ("Derivatives", ", ".join(order_in_words(i) for i in range(1, len(v.orders) + 1)) if len(v.orders) > 1 else None),
        ("Randomness", "draws random numbers" if v.random else None),
        ("Changes", _changes(v)),
        *_compared(v.verdict, v.verdicts, archive),
        *(row for again in v.orders[1:] for row in _compared(again.verdict, again.verdicts, archive, "Derivatives compared")),
    ]
    title = None if single else element("h4", variant_title(number, v).capitalize())
    return element("div", title, facts(rows), class_="variant")


def _line(*children: Child) -> Html:
    return element("p", children)


def _tensors(specs: Sequence[TensorSpec], words: Words, gradients: bool = False) -> Child:
    """``gradients``: whether to say which may get one."""
    rows = [_line(element("b", s.name), f": {words.tensor(s)}{', gets a gradient' if gradients and s.requires_grad else ''}") for s in specs]
    if len(rows) <= _SHOWN + 3:
        return rows
    return [*rows[:_SHOWN], element("details", element("summary", f"and {len(rows) - _SHOWN:,} more"), rows[_SHOWN:])]


def _constants(v: VariantSpec) -> Iterator[str]:
    """Arguments that are no tensors, which must be what they were."""
    positional, keywords = v.in_tree.children if len(v.in_tree.children) == 2 else (v.in_tree, v.in_tree)
    labels = [*v.argument_names, *(f"args[{i}]" for i in range(len(v.argument_names), len(positional.children)))]
    for label, child in [*zip(labels, positional.children, strict=False), *zip(map(str, keywords.keys), keywords.children, strict=False)]:
        yield from _fixed(child, label)


def _fixed(tree: Tree, where: str) -> Iterator[str]:
    if tree.kind == "constant":
        yield f"{where} is {tree.value!r}"
    keys = tree.keys or range(len(tree.children))
    for key, child in zip(keys, tree.children, strict=False):
        yield from _fixed(child, f"{where}[{key!r}]")


def _gradients(v: VariantSpec) -> Child:
    plan = v.backward or v.gradient
    names = [owner(g.of, v.inputs) for g in plan.gradients if g.source] if plan else []
    none = [owner(g.of, v.inputs) for g in plan.gradients if not g.source] if plan else []
    said = [folded(list(map(code, names)), "tensors") if names else None]
    return [*said, _line("None, as in eager: ", folded(list(map(code, none)), "tensors"))] if none else said if names else None


def _changes(v: VariantSpec) -> Child:
    plans = (v.forward, v.inference, v.gradient, v.step)
    names = list(dict.fromkeys(n for plan in plans if plan for n in plan.writes))
    return folded(list(map(code, names)), "tensors") if names else None


def _compared(first: Verdict, rest: Sequence[Verdict], archive: Archive, term: str = "Compared") -> Iterator[tuple[str, Child]]:
    targets = targets_of(archive.manifest)
    lines = []
    for target, verdict in zip(targets, (first, *rest), strict=False):
        good = verdict.status == "verified"
        lines.append(_line(f"{target.label}: " if rest else "", element("span", verdict_in_words(verdict), class_="good" if good else "open")))
    yield term, lines


def _structure(s: StructureSpec, archive: Archive) -> Html:
    counts = Counter(n.rpartition("::")[2] for n in s.nodes)
    nodes = [[code(n), f" × {k}" if k > 1 else ""] for n, k in counts.items()]
    rows: list[tuple[str, Child]] = [
        ("Recorded pass", f"{counted(len(s.nodes), 'autograd node')}, {counted(s.operations, 'operation')}"),
        ("Nodes", folded(nodes, "kinds")),
        ("Uncompiled", f"{s.seconds * 1e6:,.0f} µs when it was recorded" if s.seconds else None),
    ]
    variants = [_pass(number, v, archive) for number, v in enumerate(s.variants)]
    return element("div", element("h4", "Structure ", code(s.fingerprint[:12])), facts(rows), variants, class_="variant")


def _pass(number: int, v: PassSpec, archive: Archive) -> Html:
    words = Words(v.inputs, v.symbols, v.guards)
    rows: list[tuple[str, Child]] = [
        (f"Variant {number}", ", ".join(_steps(v)) or "nothing to run"),
        ("Tensors", _tensors(v.inputs, words)),
        ("Sizes", [_line(element("b", label), f": {said}", f" ({where})" if where else "") for label, said, where in words.ranges()]),
        ("Only where", [_line(c) for c in (*words.conditions(), *ambient_in_words(v.ambient))]),
        ("Numbers", ", ".join(f"{n:g}" for n in v.scalars)),
        *_compared(v.verdict, v.verdicts, archive),
    ]
    return facts(rows)


def _steps(v: PassSpec) -> Iterator[str]:
    for segment in (s for s in v.segments if s.library):
        yield f"{counted(len(segment.ops), 'operation')} in the graph {segment.library}"
    leaves = sum(not s.library and bool(s.operands) for s in v.segments)
    single = sum(not s.library and not s.operands for s in v.segments)
    if leaves:
        yield f"{counted(leaves, 'gradient')} handed to the leaves"
    if single:
        yield f"{counted(single, 'operation')} as recorded"


# Where the bytes are


def bytes_of(archive: Archive) -> list[tuple[str, str, int]]:
    """The kind, the name and the bytes of each part of the file; they add up to it."""
    manifest, members = archive.manifest, archive.members()
    left = {name: m.size for name, m in members.items()}
    parts = []
    for number, target in enumerate(targets_of(manifest)):
        count = sum(left.pop(spec.every_build[number].member) for spec in manifest.libraries.values())
        parts.append(("code", f"native code, {target.label}", count))
    parts.append(("weights", "weights", left.pop(WEIGHTS_MEMBER, 0)))
    parts.append(("examples", "examples, for verify", left.pop(EXAMPLES_MEMBER, 0)))
    parts.append(("graphs", "graphs as data", sum(left.pop(n) for n in list(left) if n.startswith(f"{GRAPH_FOLDER}/"))))
    parts.append(("rest", "other members", sum(left.values())))
    parts.append(("frame", "manifest, directory, padding", archive.path.stat().st_size - sum(p[2] for p in parts)))
    return [p for p in parts if p[2]]


def bytes_section(archive: Archive) -> Html:
    parts, whole = bytes_of(archive), archive.path.stat().st_size
    shades = Counter[str]()
    rows: list[Sequence[Child]] = []
    bars, x = [], 0.0
    for kind, name, count in parts:
        shade = f"{kind} shade{shades[kind] % 4}"
        shades[kind] += 1
        wide = 1000 * count / whole
        label = f"{name}: {count:,} bytes, {count / whole:.1%}"
        bars.append(element("rect", element("title", label), x=f"{x:.2f}", y=0, width=f"{max(wide, 1):.2f}", height=28, class_=shade))
        x += wide
        key = element("svg", element("rect", width=10, height=10, rx=2, class_=shade), class_="key", viewBox="0 0 10 10", aria_hidden="true")
        rows.append([[key, name], f"{count:,}", f"{count / whole:.1%}"])
    bar = element("svg", bars, class_="bar", viewBox="0 0 1000 28", preserveAspectRatio="none", role="img", aria_label="Bytes of the file by kind")
    total: list[Child] = ["the file", f"{whole:,}", "100%"]
    return section("bytes", "Where the bytes are", bar, table(("Part", "Bytes", "Share"), rows, (1, 2), total), _libraries(archive))


def _libraries(archive: Archive) -> Html | None:
    manifest, members = archive.manifest, archive.members()
    if not manifest.libraries:
        return None
    targets = targets_of(manifest)
    rows: list[Sequence[Child]] = []
    for name, spec in manifest.libraries.items():
        sizes = [_bytes(members[b.member].size) for b in spec.every_build]
        graph = _bytes(members[spec.graph].size) if spec.graph else "none"
        rows.append([code(name), *sizes, graph, f"{spec.nodes:,}", f"{len(spec.inputs)} → {len(spec.outputs)}", f"{len(spec.constants):,}"])
    header = ("Compiled graph", *(t.label for t in targets), "As data", "Operators", "In → out", "Weights read")
    return table(header, rows, range(1, len(header)))


# Where the kernels are


def kernels(archive: Archive, drawings: Mapping[str, Drawing]) -> Html:
    return section("kernels", "Where the kernels are", _operators(drawings), _called(archive))


def _role(library: str) -> str:
    """What a graph is for, as its name says: ``net.0.forward`` is a forward."""
    last = library.rpartition(".")[2]
    return last if last in ("forward", "backward", "inference", "gradient", "step", "accumulate", "update") else "recorded"


def _operators(drawings: Mapping[str, Drawing]) -> Html:
    if not drawings:
        return element("p", "The package holds no graphs as data, so its operators are not known without opening native code.", class_="quiet")
    roles = list(dict.fromkeys(map(_role, drawings)))
    counts: dict[str, Counter[str]] = {}
    for name, drawing in drawings.items():
        for node in drawing.nodes:
            if node.computes:
                counts.setdefault(node.operator, Counter())[_role(name)] += 1
    ordered = sorted(counts.items(), key=lambda c: (-c[1].total(), c[0]))
    most = max((c.total() for _, c in ordered), default=1)

    def row(operator: str, count: Counter[str]) -> Sequence[Child]:
        drawn = element("svg", element("rect", width=f"{100 * count.total() / most:.1f}", height=8, rx=1), class_="mini", viewBox="0 0 100 8")
        return [code(operator), *(f"{count[r]:,}" if count[r] else "·" for r in roles), f"{count.total():,}", drawn]

    header, numbers = ("Operator", *roles, "All", ""), range(1, len(roles) + 2)
    shown = table(header, [row(*c) for c in ordered[:_SHOWN]], numbers)
    if len(ordered) <= _SHOWN:
        return shown
    rest = table(header, [row(*c) for c in ordered[_SHOWN:]], numbers)
    return Html(shown + element("details", element("summary", f"{len(ordered) - _SHOWN} more operators"), rest))


def _called(archive: Archive) -> Html:
    manifest = archive.manifest
    called: dict[str, list[str]] = {}
    for name, spec in manifest.libraries.items():
        for operator in dict.fromkeys(o for build in spec.every_build for o in build.operators):
            called.setdefault(operator, []).append(name)
    builds = [b for spec in manifest.libraries.values() for b in spec.every_build]
    needed = sorted({n for b in builds for n in b.needed})
    glibc, glibcxx = (max((getattr(b, f) for b in builds), key=_numeric, default="") for f in ("glibc", "glibcxx"))
    through = [_line(code(o), f" in {', '.join(graphs)}") for o, graphs in called.items()]
    note = "Matrix products, convolutions and other kernels that the compiler does not write itself are calls into libtorch, and not listed."
    versions = ", ".join(f"{family} {version}" for family, version in (("GLIBC", glibc), ("GLIBCXX", glibcxx)) if version)
    return facts(
        [
            (
                "Called, not compiled",
                [through or "none, that is: none goes through the proxy executor.", _line(element("span", note, class_="quiet"))],
            ),
            ("Shared libraries", folded(list(map(code, needed)), "libraries") if needed else "none"),
            ("Symbol versions", versions),
        ]
    )


def _numeric(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split(".") if p)

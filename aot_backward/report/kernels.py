"""Describe kernels: operators by count, operators that are called instead of compiled, and the libraries that native
code links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from aot_backward_runtime.format.manifest import OperatorSpec
from aot_backward_runtime.package.archive import Archive

from .blocks import SHOWN, code, facts, folded, line, section, table
from .graph_model import Drawing
from .markup import Child, Html, element


def kernels(archive: Archive, drawings: Mapping[str, Drawing]) -> Html:
    return section("kernels", "Where the kernels are", _operators(drawings), kernel_calls(archive))


def _role(library: str) -> str:
    """Return the purpose of a graph from its name: ``net.0.forward`` is a forward."""
    last = library.rpartition(".")[2]
    return (
        last if last in ("forward", "backward", "inference", "gradient", "step", "accumulate", "update") else "recorded"
    )


def _operators(drawings: Mapping[str, Drawing]) -> Child:
    if not drawings:
        return element(
            "p",
            "The package holds no graphs as data, so its operators are not known without opening native code.",
            class_="quiet",
        )
    roles = list(dict.fromkeys(map(_role, drawings)))
    counts: dict[str, Counter[str]] = {}
    for name, drawing in drawings.items():
        for node in drawing.nodes:
            if node.computes:
                counts.setdefault(node.operator, Counter())[_role(name)] += 1
    ordered = sorted(counts.items(), key=lambda c: (-c[1].total(), c[0]))
    largest = max((c.total() for _, c in ordered), default=1)

    def row(operator: str, count: Counter[str]) -> Sequence[Child]:
        bar = element(
            "svg",
            element("rect", width=f"{100 * count.total() / largest:.1f}", height=8, rx=1),
            class_="mini",
            viewBox="0 0 100 8",
        )
        return [code(operator), *(f"{count[r]:,}" if count[r] else "·" for r in roles), f"{count.total():,}", bar]

    header, numbers = ("Operator", *roles, "All", ""), range(1, len(roles) + 2)
    main_table = table(header, [row(*c) for c in ordered[:SHOWN]], numbers)
    if len(ordered) <= SHOWN:
        return main_table
    rest_table = table(header, [row(*c) for c in ordered[SHOWN:]], numbers)
    return [main_table, element("details", element("summary", f"{len(ordered) - SHOWN} more operators"), rest_table)]


def kernel_calls(archive: Archive) -> Html:
    manifest = archive.manifest
    by_operator: dict[str, list[str]] = {}
    for name, spec in manifest.libraries.items():
        for operator in dict.fromkeys(o for build in spec.every_build for o in build.operators):
            by_operator.setdefault(operator, []).append(name)
    builds = [b for spec in manifest.libraries.values() for b in spec.every_build]
    libraries = sorted({n for b in builds for n in b.needed})
    glibc, glibcxx = (max((getattr(b, f) for b in builds), key=_numeric, default="") for f in ("glibc", "glibcxx"))
    lines = [
        line(code(o), f" in {', '.join(graphs)}{_registered(manifest.operators.get(o))}")
        for o, graphs in by_operator.items()
    ]
    note = "Matrix products, convolutions and other kernels that the compiler does not write itself are calls into libtorch, and not listed."
    versions = ", ".join(
        f"{family} {version}" for family, version in (("GLIBC", glibc), ("GLIBCXX", glibcxx)) if version
    )
    return facts(
        [
            (
                "Called, not compiled",
                [
                    lines or "none: no operator goes through the proxy executor.",
                    line(element("span", note, class_="quiet")),
                ],
            ),
            ("Shared libraries", folded(list(map(code, libraries)), "libraries") if libraries else "none"),
            ("Symbol versions", versions),
        ]
    )


def _registered(spec: OperatorSpec | None) -> str:
    if spec is None:
        return ""
    by = f", registered by {spec.module or spec.file or 'an unknown library'}"
    if spec.module in ("", "__main__"):
        return f"{by} when it was exported"
    return (
        f"{by}; load does not import it by itself: use load(path, imports=[{spec.module!r}]) or --import {spec.module}"
    )


def _numeric(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split(".") if p)

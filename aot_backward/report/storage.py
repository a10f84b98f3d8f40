"""Show how a package's bytes are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aot_backward_runtime.format.manifest import EXAMPLES_MEMBER, GRAPH_FOLDER, WEIGHTS_MEMBER
from aot_backward_runtime.package.archive import Archive
from aot_backward_runtime.package.targets import targets_of

from .blocks import bytes_shown, code, section, table
from .markup import Child, Html, element


def bytes_of(archive: Archive) -> list[tuple[str, str, int]]:
    """Return the kind, the name and the bytes of each part of the file; they add up to its size."""
    manifest, members = archive.manifest, archive.members()
    remaining = {name: m.size for name, m in members.items()}
    parts = []
    for number, target in enumerate(targets_of(manifest)):
        count = sum(remaining.pop(spec.every_build[number].member) for spec in manifest.libraries.values())
        parts.append(("code", f"native code, {target.label}", count))
    parts.append(("weights", "weights", remaining.pop(WEIGHTS_MEMBER, 0)))
    parts.append(("examples", "examples, for verify", remaining.pop(EXAMPLES_MEMBER, 0)))
    parts.append(
        ("graphs", "graphs as data", sum(remaining.pop(n) for n in list(remaining) if n.startswith(f"{GRAPH_FOLDER}/")))
    )
    parts.append(("rest", "other members", sum(remaining.values())))
    parts.append(("frame", "manifest, directory, padding", archive.path.stat().st_size - sum(p[2] for p in parts)))
    return [p for p in parts if p[2]]


def bytes_section(archive: Archive) -> Html:
    parts, file_size = bytes_of(archive), archive.path.stat().st_size
    shades = Counter[str]()
    rows: list[Sequence[Child]] = []
    bars, x = [], 0.0
    for kind, name, count in parts:
        shade = f"{kind} shade{shades[kind] % 4}"
        shades[kind] += 1
        wide = 1000 * count / file_size
        label = f"{name}: {count:,} bytes, {count / file_size:.1%}"
        bars.append(
            element(
                "rect", element("title", label), x=f"{x:.2f}", y=0, width=f"{max(wide, 1):.2f}", height=28, class_=shade
            )
        )
        x += wide
        key = element(
            "svg",
            element("rect", width=10, height=10, rx=2, class_=shade),
            class_="key",
            viewBox="0 0 10 10",
            aria_hidden="true",
        )
        rows.append([[key, name], f"{count:,}", f"{count / file_size:.1%}"])
    bar = element(
        "svg",
        bars,
        class_="bar",
        viewBox="0 0 1000 28",
        preserveAspectRatio="none",
        role="img",
        aria_label="Bytes of the file by kind",
    )
    total: list[Child] = ["the file", f"{file_size:,}", "100%"]
    return section(
        "bytes", "Where the bytes are", bar, table(("Part", "Bytes", "Share"), rows, (1, 2), total), libraries(archive)
    )


def libraries(archive: Archive) -> Html | None:
    manifest, members = archive.manifest, archive.members()
    if not manifest.libraries:
        return None
    targets = targets_of(manifest)
    rows: list[Sequence[Child]] = []
    for name, spec in manifest.libraries.items():
        sizes = [bytes_shown(members[b.member].size) for b in spec.every_build]
        graph = bytes_shown(members[spec.graph].size) if spec.graph else "none"
        rows.append(
            [
                code(name),
                *sizes,
                graph,
                f"{spec.nodes:,}",
                f"{len(spec.inputs)} → {len(spec.outputs)}",
                f"{len(spec.constants):,}",
            ]
        )
    header = ("Compiled graph", *(t.label for t in targets), "As data", "Operators", "In → out", "Weights read")
    return table(header, rows, range(1, len(header)))

"""Build the page: one file, which may load nothing, run no script but its own, and send nothing anywhere."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from aot_backward_runtime.package.archive import Archive

from .blocks import section
from .chart import chart
from .entries import entries
from .graph_model import Drawing, TensorInfo, drawings
from .graph_views import Column, View, views, with_labels
from .kernels import kernels
from .markup import Html, clean, data, element, raw
from .memory import shares
from .overview import package
from .storage import bytes_section

_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint8": "u8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
_CHARTS_SHOWN = 4  # charts that are shown before the rest is folded away


def page(archive: Archive) -> str:
    graph_drawings = drawings(archive)
    all_views = views(archive.manifest, graph_drawings)
    style, script = (Path(__file__).with_name(f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
    head = [
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{archive.path.name}, a package of aot-backward"),
        raw("style", style),
    ]
    sections = [
        ("package", "Package"),
        ("entries", "Entries"),
        ("bytes", "Bytes"),
        ("kernels", "Kernels"),
        ("memory", "Memory"),
        ("graph", "Graph"),
    ]
    body = [
        element(
            "header",
            element("h1", archive.path.name),
            element("nav", [element("a", t, href=f"#{n}") for n, t in sections]),
        ),
        element(
            "main",
            package(archive),
            entries(archive),
            bytes_section(archive),
            kernels(archive, graph_drawings),
            _memory(all_views),
            _graph(all_views),
        ),
        _data(all_views, graph_drawings),
        raw("script", script),
    ]
    text = f"<!DOCTYPE html>\n{element('html', element('head', head), element('body', body), lang='en')}\n"
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _memory(all_views: list[View]) -> Html:
    if not all_views:
        return section(
            "memory", "Memory", element("p", "Known only if the package holds its graphs as data.", class_="quiet")
        )
    summary = (
        "Bytes of the graph's values in the order of its nodes, at the example's sizes. A value counts from the node that computes it to its last "
        "use; inputs and results count to the end. Views and weights do not count. This is the graph before fusion: the compiler does not store "
        "fused values, so this is an upper bound as long as it keeps the order. Memory that operators use internally does not count."
    )
    charts = [chart(view, n) for n, view in enumerate(all_views)]
    rest = charts[_CHARTS_SHOWN:]
    more = element("details", element("summary", f"{len(rest)} more"), rest) if rest else None
    return section("memory", "Memory", element("p", summary, class_="quiet"), charts[:_CHARTS_SHOWN], more)


def _graph(all_views: list[View]) -> Html:
    if not all_views:
        summary = "The package holds no graph as data: it was exported with --no-portable, by an older version, or a note above says why."
        return section("graph", "Graph", element("p", summary, class_="quiet"))
    options = [element("option", f"{v.title}: {v.in_words}", value=n) for n, v in enumerate(all_views)]
    bar = element(
        "div",
        element("label", "Show ", element("select", options, id="view")),
        element(
            "label",
            element(
                "input",
                type="search",
                id="query",
                placeholder="Search name, operator or module",
                aria_label="Search nodes",
            ),
        ),
        element("label", element("input", type="checkbox", id="weights"), " weights"),
        element("label", element("input", type="checkbox", id="sizes"), " sizes"),
        element("label", element("input", type="checkbox", id="only"), " only highlighted"),
        element("button", "Clear", type="button", id="clear"),
        element("span", id="found", role="status"),
        class_="bar-of-tools",
    )
    source = element(
        "div",
        element(
            "div",
            element("button", "Lines", type="button", id="by-line", aria_pressed="true"),
            element("button", "Submodules", type="button", id="by-module", aria_pressed="false"),
            class_="tabs",
        ),
        element("ul", id="places", aria_label="Source"),
        class_="source",
    )

    def column(n: int) -> Html:
        rows = element("div", element("div", class_="space"), class_="list", role="listbox", tabindex=0, id=f"list{n}")
        return element(
            "div",
            element("h3", id=f"title{n}"),
            element("div", rows, element("canvas", class_="ruler"), class_="holder"),
            class_="column",
        )

    board = element(
        "div",
        source,
        column(0),
        element("svg", class_="wires", id="wires", aria_hidden="true"),
        column(1),
        element("div", id="detail", class_="detail", aria_live="polite"),
        class_="board",
        id="board",
    )
    hint = "Choose a line or a submodule to see its nodes, forward and backward; choose a node to see its inputs, its users and its line."
    fallback = element("noscript", element("p", "The graph is drawn by a script, which this browser does not run."))
    return section("graph", "Graph", element("p", hint, class_="quiet", id="hint"), fallback, bar, board)


def _data(all_views: list[View], graph_drawings: dict[str, Drawing]) -> list[Html]:
    """Return the data for the script. Repeated strings are in one list, source lines in another, each graph in a
    separate element."""
    strings: dict[str, int] = {}
    lines: dict[tuple[Any, ...], int] = {}
    columns = {c.drawing.library: c for v in all_views for c in v.columns}
    numbers = {library: n for n, library in enumerate(columns)}
    graphs = [
        data(f"graph-{numbers[library]}", _graph_data(column, strings, lines)) for library, column in columns.items()
    ]
    described = {
        "strings": list(strings),
        "lines": list(lines),
        "views": [
            {
                "title": v.title,
                "columns": [
                    {
                        "role": c.role,
                        "graph": numbers[c.drawing.library],
                        "library": c.drawing.library,
                        "given": {n: clean(label) for n, label in c.given.items()},
                        "gives": {n: list(map(clean, labels)) for n, labels in c.gives.items()},
                    }
                    for c in v.columns
                ],
                "links": v.links,
            }
            for v in all_views
        ],
    }
    return [*graphs, data("views", described)]


def _short(size: str) -> str:
    """Return ``4·s0`` for ``(4 * s0)``; a sum keeps its parentheses."""
    product = size.replace(" * ", "*").replace("*", "·")
    return (
        product.removeprefix("(").removesuffix(")")
        if product.count("(") == 1 and not any(c in product for c in "+-/%,")
        else product
    )


def _graph_data(column: Column, strings: dict[str, int], lines: dict[tuple[Any, ...], int]) -> dict[str, Any]:
    drawing, words = column.drawing, dict[tuple[Any, ...], str]()

    def number(text: str) -> int:
        return strings.setdefault(clean(text), len(strings))

    def shape(tensor: TensorInfo | None) -> str:
        if tensor is None:
            return ""
        key = (tensor.dtype, tensor.shape)
        if key not in words:
            sizes = "×".join(_short(with_labels(str(s), column.labels)) for s in tensor.shape)
            words[key] = f"{_DTYPES.get(tensor.dtype, tensor.dtype)} {sizes or 'scalar'}"
        return words[key]

    def strides(tensor: TensorInfo) -> str:
        return f"({', '.join(with_labels(str(s), column.labels) for s in tensor.stride)})"

    places = [
        lines.setdefault((clean(x.file), x.number, clean(x.function), clean(x.text), clean(x.module)), len(lines))
        for x in drawing.lines
    ]
    return {
        "operators": [number(n.operator) for n in drawing.nodes],
        "names": [clean(n.name) for n in drawing.nodes],
        "looks": [number("; ".join(filter(None, map(shape, n.tensors)))) for n in drawing.nodes],
        "strides": [
            number(
                "; ".join(
                    f"({', '.join(with_labels(str(s), column.labels) for s in k.stride)})" for k in n.tensors if k
                )
            )
            for n in drawing.nodes
        ],
        "bytes": [sum(k.bytes for k in n.tensors if k) for n in drawing.nodes],
        "inputs": [n.inputs for n in drawing.nodes],
        "calls": [clean(n.call) for n in drawing.nodes],
        "places": [places[n.line] if n.line >= 0 else -1 for n in drawing.nodes],
        "views": [int(shares(n) or n.operator == "operator:getitem") for n in drawing.nodes],
        "live": column.use.live,
    }

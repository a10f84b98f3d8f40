"""Draw memory over a forward and a backward in SVG."""

from __future__ import annotations

import math
from collections.abc import Callable

from .graph_views import Column, View
from .markup import Html, element
from .wording import size_in_words

# The drawing and its margins, in units of the SVG
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 250, 72, 16, 30, 34


def chart(view: View, number: int) -> Html:
    """Draw live bytes at each node of ``view``'s graphs, one after another. ``number``: the view's; the script finds
    the view by it."""
    lengths = [len(c.use.live) for c in view.columns]
    top = max(max(c.use.live) for c in view.columns) or 1
    step = _nice(top / 4)
    ceiling = step * math.ceil(top * 1.08 / step)
    across = (_WIDTH - _LEFT - _RIGHT) / sum(lengths)

    def y(count: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - count / ceiling)

    parts = []
    for tick in range(round(ceiling / step) + 1):
        at = f"{y(tick * step):.1f}"
        parts.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(
            element("text", size_in_words(int(tick * step)), x=_LEFT - 8, y=at, dy="0.32em", class_="tick end")
        )
    start = 0
    for i, column in enumerate(view.columns):
        left, right = _LEFT + start * across, _LEFT + (start + lengths[i]) * across
        kind = "second" if column.role == "backward" else "first"
        line = _steps(column.use.live, left, across, y)
        parts.append(element("path", d=f"{line} V{y(0):.1f} H{left:.1f} Z", class_=f"area {kind}"))
        parts.append(element("path", d=line, class_=f"live {kind}"))
        if i:
            parts.append(element("line", x1=f"{left:.1f}", x2=f"{left:.1f}", y1=_TOP - 12, y2=y(0), class_="divide"))
        name = f"{column.role}, {lengths[i]:,} nodes"
        parts.append(element("text", name, x=f"{(left + right) / 2:.1f}", y=_HEIGHT - 10, class_="tick middle"))
        if i and view.saved:
            at = f"{y(view.saved):.1f}"
            parts.append(element("line", x1=f"{left:.1f}", x2=f"{right:.1f}", y1=at, y2=at, class_="baseline"))
            label = f"saved by the forward: {size_in_words(view.saved)}"
            parts.append(element("text", label, x=f"{right - 6:.1f}", y=at, dy="1.25em", class_="note end"))
        start += lengths[i]
    start = sum(lengths[:-1])
    parts += _peak(view.columns[-1], _LEFT + start * across, across, y)
    alt = f"Live bytes over {view.in_words}: at most {size_in_words(max(view.columns[-1].use.live))} in the {view.columns[-1].role}"
    drawing = element(
        "svg",
        element("g", parts),
        element("g", class_="probe"),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=alt,
    )
    box = element(
        "div", drawing, class_="chart", data_view=number, data_left=_LEFT, data_right=_RIGHT, data_width=_WIDTH
    )
    return element("figure", element("figcaption", element("strong", view.title), ": ", _caption(view)), box)


def _caption(view: View) -> list[Html | str]:
    column = view.columns[-1]
    peak = column.use.peak
    node = column.drawing.nodes[peak]
    sizes = ", ".join(f"{column.labels.get(k, k)} = {v}" for k, v in column.drawing.sizes.items())
    out: list[Html | str] = [
        f"peak of the {column.role} {size_in_words(column.use.live[peak])} at node {peak}, ",
        element("code", node.name),
        f" ({node.short})",
    ]
    if len(view.columns) > 1:
        first = view.columns[0]
        out.append(f"; of the {first.role} {size_in_words(max(first.use.live))} at ")
        out.append(element("code", first.drawing.nodes[first.use.peak].name))
    return [*out, f". At {sizes}." if sizes else "."]


def _peak(column: Column, left: float, across: float, y: Callable[[float], float]) -> list[Html]:
    peak = column.use.peak
    x, top = left + (peak + 0.5) * across, y(column.use.live[peak])
    side = "end" if x > 0.72 * _WIDTH else "start"
    label = f"peak {size_in_words(column.use.live[peak])}: {column.drawing.nodes[peak].name}"
    return [
        element("circle", cx=f"{x:.1f}", cy=f"{top:.1f}", r=3.5, class_="peak"),
        element(
            "text", label, x=f"{x + (-8 if side == 'end' else 8):.1f}", y=f"{top - 9:.1f}", class_=f"note strong {side}"
        ),
    ]


def _steps(live: tuple[int, ...], left: float, across: float, y: Callable[[float], float]) -> str:
    """Return a line of steps. If there are more steps than pixels, use the largest in each pixel."""
    group = max(1, math.floor(1 / across))
    words = [f"M{left:.1f} {y(live[0]):.1f}"]
    for i in range(0, len(live), group):
        words.append(f"V{y(max(live[i : i + group])):.1f}H{left + min(i + group, len(live)) * across:.1f}")
    return "".join(words)


def _nice(value: float) -> float:
    """Return the first of 1, 2, 5, 10, 20, … that is at least ``value``."""
    power = 10 ** math.floor(math.log10(max(value, 1)))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= value)

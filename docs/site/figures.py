"""Draw the plots of the site from the JSON files under docs/, each for a light and a dark page."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tests.tools.benchmarks.summary import measurements, newest

THEMES = {
    "light": {"ink": "#3b3f4a", "grid": "#d9dce3"},
    "dark": {"ink": "#c9ccd6", "grid": "#41454f"},
}
# The same colour for a way on every plot; legible on both pages
_MODULE, _GRAD, _EAGER, _TORCH, _OTHER = "#3f8fe0", "#5a5fd8", "#9aa0ad", "#e08a2e", "#3aa57a"
_STEP = "#c2569b"
_VERDICTS = {
    "pass": "#3aa57a",
    "right": "#3aa57a",
    "refused": "#e0b23e",
    "no gradient": "#9aa0ad",
    "wrong": "#d64545",
    "crashed": "#8c2f6b",
}


@dataclass(frozen=True)
class Plot:
    text: str
    rows: float  # inches high
    draw: Callable[[Figure, Path], None]


def draw(docs: Path) -> dict[str, str]:
    """Return the SVG files by "name-theme"."""
    return {f"{name}-{theme}": _svg(plot, docs, theme) for name, plot in FIGURES.items() for theme in THEMES}


def _svg(plot: Plot, docs: Path, theme: str) -> str:
    ink, grid = THEMES[theme]["ink"], THEMES[theme]["grid"]
    style = {
        "svg.hashsalt": "aot-backward",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": grid,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "legend.frameon": False,
        "savefig.transparent": True,
    }
    with plt.rc_context(style):
        figure = plt.figure(figsize=(7.6, plot.rows), layout="constrained")
        plot.draw(figure, docs)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    return out.getvalue()


def seconds(row: dict[str, Any], way: str) -> float:
    """Return the median of a way's times; a row of `replay` has nothing else."""
    found = row["times"][way]
    return float(found["median_s"] if isinstance(found, dict) else found)


def _plain(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))


def _start(figure: Figure, docs: Path) -> None:
    _, subject = newest(docs, "cold")
    ways = {"eager": _EAGER, "module": _MODULE, "grad": _GRAD, "aoti": _OTHER, "compile": _TORCH}
    labels = {
        "eager": "eager",
        "module": "module entry",
        "grad": "grad entry",
        "aoti": "AOTInductor, of a traced gradient",
        "compile": "torch.compile, caches warm",
    }
    rows = [r for r in subject["data"] if r["threads"] == 1]
    every = figure.subplots(1, len(rows), sharey=True, sharex=True)
    for axes, row in zip(every, rows, strict=True):
        values = [seconds(row, way) for way in ways]
        bars = axes.barh(range(len(ways)), values, color=list(ways.values()), height=0.6)
        axes.bar_label(bars, [f"{v:.1f}" for v in values], padding=3, color=plt.rcParams["text.color"])
        axes.axvline(seconds(row, "import"), color=plt.rcParams["text.color"], linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(ways)), [labels[way] for way in ways])
        axes.set_ylim(len(ways) - 0.5, -0.5)
        axes.set_title(f"{row['model']}, a package of {row['package_bytes'] / 1e6:.1f} MB")
        axes.set_xlim(right=8)
        axes.grid(False, axis="y")
    figure.supxlabel("seconds; dotted: import torch alone", fontsize="medium")


def _overhead(figure: Figure, docs: Path) -> None:
    _, subject = newest(docs, "overhead")
    rows = [r for r in subject["data"] if r["threads"] == 1]
    axes = figure.subplots()
    for kind, colour in {"returned": _TORCH, "passed": _MODULE, "bound": _OTHER}.items():
        chosen = [r for r in rows if r["kind"] == kind]
        axes.plot(
            [r["number"] for r in chosen],
            [1e6 * r["over_s"] for r in chosen],
            marker="o",
            markersize=4,
            color=colour,
            label=f"tensors {kind}",
        )
    # A bound tensor may cost nothing
    asked = sorted({(r["number"], 1e6 * r["asked_s"]) for r in rows if r["kind"] != "bound"})
    axes.plot(
        *zip(*asked, strict=True), color=_EAGER, linestyle="--", linewidth=1, label="allowed: 5 µs + 0.3 µs a tensor"
    )
    axes.set(xscale="log", yscale="log", xlabel="number of tensors", ylabel="µs over the raw runner")
    axes.set_xticks([x for x, _ in asked])
    axes.minorticks_off()
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.legend()


def _replay(figure: Figure, docs: Path) -> None:
    _, subject = newest(docs, "replay")
    titles = {"hit": "a pass seen before", "first": "the first pass of its structure"}
    ways = {"eager": ("eager", _EAGER), "torch": ("compiled autograd, empty body", _TORCH), "ours": ("replay", _MODULE)}
    every = figure.subplots(1, 2, sharey=True)
    for axes, (what, title) in zip(every, titles.items(), strict=True):
        rows = [r for r in subject["data"] if r["what"] == what]
        for way, (label, colour) in ways.items():
            points = [(r["number"], 1e6 * r["times"][way]) for r in rows if r["times"].get(way) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel="nodes of the pass", title=title)
        _plain(axes.xaxis)
        _plain(axes.yaxis)
    every[0].set_ylabel("µs a backward pass")
    _legend(figure, every[0])


def _doors(figure: Figure, docs: Path) -> None:
    _, subject = newest(docs, "doors")
    colours = {"module": _MODULE, "grad": _GRAD, "step": _STEP, "replay": _OTHER}
    rows = [r for r in subject["data"] if r["threads"] == 1]
    sizes = sorted({r["rows"] for r in rows})
    every = figure.subplots(1, len(sizes), sharey=True, sharex=True)
    for axes, size in zip(every, sizes, strict=True):
        chosen = sorted((r for r in rows if r["rows"] == size), key=lambda r: r["model"])
        for line, row in enumerate(chosen):
            best = {"step": min((seconds(row, p) for p in ("foreach", "fused") if p in row["times"]), default=0.0)}
            for door, colour in colours.items():
                if f"{door} open" in row["times"]:
                    faster = best.get(door, seconds(row, "eager")) / seconds(row, f"{door} open")
                    axes.scatter(faster, line, s=14, color=colour, label=door if not line else None, zorder=2)
        axes.axvline(1, color=_EAGER, linewidth=1.2, linestyle="--")
        axes.set_yticks(range(len(chosen)), [r["model"] for r in chosen])
        axes.set_ylim(len(chosen) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xticks([0.5, 1, 2, 5, 10, 20])
        axes.minorticks_off()
        _plain(axes.xaxis)
        axes.set_title(f"{size} row{'s' * (size != 1)}")
    every[len(sizes) // 2].set_xlabel("times as fast as eager, the batch left open")
    _legend(figure, every[0])


def _endurance(figure: Figure, docs: Path) -> None:
    run = [d for _, d in measurements(docs) if "parts" in d][-1]
    axes = figure.subplots()
    names = {
        "module": "module",
        "grad": "grad",
        "step": "step",
        "replay": "replay",
        "rejected": "refused calls",
        "loads": "loads",
    }
    names |= {"bindings": "weights bound again", "structures": "new structures"}
    for colour, (part, found) in zip(plt.get_cmap("tab10").colors, run["parts"].items(), strict=False):
        samples = found["samples"]
        warm = samples[len(samples) // 5 - 1]["private"]
        share = [100 * (i + 1) / len(samples) for i in range(len(samples))]
        label = f"{names.get(part, part)}, {found['asked']:,} times"
        axes.plot(share, [(s["private"] - warm) / 2**20 for s in samples], color=colour, linewidth=1.4, label=label)
    axes.axhline(4, color=_EAGER, linestyle="--", linewidth=1, label="allowed")
    axes.set(xlabel="% of the repetitions", ylabel="MiB over the first fifth's end", ylim=(-2, 5))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")


def _stacked(axes: Axes, names: list[str], counts: list[dict[str, int]]) -> None:
    left = [0.0] * len(names)
    for verdict, colour in _VERDICTS.items():
        share = [100 * c.get(verdict, 0) / sum(c.values()) for c in counts]
        if any(share):
            axes.barh(range(len(names)), share, left=left, color=colour, label=verdict, height=0.66)
            left = [a + b for a, b in zip(left, share, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")


WAYS = {"coverage": "packages", "coverage-record": "recorded passes", "coverage-onnx": "ONNX graphs"}


def _coverage(figure: Figure, docs: Path) -> None:
    every = figure.subplots(1, len(WAYS), sharey=True)
    for axes, (file, title) in zip(every, WAYS.items(), strict=True):
        databases = json.loads((docs / "benchmarks" / f"{file}.json").read_text())["databases"]
        counts = [{verdict: d.get(verdict, 0) for verdict in _VERDICTS} for d in databases.values()]
        _stacked(axes, [f"{name} ({sum(c.values())})" for name, c in zip(databases, counts, strict=True)], counts)
        axes.set_title(title)
        axes.set_xlabel("% of the operators")
    _legend(figure, every[-1])


def _models(figure: Figure, docs: Path) -> None:
    rows = json.loads((docs / "models.json").read_text())
    ways = list(dict.fromkeys(r["way"] for r in rows))
    counts = [
        {verdict: sum(r["way"] == way and r["verdict"] == verdict for r in rows) for verdict in _VERDICTS}
        for way in ways
    ]
    axes = figure.subplots()
    _stacked(axes, ways, counts)
    axes.set_xlabel(f"% of {sum(counts[0].values())}: each model with static and with dynamic sizes")
    _legend(figure, axes)


FIGURES = {
    "doors": Plot("How many times as fast as eager each kind of entry and replay is, by model and batch", 7.6, _doors),
    "start": Plot("Seconds from the start of a process to its first gradient", 2.2, _start),
    "overhead": Plot(
        "Microseconds that a call of a grad entry costs over the raw runner, by the number of tensors", 3.2, _overhead
    ),
    "replay": Plot(
        "Microseconds of one backward pass by its number of nodes: eager, compiled autograd, replay", 3.2, _replay
    ),
    "endurance": Plot("Private memory of a process over a million calls of each kind", 3.4, _endurance),
    "coverage": Plot("Share of PyTorch's operator databases that is served, by way", 2.3, _coverage),
    "models": Plot("Share of the models that each way serves", 1.7, _models),
}

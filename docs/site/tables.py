"""The tables of the site that are made from the JSON files under docs/."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from figures import WAYS, median, newest

Link = Callable[[str], str]  # from a path under docs/ to one from the page
_CALLER = re.compile(r" \(cases\.py:\d+: .*?torch\.Tensor\)\)\)")  # the line of the tool that makes the call: the same for every operator


def make(name: str, docs: Path, link: Link) -> str:
    return TABLES[name](docs, link)


def _speed(docs: Path, link: Link) -> str:
    def cell(times: float) -> str:
        return f"**{times:.1f} ×**" if times >= 1.05 else f"{times:.2f} ×"

    def row(what: str, subject: str, here: str, peers: list[str], chosen: Callable[[dict[str, Any]], bool], time: Callable[..., float] = median) -> str:
        path, found = newest(docs, subject)
        rows = [r for r in found["data"] if chosen(r)]
        gains = [geometric_mean(time(r, peer) / time(r, here) for r in rows) if peer else None for peer in peers]
        cells = [cell(gain) if gain else "–" for gain in gains]
        page = link(path.with_suffix(".md").relative_to(docs).as_posix())
        return f"| {what} | {cells[0]} | {cells[1]} | [{path.name[:10]}]({page}){{ .date }} |"

    def single(r: dict[str, Any]) -> bool:
        return r["threads"] == 1

    return "\n".join(
        [
            "| one thread of a CPU | faster than eager | than `torch.compile` | measured |",
            "|---|---:|---:|---|",
            row("loss and gradients by a `grad` entry", "steps", "grad", ["eager", "compile"], single),
            row("forward and backward by a `module` entry, through autograd", "steps", "module", ["eager", "compile"], single),
            row("a whole training step with AdamW (eager: fused)", "onnx_step", "step", ["fused", ""], single),
            row("a recorded backward pass, replayed", "replay", "ours", ["eager", "torch"], lambda r: r["what"] == "hit", lambda r, way: r["times"][way]),
            row("a new process to its first gradient", "cold", "module", ["eager", "compile"], single),
        ]
    )


def _operators(docs: Path, link: Link) -> str:
    """Raw HTML: reasons hold what Markdown would take for its own."""
    ways = [{(o["database"], o["operator"]): o for o in json.loads((docs / f"{way}.json").read_text())["operators"]} for way in WAYS]
    head = "".join(f"<th>{title}</th>" for title in ("operator", "database", *WAYS.values(), "why not"))
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for key in sorted(set().union(*ways)):
        found = [way[key] if key in way else None for way in ways]
        verdicts = [operator["verdict"] if operator else "" for operator in found]
        whys = list(dict.fromkeys(_CALLER.sub("", c["reason"]) for operator in found if operator for c in operator["cases"] if c["reason"]))
        cells = [f"<code>{html.escape(key[1])}</code>", html.escape(key[0]), *verdicts]
        details = "".join(f"<p>{html.escape(why)}</p>" for why in whys)
        why = f"<details><summary>{html.escape(_CALLER.sub('', whys[0])[:60])} …</summary>{details}</details>" if whys else ""
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, why)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


TABLES = {"speed": _speed, "operators": _operators}

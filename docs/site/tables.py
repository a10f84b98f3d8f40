"""The tables of the site that are made from the JSON files under docs/."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

from figures import WAYS, newest, seconds

Link = Callable[[str], str]  # from a path under docs/ to one from the page
_CALLER = re.compile(r" \(\S*cases\.py:\d+: .*?torch\.Tensor\)\)\)")  # the line of the tool that makes the call: the same for every operator


def make(name: str, docs: Path, link: Link) -> str:
    return TABLES[name](docs, link)


def _speed(docs: Path, link: Link) -> str:
    lines = ["| one thread of a CPU | faster than eager | faster than `torch.compile` | measured |", "|---|---:|---:|---|"]
    for what, subject, here, eager, compiled in (
        ("loss and gradients by a `grad` entry", "steps", "grad", "eager", "compile"),
        ("forward and backward by a `module` entry, through autograd", "steps", "module", "eager", "compile"),
        ("a whole training step with AdamW (eager: fused)", "onnx_step", "step", "fused", ""),
        ("a recorded backward pass, replayed (beside compiled autograd)", "replay", "ours", "eager", "torch"),
        ("a new process to its first gradient", "cold", "module", "eager", "compile"),
    ):
        path, found = newest(docs, subject)
        rows = [r for r in found["data"] if r.get("threads", 1) == 1 and r.get("what", "hit") == "hit"]
        gains = [_gain([seconds(r, peer) / seconds(r, here) for r in rows]) if peer else "–" for peer in (eager, compiled)]
        page = link(path.with_suffix(".md").relative_to(docs).as_posix())
        lines.append(f"| {what} | {' | '.join(gains)} | [{path.name[:10]}]({page}){{ .date }} |")
    return "\n".join(lines)


def _gain(times: list[float]) -> str:
    gain = geometric_mean(times)
    shown = f"{gain:.1f} ×" if gain >= 2 else f"{gain:.2f} ×"
    return f"**{shown}**" if gain >= 1.1 else shown


def _operators(docs: Path, link: Link) -> str:
    """Raw HTML: reasons hold what Markdown would take for its own."""
    ways = [{(o["database"], o["operator"]): o for o in json.loads((docs / f"{way}.json").read_text())["operators"]} for way in WAYS]
    head = "".join(f"<th>{title}</th>" for title in ("operator", "database", *WAYS.values(), "why not"))
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for key in sorted(set().union(*ways)):
        found = [way.get(key) for way in ways]
        verdicts = [operator["verdict"] if operator else "" for operator in found]
        whys = list(dict.fromkeys(_CALLER.sub("", c["reason"]) for operator in found if operator for c in operator["cases"] if c["reason"]))
        cells = [f"<code>{html.escape(key[1])}</code>", html.escape(key[0]), *verdicts]
        details = "".join(f"<p>{html.escape(why)}</p>" for why in whys)
        why = f"<details><summary>{html.escape(_CALLER.sub('', whys[0])[:44])} …</summary>{details}</details>" if whys else ""
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, why)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


TABLES = {"speed": _speed, "operators": _operators}

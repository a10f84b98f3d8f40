"""Make the tables of the site from the JSON files under docs/, the command line's help and the C header."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import click
from figures import WAYS

from tests.tools.benchmarks import summary

Link = Callable[[str], str]  # from a path under docs/ to one from the page
# The line of the tool that calls the operator, the same for all
_CALLER = re.compile(r" \(\S*cases\.py:\d+: .*?torch\.Tensor\)\)\)")


def make(name: str, docs: Path, link: Link) -> str:
    return TABLES[name](docs, link)


def _speed(docs: Path, link: Link) -> str:
    labels = {
        "module": "forward and backward by a `module`, through autograd",
        "grad": "loss and gradients by a `grad`",
        "step": "a whole training step with AdamW (eager: the faster of foreach and fused)",
        "replay": "a recorded backward pass, replayed",
    }
    path, found = summary.newest(docs, "doors")
    sizes = [r["parameters"] for r in found["data"]]
    page = f"[{path.name[:10]}]({link(path.with_suffix('.md').relative_to(docs).as_posix())}){{ .date }}"
    lines = [f"| {min(sizes):,} to {max(sizes):,} parameters, measured {page} | as fast as eager |", "|---|---:|"]
    return "\n".join([*lines, *(f"| {labels[kind]} | {mean} × |" for kind, mean in summary.means(docs).items())])


def _operators(docs: Path, link: Link) -> str:
    """Return raw HTML: the reasons contain characters that are Markdown."""
    ways = [
        {
            (o["database"], o["operator"]): o
            for o in json.loads((docs / "benchmarks" / f"{way}.json").read_text())["operators"]
        }
        for way in WAYS
    ]
    head = "".join(f"<th>{title}</th>" for title in ("operator", "database", *WAYS.values(), "why not"))
    lines = [f"<table><thead><tr>{head}</tr></thead><tbody>"]
    for key in sorted(set().union(*ways)):
        found = [way.get(key) for way in ways]
        verdicts = [operator["verdict"] if operator else "" for operator in found]
        whys = list(
            dict.fromkeys(
                _CALLER.sub("", c["reason"]) for operator in found if operator for c in operator["cases"] if c["reason"]
            )
        )
        cells = [f"<code>{html.escape(key[1])}</code>", html.escape(key[0]), *verdicts]
        details = "".join(f"<p>{html.escape(why)}</p>" for why in whys)
        why = (
            f"<details><summary>{html.escape(_CALLER.sub('', whys[0])[:44])} …</summary>{details}</details>"
            if whys
            else ""
        )
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in (*cells, why)) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _commands(docs: Path, link: Link) -> str:
    from aot_backward.cli import main

    context = click.Context(main, info_name="aot-backward")
    parts = [f"```text\n{main.get_help(context)}\n```"]
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        with click.Context(command, info_name=name, parent=context) as of_command:
            parts.append(f"## {name}\n\n```text\n{command.get_help(of_command)}\n```")
    return "\n\n".join(parts)


def _header(docs: Path, link: Link) -> str:
    return f"```c\n{(docs.parent / 'runtime/native/include/aot_backward.h').read_text().rstrip()}\n```"


TABLES = {"speed": _speed, "operators": _operators, "commands": _commands, "header": _header}

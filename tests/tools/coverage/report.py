"""Write the verdicts, by operator and by reason, as JSON and as a page.

docs/benchmarks/coverage*.md must equal :func:`page` of the JSON files: write them again when you change a text here.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .processes import Record

ORDER = ("wrong", "crashed", "refused", "pass", "no gradient")
"""The worst first. An operator gets the verdict of its worst case."""
MISCOMPILED = re.compile(
    r" is wrong: off by .* nothing was written| in the artifact and .* in eager$| has NaN or Inf where eager has none"
)
"""Refusals by the export's comparison with eager: it found wrong results and wrote no package."""

_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[-+]?\d+)?(?![\w.])")


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the last verdict of each case. A verdict about the whole operator (sample "") replaces the verdicts of its
    cases, and the reverse."""
    last: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
    for r in records:
        own = last[r["database"], r["operator"]]
        if not r["sample"]:
            own.clear()
        else:
            own.pop("", None)
        own[r["sample"]] = r
    return [r for own in last.values() for r in own.values()]


def operators(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return one record per operator: database, operator, its verdict and its cases."""
    cases: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        cases[r["database"], r["operator"]].append(r)
    return [
        {
            "database": database,
            "operator": operator,
            "verdict": min((r["verdict"] for r in own), key=ORDER.index),
            "complete": len(own) >= min(r["of"] for r in own),
            "samples": min(r["samples"] for r in own),
            "cases": [{k: r[k] for k in ("sample", "verdict", "reason", "seconds")} for r in own],
        }
        for (database, operator), own in cases.items()
    ]


def document(records: Sequence[Record], expected: dict[str, int], date: str) -> dict[str, Any]:
    """Return the content of the JSON file. ``expected``: the number of operators per database."""
    import torch

    found = [o for o in operators(latest(records)) if o.pop("complete")]  # skip operators with unfinished cases
    databases = {}
    for database, asked in expected.items():
        own = [o for o in found if o["database"] == database]
        counts = Counter(o["verdict"] for o in own)
        miscompiled = sum(1 for o in own if o["verdict"] == "refused" and any(is_miscompiled(c) for c in o["cases"]))
        differentiable = len(own) - counts["no gradient"]
        databases[database] = {
            "operators": asked,
            "run": len(own),
            "cases": sum(len(o["cases"]) for o in own),
            **{v: counts[v] for v in ORDER},
            "refused_by_the_self_check": miscompiled,
            "pass_percent": round(100 * counts["pass"] / differentiable, 1) if differentiable else None,
        }
    ways = sorted({r["way"] for r in records})
    return {
        "date": date,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ways": ways,
        "databases": databases,
        "operators": found,
    }


def is_miscompiled(case: dict[str, Any]) -> bool:
    return case["verdict"] == "refused" and MISCOMPILED.search(case["reason"]) is not None


def reasons(found: dict[str, Any], verdict: str) -> dict[str, list[str]]:
    """Return the cases by reason, without the numbers of the reason, the most frequent first."""
    out: dict[str, list[str]] = defaultdict(list)
    for o in found["operators"]:
        for case in o["cases"]:
            if case["verdict"] == verdict and not is_miscompiled(case):
                out[_NUMBER.sub("N", case["reason"])].append(f"{o['operator']}#{case['sample']}")
    return dict(sorted(out.items(), key=lambda item: -len(item[1])))


def table(found: dict[str, Any]) -> str:
    """Return the counts as a Markdown table."""
    columns = [
        "database",
        "operators",
        "run",
        "cases",
        "pass",
        "refused",
        "of these by the self-check",
        "wrong",
        "crashed",
        "no gradient",
        "pass %",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for name, d in found["databases"].items():
        values = [
            d["operators"],
            d["run"],
            d["cases"],
            d["pass"],
            d["refused"],
            d["refused_by_the_self_check"],
            d["wrong"],
            d["crashed"],
            d["no gradient"],
        ]
        percent = "" if d["pass_percent"] is None else f"{d['pass_percent']:.1f}"
        lines.append(f"| {name} | {' | '.join(map(str, values))} | {percent} |")
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    way = found["ways"][0] if found["ways"] else "export"
    out = [_HEAD.format(**found, how=_HOW[way], command=_COMMAND[way]), table(found), ""]
    missing = {n: d["operators"] - d["run"] for n, d in found["databases"].items() if d["operators"] > d["run"]}
    if missing:
        out += [f"Not run yet: {', '.join(f'{count} of {name}' for name, count in missing.items())}.", ""]
    miscompiled = [(o, c) for o in found["operators"] for c in o["cases"] if is_miscompiled(c)]
    out += ["## Refused by the self-check", "", _SELF_CHECK, ""]
    out += [f"- `{o['database']}` **{o['operator']}** #{c['sample']}: {c['reason']}" for o, c in miscompiled] or [
        "None."
    ]
    for verdict, title in (
        ("wrong", "Wrong"),
        ("crashed", "Crashed"),
        ("refused", "Refused, by reason"),
        ("no gradient", "No gradient to compare"),
    ):
        out += ["", f"## {title}", ""]
        by_reason = reasons(found, verdict)
        out += [
            f"- {len(cases)} × {reason}{_cause(reason)}: {', '.join(f'`{c}`' for c in cases)}"
            for reason, cases in by_reason.items()
        ] or ["None."]
    return "\n".join(out) + "\n"


def write(stem: Path, found: dict[str, Any]) -> None:
    """Write ``STEM.md`` and ``STEM.json``, with one operator per line."""
    lines = ",\n".join(json.dumps(o, ensure_ascii=False) for o in found["operators"])
    head = json.dumps({k: v for k, v in found.items() if k != "operators"}, indent=1, ensure_ascii=False)
    stem.with_suffix(".json").write_text(f'{head[:-2]},\n "operators": [\n{lines}\n ]\n}}\n')
    stem.with_suffix(".md").write_text(page(found))


def _cause(reason: str) -> str:
    """Return the limitation of PyTorch behind a reason, "" if unknown."""
    return next((f" (*upstream: {cause}*)" for pattern, cause in _CAUSES.items() if re.search(pattern, reason)), "")


_HEAD = """# Which operators are served

`{command}` on torch {torch}, Python {python}, {date}. Every operator of PyTorch's own test databases that has gradients in float32 on
a CPU: in up to two of the calls that PyTorch's tests make (the first, and the last of another form), {how},
and compared with eager: outputs, every gradient and every buffer, where the samples allow it with a second set of numbers too. The measure is
the export's own (`aot_backward/checks/eager_check.py`). An operator passes where all its cases do. Each case is in the JSON beside this page.
The line of the caller's code in a reason is that of the tool's own module, which makes the call.
"""
_COMMAND = {"export": "make coverage", "record": "make coverage WAY=record", "onnx": "make coverage WAY=onnx"}
_HOW = {
    "onnx": "exported as ONNX graphs of its forward and\nbackward, run by onnxruntime from the files",
    "export": "exported as a `module` entry, loaded in a\nfresh process that has neither a compiler on its `PATH` nor `aot_backward` imported",
    "record": "its backward pass recorded, replayed from the package\nin a fresh process without a compiler on its `PATH` (what the package does not "
    "serve counts as refused)",
}
_CAUSES = {
    r"DynamicOutputShapeException": "tagged as having a result of dynamic size, without a rule for it in `torch/_subclasses/fake_impls.py`",
    r"aten\.equal\.default": "`torch.cov` looks at the weights' sum on the host",
    r"Eq\(u0, 1\)": "the layer's Python decides by `torch.any(…)` of a tensor, to raise an error",
    r"sparse_csr": "AOTInductor takes strided tensors alone",
    r"masked_select|_local_scalar_dense|aten\.slice|aten\.index\.": "AOTInductor's graphs take sizes from the sizes of their inputs alone",
    r"complex32": "safetensors has no such numbers",
    r"Mismatch between ints consumed": "AOTInductor's proxy executor and its code generator count the arguments differently",
    r"aten::_to_dense": "the operator has no kernel for fake tensors",
    r"returns a number": "AOTInductor's proxy executor returns no numbers",
    r"while_loop_stack_output": "Inductor has no C++ wrapper for it",
    r"'tuple' object has no attribute 'realize'": "Inductor's lowering of `invoke_quant`",
    r"\.numpy\(\) is not supported": "a trace has no numbers to hand out",
}
_SELF_CHECK = """The compiled code was not eager's within the measure, the export said so, and no package was written. Each is a fault of the
compiler, or of what it is given here."""

"""The table: what was spoilt, and what came of it."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tools.resumable import records

from .judging import FAULTS, VERDICTS

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The verdicts in a file, the last of each number."""
    return list({r["number"]: r for r in records(path)}.values())


def counts(records: Sequence[Record], field: str) -> dict[str, Counter[str]]:
    out: dict[str, Counter[str]] = {}
    for r in records:
        out.setdefault(r[field], Counter())[r["verdict"]] += 1
    return dict(sorted(out.items()))


def table(records: Sequence[Record], field: str = "kind") -> str:
    """The counts, as a Markdown table."""
    lines = [f"| {field} | mutations | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * (len(VERDICTS) + 1)}"]
    rows = [*counts(records, field).items(), ("all", Counter(r["verdict"] for r in records))]
    lines += [f"| {name} | {found.total()} | {' | '.join(str(found[v]) for v in VERDICTS)} |" for name, found in rows]
    return "\n".join(lines)


def write(stem: Path, seed: int, count: int, records: Sequence[Record]) -> None:
    """``STEM.md`` and ``STEM.json``."""
    import torch

    faults = [r for r in records if r["verdict"] in FAULTS]
    errors = Counter(r["reason"].partition(",")[0] for r in records if r["verdict"] == "refused")
    described = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": seed,
        "count": count,
        "mutations": len(records),
        "by kind": counts(records, "kind"),
        "by package": counts(records, "base"),
        "errors": dict(errors.most_common()),
        "faults": faults,
    }
    stem.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n")
    words = [f"- {r['number']}: {r['verdict']}: {r['kind']} of {r['base']}: `{r['what']}`: {r['reason']}" for r in faults] or ["None."]
    stem.with_suffix(".md").write_text(
        _PAGE.format(
            **described, kinds=table(records), packages=table(records, "base"), named=", ".join(f"{n} × `{e}`" for e, n in errors.most_common()),
            words="\n".join(words),
        )
    )  # fmt: skip


_PAGE = """# Spoilt packages

`python -m tests.tools.fuzz --seed {seed} --count {count} --docs docs/fuzzing` on torch {torch}, Python {python}: {mutations} mutations so far
of small sound packages (`net`: a module and a gradient function; `order`: a module with second derivatives; `step`: a training step; `passes`:
recorded passes; `targets`: two targets, signed), of a training state and of a signature. Each is looked at by `inspect` (as text and as JSON;
where portable graphs are spoilt, as a page too), loaded, and every entry is called with its gradients, a module's twice. Mutation N follows
from the seed and from N: `python -m tests.tools.fuzz --seed {seed} --only N`.

An edit of members or of a header is followed by new digests and sizes, so that it reaches what is checked behind them.

| verdict | meaning |
|---|---|
| refused | an error of the project's own types; a training step that refuses a state file is as it was |
| right | what was called gives eager's numbers, for the weights and numbers (learning rates and the like) that the loaded entry shows |
| untyped error | a fault: an error of another type |
| wrong | a fault: other numbers than eager's, or a None in their place |
| control characters | a fault: they reach the terminal |
| signal, hang | faults: the process ended, or did not |

## By what is spoilt

{kinds}

## By package

{packages}

Errors: {named}.

## Faults

{words}

## What this does not show

- Machine code with a new digest: whoever writes the code of a package has it run. Of libraries only what tells the kind of the file, its length and
  where its tables lie is spoilt with a new digest, anything else without.
- What a package says for people, or as its author's choice (names of keys in results, notes, the name of the optimizer and its fixed options), may be
  another statement than before; it is compared with nothing.
- More than the first calls: other sizes, schedules, several processes.
"""

"""Write the verdicts by kind of mutation and by package."""

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
    """Return the verdicts in a file, the last one per mutation."""
    return list({r["number"]: r for r in records(path)}.values())


def counts(records: Sequence[Record], field: str) -> dict[str, Counter[str]]:
    out: dict[str, Counter[str]] = {}
    for r in records:
        out.setdefault(r[field], Counter())[r["verdict"]] += 1
    return dict(sorted(out.items()))


def table(records: Sequence[Record], field: str = "kind") -> str:
    """Return the counts as a Markdown table."""
    lines = [f"| {field} | mutations | {' | '.join(VERDICTS)} |", f"|---|{'---:|' * (len(VERDICTS) + 1)}"]
    rows = [*counts(records, field).items(), ("all", Counter(r["verdict"] for r in records))]
    lines += [f"| {name} | {found.total()} | {' | '.join(str(found[v]) for v in VERDICTS)} |" for name, found in rows]
    return "\n".join(lines)


def write(stem: Path, seed: int, count: int, records: Sequence[Record]) -> None:
    """Write ``STEM.md`` and ``STEM.json``."""
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
    words = [
        f"- {r['number']}: {r['verdict']}: {r['kind']} of {r['base']}: `{r['what']}`: {r['reason']}" for r in faults
    ] or ["None."]
    stem.with_suffix(".md").write_text(
        _PAGE.format(
            **described, kinds=table(records), packages=table(records, "base"), named=", ".join(f"{n} × `{e}`" for e, n in errors.most_common()),
            words="\n".join(words),
        )
    )  # fmt: skip


_PAGE = """# Mutated packages

`python -m tests.tools.fuzz --seed {seed} --count {count} --docs docs/benchmarks/fuzzing` on torch {torch}, Python {python}: {mutations} mutations
so far of small valid packages (`net`: a module and a gradient function; `order`: a module with second derivatives; `step`: a training step; `passes`:
recorded passes; `targets`: two targets, signed), of a training state and of a signature. Each package is inspected (as text and as JSON; mutated
portable graphs also as a page) and loaded. Every entry is called with its gradients, a module's twice. Mutation N depends only on the seed and on N:
`python -m tests.tools.fuzz --seed {seed} --only N`.

After an edit of members or of a header, digests and sizes are updated, so that the edit reaches the checks behind them.

| verdict | meaning |
|---|---|
| refused | an error of the project's types; a training step that refuses a state file does not change |
| right | the calls give eager's numbers, for the weights and numbers (such as learning rates) that the loaded entry shows |
| untyped error | a fault: an error of another type |
| wrong | a fault: numbers differ from eager's, or are None |
| control characters | a fault: they reach the terminal |
| signal, hang | faults: the process crashed, or did not end |

## By kind of mutation

{kinds}

## By package

{packages}

Errors: {named}.

## Faults

{words}

## Not covered

- Machine code with a new digest: loading a package runs its author's code. Only edits of a library's file type, length and table offsets get a new
  digest. Other edits of a library do not.
- Descriptive content and the author's choices: names of keys in results, notes, the name of the optimizer and its fixed options. A mutation may
  change them; nothing checks them.
- Later calls: other sizes, schedules, several processes.
"""

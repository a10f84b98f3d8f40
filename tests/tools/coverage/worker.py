"""``python -m tests.tools.coverage.worker JOB``: give verdicts about some operators, in a process that may crash.

It prints lines of JSON: the next stage, ``{"stage", "running": [case names]}``; the number of cases of an operator,
``{"of": [database, operator, number]}``; and each verdict, ``{"case": {…}}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

WAYS = {"export": "exporting", "record": "recording", "onnx": "onnxing"}
"""The module per way. Its ``settle(cases, size, running, verdict)`` gives the verdicts."""


def main(job: dict[str, Any], out: TextIO) -> None:
    """Run ``job``: ``operators`` as ``[database, name]``, ``settled`` case names to skip, ``samples`` per operator,
    ``size`` of a group, ``way``."""
    import torch

    from . import cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    way = importlib.import_module(f"{__package__}.{WAYS[job['way']]}")

    def say(**line: Any) -> None:
        print(json.dumps(line), file=out, flush=True)

    def verdict(case: cases.Case, found: str, reason: str, seconds: float) -> None:
        say(case=_record(case.database, case.operator, case.sample, found, reason, seconds, job["way"]))

    found: list[cases.Case] = []
    for database in dict.fromkeys(d for d, _ in job["operators"]):
        known = cases.operators(database)
        for name in (n for d, n in job["operators"] if d == database):
            whole = f"{database}:{name}#"
            say(stage="run in eager", running=[whole])
            try:
                made = cases.of(database, name, known[name], job["samples"])
            except ValueError as error:
                say(case=_record(database, name, "", "no gradient", str(error), 0.0, job["way"]))
                continue
            say(of=[database, name, len(made)])
            found += [case for case in made if case.name not in job["settled"]]

    def running(stage: str, group: Sequence[cases.Case]) -> None:
        say(stage=stage, running=[case.name for case in group])

    way.settle(found, job["size"], running, verdict)
    say(stage="end", running=[])


def _record(
    database: str, operator: str, sample: str, verdict: str, reason: str, seconds: float, way: str
) -> dict[str, Any]:
    where = {"database": database, "operator": operator, "sample": sample, "way": way}
    return where | {"verdict": verdict, "reason": reason[:400], "seconds": round(seconds, 1)}


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # stdout is for JSON only, not for output of libraries
    main(json.loads(sys.argv[1]), out)
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's teardown aborts after some operators

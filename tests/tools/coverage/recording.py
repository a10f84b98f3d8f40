"""The way ``record``: record the backward pass of a case, replay it in a fresh process, compare with eager.

The fresh process runs the forward in eager and the backward from the package. A case that falls back to eager counts as
refused. Several cases share a recording. If one fails there, it is recorded again alone, to find the reason.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import aot_backward as ab
from aot_backward_runtime.errors import AotBackwardError

from .cases import Case, evaluate, first_line
from .exporting import Failed, Running, Verdict, fresh_process, judge


def settle(cases: Sequence[Case], size: int, running: Running, verdict: Verdict) -> None:
    """Give every case its verdict. At most ``size`` cases share a recording."""
    for i in range(0, len(cases), size):
        _settle(cases[i : i + size], running, verdict)


def _settle(group: Sequence[Case], running: Running, verdict: Verdict) -> None:
    running("recorded", group)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
            with ab.record(Path(folder) / "group.pt2", min_seen=1, tune="none") as recording:
                for case in group:
                    for one in case.rounds:
                        evaluate(case.module.train(case.training), one.inputs, one.cotangents)
            found = _replayed(Path(folder), group)
    except Exception as error:
        if len(group) > 1:
            for case in group:
                _settle([case], running, verdict)
        elif isinstance(error, AotBackwardError):
            verdict(group[0], "refused", first_line(error), time.monotonic() - start)
        else:
            verdict(
                group[0],
                "crashed",
                f"{'' if isinstance(error, Failed) else type(error).__name__ + ': '}{first_line(error)}",
                0.0,
            )
        return
    seconds = (time.monotonic() - start) / len(group)
    for case in group:
        rounds, missed = found[case.name]
        wrong = judge(case, rounds)
        if (wrong or missed) and len(group) > 1:
            _settle([case], running, verdict)
        elif wrong:
            verdict(case, "wrong", wrong, seconds)
        elif missed:
            verdict(case, "refused", "; ".join([*recording.skipped] or [*recording.report.eager]) or missed, seconds)
        else:
            verdict(case, "pass", "", seconds)


def _replayed(folder: Path, group: Sequence[Case]) -> dict[str, Any]:
    """Return, per case, the results of each round in a process without a compiler, and the reason if the package did
    not serve its passes."""
    if not (folder / "group.pt2").exists():
        return {case.name: ([], "nothing was recorded") for case in group}
    calls = [
        {
            "name": case.name, "database": case.database, "operator": case.operator, "sample": case.sample,
            "held": list(case.module.held),
            "rounds": [(list(r.inputs), list(r.cotangents)) for r in case.rounds],
        }
        for case in group
    ]  # fmt: skip
    torch.save(calls, folder / "calls")
    fresh_process("tests.tools.coverage.recording", folder, "group.pt2")
    found: dict[str, Any] = torch.load(folder / "results", weights_only=True)
    return found


def main(package: str, calls: str, results: str) -> None:
    """Replay the calls. Runs in the fresh process."""
    import shutil

    from . import cases

    assert shutil.which("g++") is None, "a compiler is on the PATH"
    known: dict[str, Any] = {}
    out = {}
    for call in torch.load(calls, weights_only=True):
        if call["database"] not in known:
            known[call["database"]] = cases.operators(call["database"])
        module = cases.module_of(
            call["database"], known[call["database"]][call["operator"]], call["sample"], tuple(call["held"])
        )
        rounds, missed = [], ""
        for inputs, cotangents in call["rounds"]:
            with ab.replay(package) as replaying:
                rounds.append(evaluate(module, tuple(inputs), tuple(cotangents)).eager)
            report = replaying.report
            if report.bindings + report.hits != 1 or report.misses or report.eager:
                missed = "; ".join([*report.misses, *report.eager]) or json.dumps(report.to_json())
        out[call["name"]] = (rounds, missed)
    torch.save(out, results)


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # torch's teardown aborts after some operators

"""Whole steps of a training script (``unmodified.py``).

The peers: the script unchanged, with ``fused=True``, under ``replay``, with its module attached to compiled code
(``attached.py``), and with both. Each figure is the median over processes, which take turns. The losses of 50 steps, and
the parameters after ten, are first compared with eager's.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import attached, processes, unmodified
from .report import Result, Target

TITLE = "a step of a training script (AdamW, clipping), microseconds (median), and how many times faster than unchanged"
PEERS = ("foreach", "fused", "replay", "attach", "both")
"""``foreach``: the unchanged script. ``replay``: the unchanged script under ``aot-backward replay``. ``attach``: the
script plus one line. ``both``: the script with that line, under ``aot-backward replay``, for its optimizer steps."""
_OURS = PEERS[2:]
SMALL = 200_000  # a model with fewer parameters counts as small
_RECORDED = 150  # steps
_QUICK = ("mlp",)


def measure(quick: bool, threads: list[int]) -> Result:
    result = Result(
        "scripts", TITLE, ["model", "parameters", "threads", *PEERS, *(f"{peer}/foreach" for peer in _OURS)]
    )
    for name in _QUICK if quick else unmodified.MODELS:
        for count in threads[:1] if quick else threads:
            found = _measured(name, count, steps=200 if quick else 600, rounds=1 if quick else 3)
            median = {peer: statistics.median(r["seconds"] for r in runs) for peer, runs in found.items()}
            size = found["foreach"][0]["parameters"]
            ratios = [f"{median['foreach'] / median[peer]:.2f}" for peer in _OURS]
            result.rows.append([name, f"{size}", f"{count}", *(f"{1e6 * median[peer]:.0f}" for peer in PEERS), *ratios])
            result.data.append({"model": name, "parameters": size, "threads": count, "seconds": median})
    _conclude(result)
    return result


def _measured(name: str, threads: int, steps: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    exported, plain, both = (processes.package(f"scripts-{name}-{threads}-{what}") for what in ("net", "plain", "both"))
    as_it_is, with_line = ["-m", unmodified.__name__, name, "foreach"], ["-m", attached.__name__, name, exported]
    if not processes.REUSE:
        for package in (exported, plain, both):
            package.unlink(missing_ok=True)
    if not exported.exists():
        _run([*with_line, 0], threads)
    for package, script in ((plain, as_it_is), (both, with_line)):
        if not package.exists():
            _run([*_command("record", "-o", package), *script, _RECORDED], threads)
    arguments: dict[str, list[Any]] = {
        "foreach": as_it_is,
        "fused": ["-m", unmodified.__name__, name, "fused"],
        "replay": [*_command("replay", plain), *as_it_is],
        "attach": with_line,
        "both": [*_command("replay", both), *with_line],
    }
    found: dict[str, list[dict[str, Any]]] = {peer: [] for peer in PEERS}
    for _ in range(rounds):
        for peer, runs in found.items():
            runs.append(_run([*arguments[peer], steps], threads))
    eager = found["foreach"][0]
    for peer, runs in found.items():
        for run in runs:
            if not all(
                math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5)
                for a, b in zip(run["losses"], eager["losses"], strict=True)
            ):
                raise RuntimeError(f"{name}, {peer}: expected eager's losses {eager['losses']}, got {run['losses']}")
            if not math.isclose(run["after_ten"], eager["after_ten"], rel_tol=1e-4, abs_tol=1e-4):
                raise RuntimeError(
                    f"{name}, {peer}: expected parameters of sum {eager['after_ten']} after ten steps, got {run['after_ten']}"
                )
    return found


def _command(*words: str | Path) -> list[str | Path]:
    return ["-m", "aot_backward.cli", *words, "--"]


def _run(arguments: list[Any], threads: int) -> dict[str, Any]:
    argv = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        cwd=processes.ROOT,
        env=processes.environment(threads),
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise RuntimeError(f"a measured process failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _conclude(result: Result) -> None:
    small = [d for d in result.data if d["parameters"] < SMALL]
    for peer, asked in (("replay", 1.5), ("both", 1.9)):
        ratios = {f"{d['model']}, {d['threads']} threads": d["seconds"]["foreach"] / d["seconds"][peer] for d in small}
        worst = min(ratios, key=ratios.__getitem__)
        mean, value = math.exp(statistics.fmean(map(math.log, ratios.values()))), ratios[worst]
        reached = f"{mean:.2f} in the geometric mean, {value:.2f} at worst ({worst})"
        result.targets.append(
            Target(
                f"{peer}: whole steps {asked} times faster than eager's default",
                reached,
                mean >= asked,
                f"{asked - mean:.2f}",
            )
        )

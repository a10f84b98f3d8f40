"""Clients that do not import this project: one process records, another replays without a compiler, and the results are
compared with eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLIENTS = Path(__file__).with_name("clients")
NEW_SIZES = {"trainer_bert", "loop_sequences"}  # their replay meets sizes that were never recorded
PLAIN = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(client: str, mode: str, folder: Path, **environment: str) -> dict[str, Any]:
    results = folder / f"{mode}.json"
    argv = [sys.executable, CLIENTS / f"{client}.py", mode, folder / "bw.pt2", results]
    done = subprocess.run(
        argv, capture_output=True, text=True, env={**os.environ, **PLAIN, **environment}, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("client", ["trainer_gpt2", "trainer_bert", "loop_digits", "loop_sequences"])
def test_a_client_trains_as_in_eager(client: str, tmp_path: Path) -> None:
    eager = run(client, "eager", tmp_path)
    assert len(eager["losses"]) == 50
    recorded = run(client, "record", tmp_path)
    assert recorded["skipped"] == {} and recorded["eager"] == {}
    assert largest_difference(recorded["losses"], eager["losses"][: len(recorded["losses"])]) <= 1e-4
    inductor = tmp_path / "inductor"
    inductor.mkdir()
    replayed = run(client, "replay", tmp_path, PATH="/nonexistent", TORCHINDUCTOR_CACHE_DIR=str(inductor))
    print(
        client,
        {k: v for k, v in replayed.items() if k not in ("losses", "shapes", "compilers")},
        recorded["seconds"],
        eager["training_seconds"],
    )
    assert replayed["misses"] == {} and replayed["eager"] == {}
    assert largest_difference(replayed["losses"], eager["losses"]) <= 1e-4
    assert replayed["shapes"] == eager["shapes"]
    assert replayed["bindings"] + replayed["hits"] == len(replayed["shapes"])
    if client in NEW_SIZES:
        seen = {tuple(s) for s in recorded["shapes"]}
        assert any(tuple(s) not in seen for s in replayed["shapes"])
    # Nothing was compiled: no process was started, and no compiler module imported beyond the client's own imports.
    assert list(inductor.iterdir()) == []
    assert set(replayed["children"]) <= set(eager["children"])
    assert set(replayed["compilers"]) <= set(eager["compilers"])
    assert replayed.get("counters", {}) == {}

"""Seconds of an export, bytes of a package, and bytes of each library against the nodes of its graph.

Each model exports a ``module`` entry (three libraries) in a fresh process; the seconds include the import of Inductor.
The first row starts with an empty cache. The other cold exports have the compiler's precompiled headers, but no
compiled graph. The warm ones have both.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

from tests.support import zoo

from . import programs
from .report import Result, Target

TITLE = "export of a module entry: seconds with a cold and a warm compile cache; size of a package and its libraries"
PER_LIBRARY, PER_NODE = 0.35e6, 0.7e6 / 1000  # allowed bytes


def measure(quick: bool, threads: list[int]) -> Result:
    columns = ["model", "cold s", "warm s", "package kB", "weights kB", "library", "nodes", "kB", "allowed kB", "of it"]
    result = Result("size", TITLE, columns)
    with tempfile.TemporaryDirectory() as empty:
        cache = {} if quick else {"AOT_BACKWARD_CACHE": empty}
        names = ("mlp",) if quick else zoo.NAMES
        for i, name in enumerate(("mlp", *names) if not quick else names):
            rows = [programs.SMALL]
            if not quick:
                shutil.rmtree(Path(empty) / "compiled", ignore_errors=True)
            _, cold = programs.export(name, rows, "module", **cache)
            package, warm = programs.export(name, rows, "module", **cache)
            label = f"{name}, empty cache" if not quick and i == 0 else name
            _add(result, label, package, cold, warm)
    if quick:
        result.notes.append("quick: uses your compile cache, so the cold figures may be warm ones")
    _conclude(result)
    return result


def _add(result: Result, label: str, package: Path, cold: float, warm: float) -> None:
    with zipfile.ZipFile(package) as archive:
        sizes = {m.filename.partition("/")[2]: m.file_size for m in archive.infolist()}
        manifest = json.loads(
            archive.read(next(m for m in archive.namelist() if m.endswith("extra/aot_backward/manifest.json")))
        )
    weights = sum(s for m, s in sizes.items() if m.endswith("weights.safetensors"))
    libraries = {
        n: {"nodes": spec["nodes"], "bytes": sizes[spec["member"]]} for n, spec in manifest["libraries"].items()
    }
    total = package.stat().st_size
    first = [label, f"{cold:.1f}", f"{warm:.1f}", f"{total / 1e3:.0f}", f"{weights / 1e3:.0f}"]
    for name, found in libraries.items():
        allowed = PER_LIBRARY + PER_NODE * found["nodes"]
        shown = [name.rpartition(".")[2], str(found["nodes"]), f"{found['bytes'] / 1e3:.0f}", f"{allowed / 1e3:.0f}"]
        result.rows.append([*first, *shown, f"{found['bytes'] / allowed:.2f}"])
        first = ["", "", "", "", ""]
    seconds = {"cold_s": cold, "warm_s": warm}
    result.data.append(
        {"model": label, **seconds, "package_bytes": total, "weights_bytes": weights, "libraries": libraries}
    )


def _conclude(result: Result) -> None:
    measured = [(d["model"], n, lib) for d in result.data for n, lib in d["libraries"].items()]
    found = [(model, n, lib["bytes"] / (PER_LIBRARY + PER_NODE * lib["nodes"])) for model, n, lib in measured]
    model, library, worst = max(found, key=lambda f: f[2])
    over = sum(part > 1 for _, _, part in found)
    reached = f"at most {worst:.2f} of it ({model}, {library}); {over} of {len(found)} over"
    result.targets.append(Target("0.35 MB a library + 0.7 MB per 1,000 nodes", reached, worst <= 1, f"{worst - 1:.0%}"))

"""``python -m tests.cross [--only mlp,step] [--docs STEM]``: compiles for GPUs that are not here, looks at what came, and prints a table.

Proved of each library: it holds machine code for the architecture that was asked for and no other, and every symbol that it needs is in torch's
libraries, the system's, or the driver's header. Not proved: that it runs, and its numbers. ``make cross`` calls it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters import cuda_cross
from aot_backward_runtime.archive import open_package
from aot_backward_runtime.targets import seen_as, targets_of

from . import binaries, programs

TARGET = "cuda:sm_80,cuda:sm_90"


def look(path: Path) -> list[dict[str, Any]]:
    """A row for each library of each target."""
    archive = open_package(path)
    driver = binaries.driver_symbols(cuda_cross.cuda_home() / "include" / "cuda.h")
    rows = []
    for number, target in enumerate(targets_of(archive.manifest)):
        manifest = seen_as(archive.manifest, number)
        for name, spec in manifest.libraries.items():
            data = archive.read_member(spec.member)
            with tempfile.NamedTemporaryFile(suffix=".so") as file:
                file.write(data)
                file.flush()
                missing = binaries.unresolved(Path(file.name), driver)
            found = binaries.architectures(data)
            devices = {t.device for t in (*spec.inputs, *spec.outputs)}
            faults = {
                f"machine code for {', '.join(sorted(set(found)))}": set(found) != {target.cuda_arch},
                f"nobody defines {', '.join(missing[:3])}": bool(missing),
                f"tensors on {', '.join(sorted(devices))}": devices != {"cuda"},
                "not linked with the driver": "libcuda.so.1" not in spec.needed,
            }
            wrong = [words for words, is_so in faults.items() if is_so]
            rows.append({"library": name, "target": target.label, "kernels": len(found), "bytes": len(data), "wrong": "; ".join(wrong)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cross")
    parser.add_argument("--only", default=",".join(programs.NAMES), help=f"programs, by default all: {','.join(programs.NAMES)}")
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also writes STEM.md and STEM.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only.split(","):
        for dynamic in (False, True):
            kind = {"program": name, "batch": "dynamic" if dynamic else "static"}
            with tempfile.TemporaryDirectory() as folder:
                path, started = Path(folder) / "cross.pt2", time.perf_counter()
                try:
                    programs.write(path, name, dynamic, TARGET)
                    found = look(path)
                except Exception as error:  # a program that fails is a row of the table
                    found = [{"library": "", "target": TARGET, "kernels": 0, "bytes": 0, "wrong": f"{type(error).__name__}: {error}"}]
                rows += [{**kind, **row, "seconds": round(time.perf_counter() - started, 1)} for row in found]
            print(
                f"{name}, {kind['batch']}: {rows[-1]['seconds']} s {'; '.join(r['wrong'] for r in found if r['wrong'])}", file=sys.stderr, flush=True
            )
    text = page(rows)
    print(text)
    if options.docs:
        options.docs.with_suffix(".md").write_text(text)
        options.docs.with_suffix(".json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if any(r["wrong"] for r in rows) else 0)


def page(rows: list[dict[str, Any]]) -> str:
    import triton

    from ..benchmarks import report

    described = report.header(report.machine([torch.get_num_threads()]))
    parts = ["# Compiled for GPUs where there is none", "", "```", f"{described}, triton {triton.__version__}, no GPU and no driver", "```", ""]
    parts += [
        "| program | batch | library | target | GPU kernels | kB | machine code, symbols, driver |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        numbers = f"{r['kernels']} | {r['bytes'] / 1e3:.0f}"
        parts.append(f"| {r['program']} | {r['batch']} | {r['library']} | {r['target']} | {numbers} | {r['wrong'] or 'right'} |")
    parts += ["", "Each was compared with eager on the CPU before, from the same graphs. None of this code has run on a GPU."]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

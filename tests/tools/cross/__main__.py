"""``python -m tests.tools.cross [--only mlp,step] [--docs STEM]``: cross-compile for GPUs, check the libraries, and
print a table.

The page explains which properties of a library are checked, and which are not. ``make cross`` calls this program.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.cuda import toolkit
from aot_backward_runtime.native.weights import filled, load_weights
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import seen_as, targets_of

from . import binaries, interpreted, launches, machine_code, programs, spoilt
from .watched import Compiled, watching

TARGET = "cuda:sm_80,cuda:sm_90"
EMPTY = {"kernels": 0, "parameters": 0, "bytes": 0, "launches": 0, "error": 0.0, "not_interpreted": ""}


def look(path: Path, seen: Mapping[tuple[str, str], Compiled], folder: Path, spoil: bool) -> list[dict[str, Any]]:
    """Return a row for each library of each target. ``seen``: the compiled graphs. ``spoil``: also check that the
    checks can fail."""
    archive = open_package(path)
    weights = load_weights(archive) | filled(archive)
    driver = binaries.driver_symbols(toolkit.cuda_home() / "include" / "cuda.h")
    rows, runnable = [], []
    for number, target in enumerate(targets_of(archive.manifest)):
        manifest = seen_as(archive.manifest, number)
        for at, (name, spec) in enumerate(manifest.libraries.items()):
            data, compiled = archive.read_member(spec.member), seen[target.label, name]
            file = folder / f"{number}.{at}.so"
            file.write_bytes(data)
            if spec.extern:
                file.with_suffix(".json").write_bytes(archive.read_member(spec.extern))
            runnable.append((file, compiled, {c.name: c.weight for c in spec.constants}))
            missing = binaries.unresolved(file, driver)
            kernels = machine_code.kernels(data)
            found = {kernel.architecture for kernel in kernels}
            devices = {t.device for t in (*spec.inputs, *spec.outputs)}
            faults = {
                f"machine code for {', '.join(sorted(found))}": found != {target.cuda_arch},
                f"undefined symbols: {', '.join(missing[:3])}": bool(missing),
                f"tensors on {', '.join(sorted(devices))}": devices != {"cuda"},
                "not linked with the driver": "libcuda.so.1" not in spec.needed,
            }
            wrong = [words for words, is_so in faults.items() if is_so]
            wrong += launches.faults(
                compiled.wrapper, kernels, {n: source.shared for n, source in compiled.kernels.items()}
            )
            parameters = sum(len(kernel.parameters) for kernel in kernels)
            rows.append(
                {
                    "library": name,
                    "target": target.label,
                    "kernels": len(kernels),
                    "parameters": parameters,
                    "bytes": len(data),
                    "wrong": wrong,
                }
            )
    for row, verdict in zip(rows, interpreted.judge(runnable, weights), strict=True):
        row |= {"launches": verdict.launches, "error": verdict.error, "not_interpreted": verdict.refused}
        row["wrong"] = "; ".join([*row["wrong"], *filter(None, [verdict.wrong])])
    if spoil and (passed := spoilt.unnoticed(runnable, weights)):
        rows.append(
            {**EMPTY, "library": "damaged", "target": TARGET, "wrong": f"passed the checks: {'; '.join(passed)}"}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.cross")
    parser.add_argument(
        "--only", default=",".join(programs.NAMES), help=f"programs, by default all: {','.join(programs.NAMES)}"
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.only.split(","):
        for dynamic in (False, True):
            kind = {"program": name, "batch": "dynamic" if dynamic else "static"}
            with tempfile.TemporaryDirectory() as folder:
                path, started = Path(folder) / "cross.pt2", time.perf_counter()
                os.environ["AOT_BACKWARD_CACHE"] = str(Path(folder) / "cache")  # a cached library would not be seen
                try:
                    with watching() as seen:
                        programs.write(path, name, dynamic, TARGET)
                    found = look(path, seen, Path(folder), spoil=not rows)
                except Exception as error:  # a program that fails is a row of the table
                    found = [{**EMPTY, "library": "", "target": TARGET, "wrong": f"{type(error).__name__}: {error}"}]
                rows += [{**kind, **row, "seconds": round(time.perf_counter() - started, 1)} for row in found]
            print(
                f"{name}, {kind['batch']}: {rows[-1]['seconds']} s {'; '.join(r['wrong'] for r in found if r['wrong'])}",
                file=sys.stderr,
                flush=True,
            )
    text = page(rows)
    print(text)
    if options.docs:
        options.docs.with_suffix(".md").write_text(text)
        options.docs.with_suffix(".json").write_text(
            json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )
    sys.exit(1 if any(r["wrong"] for r in rows) else 0)


def page(rows: list[dict[str, Any]]) -> str:
    import triton

    from ..benchmarks import report

    described = report.header(report.machine([torch.get_num_threads()]))
    parts = [
        "# Cross-compiled for GPUs",
        "",
        "```",
        f"{described}, triton {triton.__version__}, no GPU and no driver",
        "```",
        "",
    ]
    parts += [
        "| program | batch | library | target | kB | GPU kernels | their parameters | launches interpreted | worst relative error | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        refused = r["not_interpreted"] and f"not interpreted: {r['not_interpreted']}"
        said = r["wrong"] or refused or "right"
        error = format(r["error"], ".1g") if said == "right" else ""
        numbers = f"{r['bytes'] / 1e3:.0f} | {r['kernels']} | {r['parameters']} | {r['launches']} | {error}"
        parts.append(f"| {r['program']} | {r['batch']} | {r['library']} | {r['target']} | {numbers} | {said} |")
    parts += ["", _EXPLAINED]
    return "\n".join(parts) + "\n"


_EXPLAINED = """\
"right" means, for the library in the package:

- It has machine code for that architecture only. torch, the system, or the driver's header defines every symbol that it needs.
- Its host code passes to each kernel the number and sizes of arguments, and the number of threads, that the machine code states. It passes the
  shared memory that the compiler stated; the machine code states only whether there is any.
- It ran on the CPU twice, at two batch sizes if the batch is dynamic. The host code was the library's: it allocated, called operators and launched
  kernels. Memory was the host's, and operators were the CPU's. Each launch went to Triton's interpreter, with the library's grid and arguments and
  with the source of the kernel's machine code. Results, inputs and constants after each call were compared with the captured graph, run by ATen on
  the CPU. The error is the largest relative error of a tensor's norm.

The checks can fail: the libraries of the first program were also checked with one fault each: a missing argument, an int for a pointer, a different
number of warps, a minus for a plus in each kernel, blocks of one element, a flipped bit in the machine code. Each was called wrong.

Not checked: that the machine code matches its source, CUDA's operators, random numbers and allocation, and the order of execution. None of this code
has run on a GPU."""


if __name__ == "__main__":
    main()

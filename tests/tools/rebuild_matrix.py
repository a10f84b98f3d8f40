"""``python -m tests.tools.rebuild_matrix --other PYTHON …``: export packages under each torch, rebuild and run them
under the others.

For each case, the builder exports a package, runs it on fresh inputs, and stores the results. Each other torch rebuilds
the package without the model's source, runs it on the same inputs, and compares. Compile caches are empty.
``make rebuild-matrix`` calls this program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..support.oracle import RELATIVE

ROOT = Path(__file__).parents[2]
STEP = "step"
FACTOR = 10  # times the tests' tolerance: the code of two versions is compared, and each differs from eager
FRESH = 6  # rows


def cases() -> list[str]:
    from ..support import zoo

    try:
        import transformers  # noqa: F401
    except ImportError:
        return [n for n in zoo.NAMES if n not in ("bert", "llama")] + [STEP]
    return [*zoo.NAMES, STEP]


def build(folder: Path) -> None:
    """Export every case, and store its results for fresh inputs."""
    for name in cases():
        started = time.perf_counter()
        path = folder / f"{name}.pt2"
        try:
            arguments, relative = _exported(path, name)
        except Exception as error:  # a case that cannot be exported is a row of the table
            kept: dict[str, Any] = {
                "error": f"not exported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            }
        else:
            seconds = time.perf_counter() - started
            kept = {
                "arguments": arguments,
                "results": results(path, arguments),
                "seconds": seconds,
                "relative": relative,
            }
        torch.save(kept, folder / f"{name}.pt")
        print(f"{name}: {kept.get('error') or kept['seconds']}", file=sys.stderr, flush=True)


def _exported(path: Path, name: str) -> tuple[Any, float | None]:
    """Export a case. Return fresh arguments, and the tolerance if it is not that of the dtype."""
    import aot_backward as ab

    from ..support import golden_packages, zoo

    if name == STEP:
        ab.export(path, {"fit": golden_packages.training()})
        return golden_packages.samples(FRESH), None
    case = zoo.make(name)
    ab.export_module(
        case.module.train(case.mode == "train"), case.args(case.sizes[0]), dynamic_shapes=case.dynamic_shapes, path=path
    )
    return case.args(FRESH), case.relative


def rebuild(folder: Path) -> None:
    """Rebuild the packages in ``folder``, run them, and write ``rebuilt.json``."""
    import aot_backward as ab

    found = []
    for path in sorted(folder.glob("*.pt")):
        stored = torch.load(path)
        package, out = path.with_suffix(".pt2"), folder / f"{path.stem}-rebuilt.pt2"
        started = time.perf_counter()
        row: dict[str, Any] = {"case": path.stem, "export_s": stored.get("seconds")}
        if "error" in stored:
            found.append(row | {"error": stored["error"]})
            continue
        try:
            ab.rebuild(package, out)
            row["rebuild_s"] = time.perf_counter() - started
            row |= looked_at(out) | compared(results(out, stored["arguments"]), stored["results"], stored["relative"])
        except Exception as error:  # a case that fails is a row of the table
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        found.append(row)
        print(f"{path.stem}: {row}", file=sys.stderr, flush=True)
    (folder / "rebuilt.json").write_text(json.dumps({"torch": torch.__version__, "rows": found}))


def results(path: Path, arguments: Any) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and buffers of a module, or the losses and final parameters of a training step."""
    from aot_backward_runtime import load

    package = load(path)
    torch.manual_seed(11)
    if "fit" in package.entries:
        step = package.step()
        losses = {f"loss {i}": step(*arguments) for i in range(3)}
        return {n: t.detach().clone() for n, t in (losses | dict(step.parameters)).items()}
    module = package.module()
    arguments = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    value = pytree.tree_leaves(module(*arguments))
    outputs = [t for t in value if isinstance(t, torch.Tensor)]
    differentiable = [t for t in outputs if t.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    found = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    found |= {f"grad of input {i}": a.grad for i, a in enumerate(arguments) if a.grad is not None}
    found |= {f"grad of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None}
    return found | {f"buffer {n}": b.clone() for n, b in module.named_buffers()}


def looked_at(path: Path) -> dict[str, Any]:
    from aot_backward_runtime.package.archive import open_package

    archive = open_package(path)
    libraries = archive.manifest.libraries
    verdicts = {v.verdict.status for e in archive.manifest.entries.values() for v in e.variants}
    return {
        "libraries": len(libraries),
        "nodes": sum(s.nodes for s in libraries.values()),
        "library_bytes": sum(archive.members()[s.member].size for s in libraries.values()),
        "graph_bytes": sum(archive.members()[s.graph].size for s in libraries.values()),
        "verdict": ", ".join(sorted(verdicts)),
    }


def compared(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float | None
) -> dict[str, Any]:
    """Return the tensor with the largest ratio of ‖a − e‖ to tolerance · max(‖e‖, a tenth of the largest gradient).

    ``relative``: the tolerance, if it is not that of the dtype (bfloat16 inside)."""
    if actual.keys() != expected.keys():
        return {"error": f"only one of both has {sorted(actual.keys() ^ expected.keys())}"}
    largest = max((float(e.double().norm()) for n, e in expected.items() if n.startswith("grad")), default=0.0)
    coarsest = relative or FACTOR * max(RELATIVE[e.dtype] for e in expected.values() if e.is_floating_point())
    worst, name = 0.0, ""
    for n, e in expected.items():
        a = actual[n]
        if (a.dtype, a.shape) != (e.dtype, e.shape):
            return {"error": f"{n} is {a.dtype} {tuple(a.shape)}, was {e.dtype} {tuple(e.shape)}"}
        difference = float((a.double() - e.double()).norm())
        ratio = difference / (
            coarsest * max(float(e.double().norm()), 0.1 * largest if n.startswith("grad") else 0.0, 1e-6)
        )
        if ratio > worst or not name:
            worst, name = ratio, n
    return {"worst": name, "ratio": worst}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.rebuild_matrix")
    parser.add_argument(
        "--other",
        metavar="PYTHON",
        nargs="+",
        help="interpreters with other versions of torch, and with this project installed or on their path",
    )
    parser.add_argument("--docs", type=Path, metavar="STEM", help="also write STEM.md and STEM.json")
    parser.add_argument("--do", choices=("build", "rebuild"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        {"build": build, "rebuild": rebuild}[options.do](options.folder)
        return
    if not options.other:
        parser.error("--other: expected the interpreter of an environment with another torch, got nothing")
    ways = []
    pythons = [sys.executable, *options.other]
    for builder in pythons:
        with tempfile.TemporaryDirectory() as folder:
            _call(builder, "build", folder)
            version = subprocess.run(
                [builder, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for rebuilder in (p for p in pythons if p != builder):
                _call(rebuilder, "rebuild", folder)
                ways.append({"built": version, **json.loads((Path(folder) / "rebuilt.json").read_text())})
    text = page(ways)
    print(text)
    if options.docs:
        options.docs.with_suffix(".md").write_text(text)
        options.docs.with_suffix(".json").write_text(json.dumps({"ways": ways}, indent=1) + "\n")
    wrong = [r["case"] for w in ways for r in w["rows"] if "error" in r or not r["ratio"] <= 1]
    sys.exit(f"wrong or failed: {', '.join(wrong)}" if wrong else 0)


def _call(python: str, what: str, folder: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "AOT_BACKWARD_CACHE": cache}
        argv = [python, "-m", "tests.tools.rebuild_matrix", "--do", what, "--folder", folder]
        subprocess.run(argv, cwd=ROOT, env=env, check=True)


def page(ways: list[dict[str, Any]]) -> str:
    from .benchmarks import report

    parts = [
        "# Rebuilding under another torch",
        "",
        "```",
        report.header(report.machine([torch.get_num_threads()])),
        "```",
    ]
    for way in ways:
        parts += ["", f"## Built with torch {way['built']}, rebuilt with torch {way['torch']}", ""]
        parts += [
            "| case | libraries | operators | export s | rebuild s | self-check | differs most | error over tolerance |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for r in way["rows"]:
            if "error" in r:
                parts.append(f"| {r['case']} | | | | | **{r['error']}** | | |")
                continue
            seconds = f"{r['export_s']:.1f} | {r['rebuild_s']:.1f}" if r["export_s"] else f" | {r['rebuild_s']:.1f}"
            numbers = f"{r['libraries']} | {r['nodes']} | {seconds} | {r['verdict']} | {r['worst']} | {r['ratio']:.3f}"
            parts.append(f"| {r['case']} | {numbers} |")
    parts += [
        "",
        "Both compile caches were empty; all cores were used. Compared: outputs, gradients and buffers of a module, or losses and parameters of a",
        f"training step, at {FRESH} new rows. The tolerance is {FACTOR} times that of the tests against eager.",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

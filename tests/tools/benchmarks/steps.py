"""Forward and backward of the zoo's models: the ``module`` and ``grad`` entries against eager and ``torch.compile``.

Each model, peer and number of threads has its own process; the peers of a model take turns. Every ``.grad`` is None
before a step. The compiled peer has the loss within the compiled region (its best case), static shapes, and as much
time to compile as it needs. ``grad`` computes the same loss; eager and ``module`` compute it in eager.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import zoo

from . import clock, programs
from .processes import Peer
from .report import Result, Target

TITLE = "forward and backward, milliseconds a call (median), and how many times faster than torch.compile"
PEERS = ("eager", "compile", "module", "grad")
_DIFFERENCE = 1e-3  # relative to a gradient's norm; 3e-2 for the model with bfloat16


def serve(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Answer requests in a peer's process: {"do": "gradients" | "batch" | "time", "rows": n, …}."""
    import torch

    peer, name = spec["peer"], spec["model"]
    parameters: dict[str, torch.nn.Parameter] = {}
    if peer in ("eager", "compile"):
        loss = programs.Loss(programs.make(name))
        parameters = dict(loss.named_parameters())
        run = torch.compile(loss, dynamic=False) if peer == "compile" else loss
    else:
        import aot_backward_runtime

        package = aot_backward_runtime.load(spec["package"])
        if peer == "module":
            loss = programs.Loss(package.module())
            run, parameters = loss, dict(loss.named_parameters())
        else:
            run = package.grad()
    held = list(parameters.values())

    def step(args: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
        if peer == "grad":
            return lambda: run(*args)

        def forward_and_backward() -> None:
            for p in held:
                p.grad = None
            run(*args).backward()

        return forward_and_backward

    def gradients(args: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        if peer == "grad":
            made = run(*args)[1]
        else:
            step(args)()
            made = {n: p.grad for n, p in parameters.items()}
        return {n: g for n, g in made.items() if g is not None}

    calls = {rows: step(programs.inputs(name, rows)) for rows in spec["rows"]}

    def answer(request: dict[str, Any]) -> Any:
        rows = request["rows"]
        if request["do"] == "gradients":
            torch.save(gradients(programs.inputs(name, rows)), request["path"])
            return None
        if request["do"] == "batch":
            return clock.batch_size(calls[rows])
        return clock.samples(calls[rows], request["count"], request["seconds"])

    return answer


def difference(path: Path, expected: Path) -> float:
    """Return the largest error of a gradient relative to its norm, or to a tenth of the largest norm, because some
    gradients are zero."""
    import torch

    made, true = torch.load(path, weights_only=True), torch.load(expected, weights_only=True)
    if made.keys() != true.keys():
        raise RuntimeError(f"only one of eager and the peer has gradients of {sorted(made.keys() ^ true.keys())[:4]}")
    scale = 0.1 * max(float(g.norm()) for g in true.values())
    return max(
        float((made[n].double() - g.double()).norm()) / max(float(g.norm()), scale, 1e-9) for n, g in true.items()
    )


def measure(quick: bool, threads: list[int]) -> Result:
    names = ("mlp",) if quick else zoo.NAMES
    sizes = [programs.SMALL] if quick else [programs.SMALL, programs.LARGE]
    columns = [
        "model",
        "rows",
        "threads",
        "eager",
        "compile",
        "module",
        "grad",
        "module/compile",
        "grad/compile",
        "grad/eager",
    ]
    result = Result("steps", TITLE, columns)
    for name in names:
        package = programs.exported(name, sizes)
        for count in threads:
            _measure_model(result, name, package, sizes, count, quick)
    _conclude(result)
    return result


def _measure_model(result: Result, name: str, package: Path, sizes: list[int], threads: int, quick: bool) -> None:
    spec = {"model": name, "package": str(package), "rows": sizes}
    peers = {p: Peer(__name__, {**spec, "peer": p}, threads=threads) for p in PEERS if not (quick and p == "compile")}
    for rows in sizes:
        with tempfile.TemporaryDirectory() as folder:
            paths = {p: Path(folder) / p for p in peers}
            for p, peer in peers.items():
                peer.ask(do="gradients", rows=rows, path=str(paths[p]))
            off = {p: difference(paths[p], paths["eager"]) for p in peers if p != "eager"}
        if programs.random_masks(name):
            off.pop("compile", None)
        for p, error in off.items():
            if error > (3e-2 if name == "autocast" else _DIFFERENCE):
                raise RuntimeError(
                    f"{name}, {rows} rows: a gradient of {p} is off by {error:.2g} of its norm. Nothing was timed."
                )
        counts = {p: peer.ask(do="batch", rows=rows) for p, peer in peers.items()}
        timed = {
            p: lambda peer=peer, count=counts[p], rows=rows: peer.ask(
                do="time", rows=rows, count=count, seconds=0.01 if quick else 0.08
            )
            for p, peer in peers.items()
        }
        times = {p: clock.summary(s) for p, s in clock.interleaved(timed, 1 if quick else 4).items()}
        _add(result, name, rows, threads, times, off)
    for peer in peers.values():
        peer.close()


def _add(
    result: Result, name: str, rows: int, threads: int, times: dict[str, dict[str, float]], off: dict[str, float]
) -> None:
    median = {p: t["median_s"] for p, t in times.items()}

    def faster(peer: str, than: str) -> str:
        return f"{median[than] / median[peer]:.2f}" if than in median else "-"

    shown = [f"{1e3 * median[p]:.4f}" if p in median else "-" for p in PEERS]
    ratios = [faster("module", "compile"), faster("grad", "compile"), faster("grad", "eager")]
    result.rows.append([name, str(rows), str(threads), *shown, *ratios])
    result.data.append(
        {"model": name, "rows": rows, "threads": threads, "times": times, "largest_difference_from_eager": off}
    )


def _conclude(result: Result) -> None:
    found = [
        (d, d["times"]["compile"]["median_s"] / d["times"]["grad"]["median_s"])
        for d in result.data
        if "compile" in d["times"]
    ]
    if not found:
        return
    worst, ratio = min(found, key=lambda pair: pair[1])
    where = f"{worst['model']}, {worst['rows']} rows, {worst['threads']} threads"
    slower = sum(r < 1 for _, r in found)
    reached = f"{ratio:.2f}x at worst ({where}); slower in {slower} of {len(found)}"
    result.targets.append(Target("grad never slower than torch.compile", reached, ratio >= 1, f"{1 - ratio:.0%}"))
    small = [r for d, r in found if d["rows"] == programs.SMALL]
    mean = statistics.geometric_mean(small)
    result.targets.append(
        Target("grad 2x torch.compile, geometric mean, small models", f"{mean:.2f}x", mean >= 2, f"{2 - mean:.2f}x")
    )
    for threads in sorted({d["threads"] for d, _ in found}):
        for rows in sorted({d["rows"] for d, _ in found}):
            some = [d["times"] for d, _ in found if (d["threads"], d["rows"]) == (threads, rows)]
            means = {
                f"{p} against {q}": statistics.geometric_mean(t[q]["median_s"] / t[p]["median_s"] for t in some)
                for p, q in (
                    ("grad", "compile"),
                    ("grad", "eager"),
                    ("module", "compile"),
                    ("module", "eager"),
                    ("compile", "eager"),
                )
            }
            result.notes.append(
                f"geometric means, {rows} rows, {threads} threads: "
                + ", ".join(f"{k} {v:.2f}x" for k, v in means.items())
            )

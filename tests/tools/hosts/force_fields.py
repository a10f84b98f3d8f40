"""``python -m tests.tools.hosts.force_fields --docs docs/benchmarks/DATE-forcefields``: public models with random
weights, against their own routes.

One call computes energy and forces of atoms in a periodic box, with the neighbor list given. Forces are compared with
eager PyTorch in float64 before times are taken. Peers take turns in one process with one thread; a time is the median.
Then the same for training steps (:mod:`.force_field_training`). A model whose library is not installed is left out; a
second run in another environment adds its rows to the same files. MACE and NequIP need different versions of e3nn.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import numpy as np
import torch
from torch import nn
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.fx.experimental.proxy_tensor import make_fx

import aot_backward as ab
from aot_backward_runtime import load
from tests.forcefields.models import errors, in_eager, load_example, system, with_dtype

from . import force_field_training

MODELS = {
    "MACE": ("export_mace", "mace", ()),
    "NequIP": ("export_nequip", "nequip", ()),
    "SchNet (schnetpack)": ("export_schnetpack", "schnetpack", ("SchNet",)),
    "PaiNN (schnetpack)": ("export_schnetpack", "schnetpack", ("PaiNN",)),
    "SchNet (torch_geometric)": ("export_schnet_of_torch_geometric", "torch_geometric", ()),
}
BOXES = {20: 7.0, 200: 14.0}
"""Atoms, and the edge of their box in Å."""
CALLS = 21
Peer = Callable[[], Any]


def scripted(name: str, made: dict[str, Any], model: nn.Module) -> nn.Module:
    """Return the model in TorchScript, by which its library deploys it."""
    if name == "MACE":
        from e3nn.util import jit

        return made["Energies"](jit.compile(model))  # type: ignore[no-any-return]
    return torch.jit.script(model)


def gradient(energies: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    positions = inputs[0].detach().requires_grad_()
    (by,) = torch.autograd.grad(energies(positions, *inputs[1:5]).sum(), positions)
    return by


def by_aot_inductor(
    energies: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], folder: Path
) -> Callable[..., Any]:
    """Compile forces by PyTorch's own tools alone: ``make_fx``, ``torch.export`` and AOTInductor. ``nequip-compile``
    does the same."""

    def forces(positions: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return gradient(energies, (positions, *rest))

    graph = make_fx(forces, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    atoms, edges = {0: torch.export.Dim("atoms", min=2)}, {0: torch.export.Dim("edges", min=2)}
    program = torch.export.export(graph, inputs, dynamic_shapes=(atoms, atoms, edges, edges, edges))
    return aoti_load_package(aoti_compile_and_package(program, package_path=str(folder / "plain.pt2")))


def peers_of(name: str, made: dict[str, Any], model: nn.Module, path: Path) -> dict[str, Callable[..., Peer]]:
    """Return how to call each peer: for inputs, a function without arguments that returns the gradient by positions."""
    compiled, native = load(path).grad(), abn.load(path, unchecked=True).grad()
    eager = made["Energies"](model) if name == "MACE" else model

    def of_arrays(inputs: tuple[torch.Tensor, ...]) -> Peer:
        arrays = [t.numpy() for t in inputs]
        return lambda: native(*arrays)[1]["positions"]

    peers: dict[str, Callable[..., Peer]] = {
        "eager": lambda inputs: lambda: gradient(eager, inputs),
        "ours": lambda inputs: lambda: compiled(*inputs)[1]["positions"],
        "ours, no PyTorch": of_arrays,
    }
    try:
        script = scripted(name, made, model)
        peers["TorchScript"] = lambda inputs: lambda: gradient(script, inputs)
    except Exception as error:  # of TorchScript, of any kind
        print(f"{name}: no TorchScript: {str(error).strip().splitlines()[0]}")
    try:
        dtype = next(model.parameters()).dtype
        examples = with_dtype(system(20, BOXES[20], 5.0, seed=1), dtype)[:5]
        plain = by_aot_inductor(
            made["Energies"](made["without_torchscript"](model)) if name == "MACE" else model, examples, path.parent
        )
        peers["AOTInductor"] = lambda inputs: lambda: plain(*inputs[:5])
    except Exception as error:  # of AOTInductor, of any kind
        print(f"{name}: no AOTInductor: {str(error).strip().splitlines()[0]}")
    return peers


def measure(name: str, dtype: torch.dtype, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each number of atoms."""
    file, _, kind = MODELS[name]
    made = load_example(file)
    model, exact = made["random_model"](dtype, *kind), made["random_model"](torch.float64, *kind)
    exact.load_state_dict(model.state_dict())
    entry, reference = made["entry"](model), made["entry"](exact).fn
    path, start = folder / "model.pt2", time.perf_counter()
    ab.export(path, {"energy": entry}, runtime="standalone")
    seconds, rows = time.perf_counter() - start, []
    peers = peers_of(name, made, model, path)
    for atoms, box in BOXES.items():
        inputs = system(atoms, box, float((entry.metadata or {})["cutoff"]), seed=atoms)
        inputs = (*inputs[:-1], torch.ones_like(inputs[-1]))
        expected, low = {"positions": in_eager(reference, inputs)["positions"]}, with_dtype(inputs, dtype)
        row = {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "atoms": atoms,
            "edges": len(inputs[2]),
            "export s": seconds,
        }
        row["package kB"] = path.stat().st_size / 1000
        calls, times = {}, dict[str, list[float]]()
        for peer, make in peers.items():
            call = make(low)
            for _ in range(5):  # TorchScript compiles in its first calls
                found = torch.as_tensor(np.asarray(call())).double()
            row[f"{peer}: error"] = errors({"positions": found}, expected)["positions"]
            calls[peer], times[peer] = call, []
        for _ in range(CALLS):
            for peer, call in calls.items():
                start = time.perf_counter()
                call()
                times[peer].append(1e3 * (time.perf_counter() - start))
        rows.append(row | {f"{peer}: ms": statistics.median(t) for peer, t in times.items()})
        print(rows[-1], flush=True)
    return rows


def page(rows: list[dict[str, Any]], training: list[dict[str, Any]]) -> str:
    """Return the rows, and those of training steps, as a page in Markdown."""
    peers = ["eager", "TorchScript", "AOTInductor", "ours", "ours, no PyTorch"]
    lines = [
        "# Force fields of public libraries",
        "",
        f"`make force-fields`, {datetime.date.today()}, torch {torch.__version__}, CPU, one thread. Models of `examples/forcefields`, with random",
        "weights.",
        "",
        "Milliseconds for energy and forces, the neighbor list given; in parentheses, how many times as fast as eager. TorchScript is the way by",
        "which the libraries deploy a model (`mace_create_lammps_model`, `spkdeploy`); AOTInductor is that of `nequip-compile`: `make_fx`,",
        "`torch.export` and AOTInductor, for this processor (ours is for AVX2). A dash: it does not take the model. *error*: the largest error of",
        "a force, relative to the largest force, against eager in float64.",
        "",
        f"| model | dtype | atoms | edges | {' | '.join(peers)} | error of eager | ours | ours, no PyTorch | export, s | package, kB |",
        "|---" * 14 + "|",
    ]
    for row in rows:
        ms = [row.get(f"{p}: ms") for p in peers]
        cells = [row["model"], row["dtype"], row["atoms"], row["edges"]]
        cells += ["–" if m is None else f"{m:.2f} ({ms[0] / m:.2f})" for m in ms]
        cells += [f"{row[f'{p}: error']:.1e}" for p in ("eager", "ours", "ours, no PyTorch")]
        lines.append(f"| {' | '.join(map(str, [*cells, round(row['export s']), round(row['package kB'])]))} |")
    return "\n".join([*lines, "", *force_field_training.table(training)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, required=True, help="path of the results, without suffix")
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the libraries' own
    torch.set_num_threads(1)
    file = options.docs.with_suffix(".json")
    rows: dict[str, list[dict[str, Any]]] = {
        "rows": [],
        "training": [],
        **(json.loads(file.read_text()) if file.exists() else {}),
    }
    for name in options.only.split(","):
        if importlib.util.find_spec(MODELS[name][1]) is None:
            print(f"{name}: left out, {MODELS[name][1]} is not installed")
            continue
        for dtype in (torch.float32, torch.float64):
            with tempfile.TemporaryDirectory() as folder:
                found = {"rows": measure(name, dtype, Path(folder))}
                found["training"] = force_field_training.measure(
                    name, MODELS[name][0], MODELS[name][2], dtype, Path(folder)
                )
            for part, new in found.items():
                rows[part] = [r for r in rows[part] if (r["model"], r["dtype"]) != (name, new[0]["dtype"])] + new
            options.docs.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
            options.docs.with_suffix(".md").write_text(page(**rows))
    print(page(**rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

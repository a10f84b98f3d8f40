"""``python -m tests.tools.coverage.fresh PACKAGE CALLS RESULTS``: run a package without a compiler and without
aot_backward.

``CALLS`` holds ``{"training", "seed", "imports", "calls"}``, a call ``{case name: {"inputs", "cotangents",
"differentiable"}}`` in the order of the package's members. ``RESULTS`` gets per call ``{case name: {"output[0]": …,
"gradient of input[0]": …, …}}``.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from typing import Any

import torch

import aot_backward_runtime


def main(package: str, calls: str, results: str) -> None:
    assert shutil.which("g++") is None, "a compiler is on the PATH"
    asked = torch.load(calls, weights_only=True)
    for module in asked["imports"]:
        importlib.import_module(module)
    torch.save([_run(package, call, asked["training"], asked["seed"]) for call in asked["calls"]], results)
    there = [m for m in ("aot_backward", "aot_backward_exporters") if m in sys.modules]
    assert not there, f"imported {there}"


def _run(package: str, call: dict[str, Any], training: bool, seed: int) -> dict[str, Any]:
    module = aot_backward_runtime.load(package).module().train(training)
    torch.manual_seed(seed)
    outputs = module({name: case["inputs"] for name, case in call.items()})
    found: dict[str, Any] = {}
    targets, roots, cotangents = {}, [], []
    for i, (name, case) in enumerate(call.items()):
        found[name] = {f"output[{j}]": t for j, t in enumerate(outputs[name])}
        roots += [outputs[name][j] for j in case["differentiable"]]
        cotangents += case["cotangents"]
        targets |= {(name, f"gradient of input[{j}]"): t for j, t in enumerate(case["inputs"]) if t.requires_grad}
        prefix = f"members.{i}."
        own = [
            (n.removeprefix(prefix), p)
            for n, p in module.named_parameters(remove_duplicate=False)
            if n.startswith(prefix)
        ]
        targets |= {(name, f"gradient of {n}"): p for n, p in own if p.requires_grad}
    gradients = torch.autograd.grad(roots, list(targets.values()), cotangents, allow_unused=True)
    for (name, value), gradient in zip(targets, gradients, strict=True):
        found[name][value] = gradient
    for i, name in enumerate(call):
        prefix = f"members.{i}."
        found[name] |= {
            f"buffer {n.removeprefix(prefix)}": b for n, b in module.named_buffers() if n.startswith(prefix)
        }
    return {
        name: {n: None if t is None else t.detach().clone() for n, t in values.items()}
        for name, values in found.items()
    }


if __name__ == "__main__":
    main(*sys.argv[1:])

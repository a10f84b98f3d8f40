"""Every compiled graph of a package runs under PyTorch's own ``AOTIModelPackageLoader``, as docs/format.md
describes."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from aot_backward_runtime import load

from ..support import exports, zoo
from ..support.versions import since


def _weights(package: Path) -> dict[str, torch.Tensor]:
    with zipfile.ZipFile(package) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("weights.safetensors")]
        return safetensors.torch.load(archive.read(name))


def _manifest(package: Path) -> dict[str, object]:
    with zipfile.ZipFile(package) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("extra/aot_backward/manifest.json")]
        return json.loads(archive.read(name))


@since("2.13", "does not find the libraries of a package that holds several: 'File not found: _metadata.json'")
@pytest.mark.parametrize("name", ["mlp", "conv", "embedding"])
def test_forward_and_backward(name: str) -> None:
    """Use only the file, the standard library and torch: read the plan from the manifest, and load the constants by
    name."""
    package = exports.module(name, dynamic=True)
    manifest, weights = _manifest(package), _weights(package)
    variant = manifest["entries"]["module"]["variants"][0]
    loaders = {}
    for graph, library in manifest["libraries"].items():
        loaders[graph] = torch._C._aoti.AOTIModelPackageLoader(str(package), graph, False, 1, -1)
        constants = {c["name"]: weights[c["weight"]] for c in library.get("constants", [])}
        if constants:
            loaders[graph].load_constants(constants, False, True, True)
    case = zoo.make(name)
    args = [a.detach() for a in case.args(4)]

    def call(plan: dict[str, object], **given: list[torch.Tensor]) -> list[torch.Tensor]:
        operands = [(kind, int(i)) for kind, i in (o.split(":") for o in plan["call"]["operands"])]
        return loaders[plan["call"]["library"]].run([given[kind][i] for kind, i in operands])

    results = call(variant["forward"], input=args)
    pick = {"result": results, "input": args}
    saved = [pick[kind][int(i)] for kind, i in (s.split(":") for s in variant["forward"].get("saved", []))]
    cotangent = torch.randn_like(results[0])
    gradients = call(variant["backward"], input=args, saved=saved, cotangent=[cotangent])
    mine = {g["of"]: gradients[int(g["source"].split(":")[1])] for g in variant["backward"]["gradients"] if g["source"]}

    model = load(package).module()
    inputs = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
    out = model(*inputs)
    torch.testing.assert_close(out, results[0])
    out.backward(cotangent)
    for parameter, value in model.named_parameters():
        torch.testing.assert_close(mine[f"parameter:{parameter}"], value.grad)
    assert len(mine) == len(list(model.parameters())) + sum(a.is_floating_point() for a in args)

"""``aot-backward inspect OUT.pt2``: what a package says of itself. Native code stays unopened, nothing is unpickled or compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .failures import EXIT_CODES, debug_option
from .tables import size, table

if TYPE_CHECKING:
    from aot_backward_runtime.archive import Archive
    from aot_backward_runtime.manifest import TensorSpec, VariantSpec


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@debug_option
def inspect(package: Path, as_json: bool) -> None:
    """Show the entries of OUT.pt2, their variants, guards and sizes, and what it was built for. Runs nothing of it.

    Sizes and structure are checked, digests are not: that is what verify does.
    """
    from aot_backward_runtime.archive import open_package

    described = _described(open_package(package))
    if as_json:
        click.echo(json.dumps(described, indent=2))
    else:
        _show(described)


def _described(archive: Archive) -> dict[str, Any]:
    manifest, members = archive.manifest, archive.members()
    libraries = {
        name: {
            "bytes": members[spec.member].size,
            "nodes": spec.nodes,
            "needed": list(spec.needed),
            "glibc": spec.glibc,
            "glibcxx": spec.glibcxx,
            "operators": list(spec.operators),
            "sha256": members[spec.member].sha256,
        }
        for name, spec in manifest.libraries.items()
    }
    entries = {
        name: {
            "kind": entry.kind,
            "parameters": sum(s.parameter for s in entry.state),
            "buffers": sum(not s.parameter for s in entry.state),
            "gradients": list(entry.names),
            "variants": [_variant(v) for v in entry.variants],
        }
        for name, entry in manifest.entries.items()
    }
    return {
        "path": str(archive.path),
        "bytes": archive.path.stat().st_size,
        "format_version": list(manifest.format_version),
        "producer": manifest.producer,
        "created": manifest.created,
        "torch": manifest.torch,
        "target": dataclasses.asdict(manifest.target),
        "entries": entries,
        "libraries": libraries,
        "weights": {
            "stored": manifest.has_weights,
            "bytes": _weight_bytes(archive),
            "tensors": {name: {"dtype": w.dtype, "shape": list(w.shape), "sha256": w.sha256} for name, w in manifest.weights.items()},
        },
        "members": {name: dataclasses.asdict(member) for name, member in members.items()},
        "manifest_sha256": archive.manifest_digest,
    }


def _variant(variant: VariantSpec) -> dict[str, Any]:
    from aot_backward_runtime.guards import Contract
    from aot_backward_runtime.tree import describe, signature

    contract = Contract(variant.inputs, variant.symbols, variant.guards)
    return {
        "mode": variant.mode,
        "arguments": signature(variant.in_tree, variant.argument_names),
        "returns": describe(variant.out_tree),
        "inputs": [_tensor(s, contract) for s in variant.inputs],
        "outputs": [_tensor(s, contract) for s in variant.outputs],
        "sizes": {contract.words(s.name): {"minimum": s.minimum, "maximum": s.maximum} for s in variant.symbols},
        "guards": [contract.words(g) for g in variant.guards],
        "ambient": dataclasses.asdict(variant.ambient),
        "verdict": dataclasses.asdict(variant.verdict),
    }


def _tensor(spec: TensorSpec, contract: Any) -> dict[str, Any]:
    shape = [s if isinstance(s, int) else contract.words(s) for s in spec.shape]
    return {"name": spec.name, "dtype": spec.dtype, "device": spec.device, "shape": shape, "requires_grad": spec.requires_grad}


def _weight_bytes(archive: Archive) -> int:
    from aot_backward_runtime.manifest import WEIGHTS_MEMBER

    return archive.members()[WEIGHTS_MEMBER].size if archive.manifest.has_weights else 0


def _show(d: dict[str, Any]) -> None:
    target, weights = d["target"], d["weights"]
    arch = " ".join(filter(None, (target["device"], target["machine"], target["march"], target["cuda_arch"])))
    version = ".".join(map(str, d["format_version"]))
    click.echo(f"{d['path']}: {size(d['bytes'])}, format {version}, {d['producer']}, {d['created'] or 'no date'}")
    click.echo(f"built for {arch} with torch {d['torch']}; manifest SHA-256 {d['manifest_sha256']}")
    stored = size(weights["bytes"]) if weights["stored"] else "not in the package: load(path, weights={…})"
    click.echo(f"weights: {len(weights['tensors'])} tensors, {stored}")
    for name, entry in d["entries"].items():
        click.echo(f"\nentry {name!r}: {entry['kind']}, {entry['parameters']} parameters, {entry['buffers']} buffers")
        if entry["gradients"]:
            click.echo(f"  gradients of {', '.join(entry['gradients'])}")
        for i, v in enumerate(entry["variants"]):
            _show_variant(i, v)
    table(
        "native libraries",
        ("graph", "size", "nodes", "GLIBC", "GLIBCXX", "needs", "SHA-256"),
        [(n, size(x["bytes"]), x["nodes"], x["glibc"], x["glibcxx"], " ".join(x["needed"]), x["sha256"][:16]) for n, x in d["libraries"].items()],
    )


def _show_variant(number: int, v: dict[str, Any]) -> None:
    verdict, mode = v["verdict"], f", {v['mode']} mode" if v["mode"] else ""
    click.echo(f"  variant {number}{mode}: {v['arguments']} -> {v['returns']}")
    for kind in ("inputs", "outputs"):
        for t in v[kind]:
            gradient = ", gets a gradient" if kind == "inputs" and t["requires_grad"] else ""
            click.echo(f"    {kind[:-1]} {t['name']}: {t['dtype']} ({', '.join(map(str, t['shape']))}) on {t['device']}{gradient}")
    for label, bounds in v["sizes"].items():
        top = "" if bounds["maximum"] is None else f" to {bounds['maximum']}"
        click.echo(f"    {label}: from {bounds['minimum']}{top}")
    for guard in v["guards"]:
        click.echo(f"    only where {guard}")
    if v["ambient"]["autocast"]:
        click.echo(f"    under autocast {v['ambient']['autocast']}")
    worst = f", worst {verdict['worst']} at {verdict['error']:.2g} of what is allowed" if verdict["worst"] else ""
    sizes = f", at {'; '.join(verdict['sizes'])}" if verdict["sizes"] else ""
    click.echo(f"    compared with eager: {verdict['status']}{worst}{sizes}")

"""A package as a JSON object. Native code stays unopened, nothing is unpickled or compiled."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aot_backward_runtime.format.manifest import (
        ClippingSpec,
        EntrySpec,
        LibrarySpec,
        Manifest,
        NumberSpec,
        PassSpec,
        StepSpec,
        StructureSpec,
        SymbolSpec,
        TensorSpec,
        UpdateSpec,
        VariantSpec,
    )
    from aot_backward_runtime.package.archive import Archive


def describe(archive: Archive) -> dict[str, Any]:
    """The object that ``inspect --json`` prints."""
    from aot_backward_runtime.format.manifest_json import SEALED_SINCE
    from aot_backward_runtime.package.signatures import signature_beside
    from aot_backward_runtime.package.targets import standalone_by_target, targets_of

    manifest, members, signature = archive.manifest, archive.members(), signature_beside(archive.path)
    targets = targets_of(manifest)
    libraries = {
        name: {
            "bytes": members[spec.member].size,
            "nodes": spec.nodes,
            "needed": list(spec.needed),
            "glibc": spec.glibc,
            "glibcxx": spec.glibcxx,
            "operators": list(spec.operators),
            "sha256": members[spec.member].sha256,
            "builds": [
                {"target": t.label, "bytes": members[b.member].size}
                for t, b in zip(targets, spec.every_build, strict=True)
            ],
            "graph_bytes": members[spec.graph].size if spec.graph else None,
        }
        for name, spec in manifest.libraries.items()
    }
    entries = {
        name: {
            "kind": entry.kind,
            "metadata": entry.json_metadata,
            "parameters": sum(s.parameter for s in entry.program_state),
            "buffers": sum(not s.parameter for s in entry.program_state),
            "gradients": list(entry.names),
            "variants": [_variant(v, entry) for v in entry.variants],
            "structures": [_structure(s) for s in entry.structures],
            "updates": [_update(u) for u in entry.updates],
            "clippings": [_clipping(c, manifest.libraries[c.library]) for c in entry.clippings],
            "step": _step(entry, entry.step, manifest) if entry.step else None,
            "layers": [dataclasses.asdict(layer) for layer in entry.layers],
            "standalone": standalone_by_target(manifest, name),
        }
        for name, entry in manifest.entries.items()
    }
    return {
        "path": str(archive.path),
        "bytes": archive.path.stat().st_size,
        "signature": None if signature is None else str(signature),
        "format_version": list(manifest.format_version),
        "producer": manifest.producer,
        "created": manifest.created,
        "torch": manifest.torch,
        "target": dataclasses.asdict(manifest.target),
        "targets": [dataclasses.asdict(t) for t in targets],
        "metadata": json.loads(manifest.metadata or "{}"),
        "notes": manifest.notes,
        "entries": entries,
        "libraries": libraries,
        "operators": {name: dataclasses.asdict(spec) for name, spec in manifest.operators.items()},
        "weights": {
            "stored": manifest.has_weights,
            "bytes": _weight_bytes(archive),
            "tensors": {
                name: {"dtype": w.dtype, "shape": list(w.shape), "sha256": w.sha256}
                for name, w in manifest.weights.items()
            },
        },
        "members": {name: dataclasses.asdict(member) for name, member in members.items()},
        "manifest_sha256": archive.manifest_digest,
        "manifest_has_digest": manifest.format_version >= SEALED_SINCE,
    }


def _update(update: UpdateSpec) -> dict[str, Any]:
    from aot_backward_runtime.format.manifest_json import plain
    from aot_backward_runtime.format.param_groups import options_of

    return {
        "optimizer": update.optimizer,
        "groups": [
            {
                "parameters": len(g.parameters),
                "options": options_of(g),
                "numbers": [_number(v) for v in update.numbers if v.group == n],
            }
            for n, g in enumerate(update.groups)
        ],
        "trained": len(update.trained),
        "state": sorted({s.key for s in update.state}),
        "library": update.library,
        "verdict": dataclasses.asdict(update.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in update.verdicts],
        "speed": plain(update.speed),
    }


def _clipping(clipping: ClippingSpec, library: LibrarySpec) -> dict[str, Any]:
    from aot_backward_runtime.format.manifest_json import plain

    return {
        "function": clipping.function,
        "norm_type": clipping.norm_type or None,
        "gradients": len(library.inputs) - 1,
        "library": clipping.library,
        "verdict": dataclasses.asdict(clipping.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in clipping.verdicts],
        "speed": plain(clipping.speed),
    }


def _step(entry: EntrySpec, step: StepSpec, manifest: Manifest) -> dict[str, Any]:
    from aot_backward_runtime.format.param_groups import options_of
    from aot_backward_runtime.native.guards import dtype_of

    keys = {s.name: s.weight for s in entry.state}

    def tensors(names: Iterable[str]) -> dict[str, int]:
        specs = [manifest.weights[w] for w in {keys[n] for n in names}]
        return {"tensors": len(specs), "bytes": sum(math.prod(s.shape) * dtype_of(s.dtype).itemsize for s in specs)}

    numbers = [[n for n in step.numbers if n.group == g] for g in range(-1, len(step.groups))]
    clip_numbers = {n.key: n.value for n in numbers[0]}
    return {
        "optimizer": step.optimizer,
        "steps_made_at_export": not step.fresh,
        "groups": [
            {"parameters": list(g.parameters), "options": options_of(g), "numbers": [_number(n) for n in group_numbers]}
            for g, group_numbers in zip(step.groups, numbers[1:], strict=True)
        ],
        "state": tensors(s.state for s in step.state),
        "gradients_can_wait": step.update is not None,
        "gradients": tensors(g.state for g in step.gradients),
        "clip_norm": clip_numbers.get("clip_norm"),
        "clip_value": clip_numbers.get("clip_value"),
        "loss_scale": clip_numbers.get("loss_scale"),
        "ema": clip_numbers.get("ema"),
        "skip_nonfinite": step.finite,
    }


def _number(number: NumberSpec) -> dict[str, Any]:
    """``allowed``: the intervals in which the compiled code is right; none: everywhere."""
    label = number.key if number.position < 0 else f"{number.key}[{number.position}]"
    return {"name": label, "value": number.value, "allowed": [dataclasses.asdict(i) for i in number.allowed]}


def _variant(variant: VariantSpec, entry: EntrySpec) -> dict[str, Any]:
    from aot_backward.onnx.arguments import argument_names
    from aot_backward_runtime.format.manifest_json import plain
    from aot_backward_runtime.native import pytree
    from aot_backward_runtime.native.guards import Contract

    contract = Contract(variant.inputs, variant.symbols, variant.guards)
    return {
        "mode": variant.mode,
        "arguments": pytree.signature(variant.in_tree, variant.argument_names),
        "returns": pytree.describe(variant.out_tree),
        "inputs": [
            _tensor(s, contract) | {"onnx": n}
            for s, n in zip(variant.inputs, argument_names(entry, variant), strict=True)
        ],
        "outputs": [_tensor(s, contract) for s in variant.outputs],
        "sizes": {contract.words(s.name): {"minimum": s.minimum, "maximum": s.maximum} for s in variant.symbols},
        "guards": [contract.words(g) for g in variant.guards],
        "gradients": _gradients(variant),
        "order": len(variant.orders),
        "ambient": dataclasses.asdict(variant.ambient),
        "verdict": dataclasses.asdict(variant.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in variant.verdicts],
        "speed": plain(variant.speed) if variant.speed else None,
    }


def _gradients(variant: VariantSpec) -> list[str]:
    """The inputs and parameters that a module's variant has gradients of."""
    targets = [g.of.partition(":") for g in variant.backward.gradients] if variant.backward else []
    return [variant.inputs[int(key)].name if kind == "input" else key for kind, _, key in targets]


def _structure(structure: StructureSpec) -> dict[str, Any]:
    return {
        "fingerprint": structure.fingerprint,
        "nodes": list(structure.nodes),
        "operations": structure.operations,
        "seconds_uncompiled": structure.seconds,
        "variants": [_pass(v) for v in structure.variants],
    }


def _pass(spec: PassSpec) -> dict[str, Any]:
    from aot_backward.report.entries import steps_in_words
    from aot_backward_runtime.format.manifest_json import plain
    from aot_backward_runtime.passes.pass_contract import PassContract

    contract = PassContract(spec)
    return {
        "inputs": [dataclasses.asdict(s) for s in spec.inputs],
        "sizes": list(spec.sizes),
        "scalars": list(spec.scalars),
        "symbols": [dataclasses.asdict(s) | {"read_from": _place(s, spec)} for s in spec.symbols],
        "guards": list(spec.guards),
        "guards_in_words": [contract.words(g) for g in spec.guards],
        "segments": [dataclasses.asdict(s) for s in spec.segments],
        "steps": list(steps_in_words(spec)),
        "ambient": dataclasses.asdict(spec.ambient),
        "verdict": dataclasses.asdict(spec.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in spec.verdicts],
        "speed": plain(spec.speed) if spec.speed else None,
    }


def _place(symbol: SymbolSpec, spec: PassSpec) -> str:
    return (
        f"size {symbol.dim} of the pass"
        if symbol.input < 0
        else f"{spec.inputs[symbol.input].name}.shape[{symbol.dim}]"
    )


def _tensor(spec: TensorSpec, contract: Any) -> dict[str, Any]:
    shape = [s if isinstance(s, int) else contract.words(s) for s in spec.shape]
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "device": spec.device,
        "shape": shape,
        "requires_grad": spec.requires_grad,
    }


def _weight_bytes(archive: Archive) -> int:
    from aot_backward_runtime.format.manifest import WEIGHTS_MEMBER

    return archive.members()[WEIGHTS_MEMBER].size if archive.manifest.has_weights else 0

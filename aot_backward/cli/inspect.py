"""``aot-backward inspect OUT.pt2``: what a package says of itself. Native code stays unopened, nothing is unpickled or compiled."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .support.failures import EXIT_CODES, debug_option
from .support.tables import count, say, say_json, size, table

if TYPE_CHECKING:
    from aot_backward_runtime.format.manifest import (
        EntrySpec,
        Manifest,
        NumberSpec,
        PassSpec,
        Segment,
        StateSpec,
        StepSpec,
        StructureSpec,
        SymbolSpec,
        TensorSpec,
        VariantSpec,
    )
    from aot_backward_runtime.package.archive import Archive


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option("--html", type=click.Path(path_type=Path), metavar="REPORT.html", help="A page to look at, with memory and graphs, in one file.")
@debug_option
def inspect(package: Path, as_json: bool, html: Path | None) -> None:
    """Show the entries of OUT.pt2, their variants, guards and sizes, recorded passes, and what it was built for. Runs nothing of it.

    Sizes and structure are checked, digests are not (but for those of graphs that are drawn): that is what verify does.
    """
    if html is not None and as_json:
        raise click.UsageError("--json and --html exclude each other: call inspect twice.")
    if html is not None and html.resolve() == package.resolve():
        raise click.UsageError(f"--html would write the report over the package {package}.")
    from aot_backward_runtime.package.archive import open_package

    if html is not None:
        _write_report(open_package(package), html)
        return
    described = _described(open_package(package))
    if as_json:
        say_json(described)
    else:
        _show(described)


def _write_report(archive: Archive, path: Path) -> None:
    from aot_backward.report import report
    from aot_backward_runtime.errors import AotBackwardError
    from aot_backward_runtime.format.atomic_file import replacing

    text = report(archive).encode()
    try:
        with replacing(path.resolve()) as file:
            file.write(text)
    except OSError as error:
        raise AotBackwardError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
    graphs = sum(bool(spec.graph) for spec in archive.manifest.libraries.values())
    say(f"wrote {path} ({size(len(text))}): {count(len(archive.manifest.entries), 'entry', 'entries')}, {count(graphs, 'graph')}")


def _described(archive: Archive) -> dict[str, Any]:
    from aot_backward_runtime.package.signature_policy import signature_beside
    from aot_backward_runtime.package.targets import targets_of

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
            "builds": [{"target": t.label, "bytes": members[b.member].size} for t, b in zip(targets, spec.every_build, strict=True)],
            "graph_bytes": members[spec.graph].size if spec.graph else None,
        }
        for name, spec in manifest.libraries.items()
    }
    entries = {
        name: {
            "kind": entry.kind,
            "parameters": sum(s.parameter for s in _of_the_program(entry)),
            "buffers": sum(not s.parameter for s in _of_the_program(entry)),
            "gradients": list(entry.names),
            "variants": [_variant(v, entry) for v in entry.variants],
            "structures": [_structure(s) for s in entry.structures],
            "step": _step(entry, entry.step, manifest) if entry.step else None,
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
        "notes": manifest.notes,
        "entries": entries,
        "libraries": libraries,
        "operators": {name: dataclasses.asdict(spec) for name, spec in manifest.operators.items()},
        "weights": {
            "stored": manifest.has_weights,
            "bytes": _weight_bytes(archive),
            "tensors": {name: {"dtype": w.dtype, "shape": list(w.shape), "sha256": w.sha256} for name, w in manifest.weights.items()},
        },
        "members": {name: dataclasses.asdict(member) for name, member in members.items()},
        "manifest_sha256": archive.manifest_digest,
    }


def _of_the_program(entry: EntrySpec) -> list[StateSpec]:
    """The program's parameters and buffers, without what a training step adds to them."""
    step = entry.step
    added = {"numbers", *(s.state for s in step.state), *(g.state for g in step.gradients)} if step else set()
    return [s for s in entry.state if s.name not in added]


def _step(entry: EntrySpec, step: StepSpec, manifest: Manifest) -> dict[str, Any]:
    from aot_backward_runtime.format.param_groups import options_of
    from aot_backward_runtime.native.guards import dtype_of

    keys = {s.name: s.weight for s in entry.state}

    def tensors(names: Iterable[str]) -> dict[str, int]:
        specs = [manifest.weights[w] for w in {keys[n] for n in names}]
        return {"tensors": len(specs), "bytes": sum(math.prod(s.shape) * dtype_of(s.dtype).itemsize for s in specs)}

    numbers = [[n for n in step.numbers if n.group == g] for g in range(-1, len(step.groups))]
    clips = {n.key: n.value for n in numbers[0]}
    return {
        "optimizer": step.optimizer,
        "steps_made_at_export": not step.fresh,
        "groups": [
            {"parameters": list(g.parameters), "options": options_of(g), "numbers": [_number(n) for n in own]}
            for g, own in zip(step.groups, numbers[1:], strict=True)
        ],
        "state": tensors(s.state for s in step.state),
        "gradients_can_wait": step.update is not None,
        "gradients": tensors(g.state for g in step.gradients),
        "clip_norm": clips.get("clip_norm"),
        "clip_value": clips.get("clip_value"),
        "loss_scale": clips.get("loss_scale"),
        "skip_nonfinite": step.finite,
    }


def _number(number: NumberSpec) -> dict[str, Any]:
    """``allowed``: the intervals in which the compiled code holds; none: everywhere."""
    label = number.key if number.position < 0 else f"{number.key}[{number.position}]"
    return {"name": label, "value": number.value, "allowed": [dataclasses.asdict(i) for i in number.allowed]}


def _variant(variant: VariantSpec, entry: EntrySpec) -> dict[str, Any]:
    from aot_backward.onnx.arguments import argument_names
    from aot_backward_runtime.native.guards import Contract
    from aot_backward_runtime.native.pytree import describe, signature

    contract = Contract(variant.inputs, variant.symbols, variant.guards)
    return {
        "mode": variant.mode,
        "arguments": signature(variant.in_tree, variant.argument_names),
        "returns": describe(variant.out_tree),
        "inputs": [_tensor(s, contract) | {"onnx": n} for s, n in zip(variant.inputs, argument_names(entry, variant), strict=True)],
        "outputs": [_tensor(s, contract) for s in variant.outputs],
        "sizes": {contract.words(s.name): {"minimum": s.minimum, "maximum": s.maximum} for s in variant.symbols},
        "guards": [contract.words(g) for g in variant.guards],
        "gradients": _gradients(variant),
        "order": len(variant.orders),
        "ambient": dataclasses.asdict(variant.ambient),
        "verdict": dataclasses.asdict(variant.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in variant.verdicts],
    }


def _gradients(variant: VariantSpec) -> list[str]:
    """What a module's variant has gradients of."""
    found = [g.of.partition(":") for g in variant.backward.gradients] if variant.backward else []
    return [variant.inputs[int(where)].name if kind == "input" else where for kind, _, where in found]


def _structure(structure: StructureSpec) -> dict[str, Any]:
    return {
        "fingerprint": structure.fingerprint,
        "nodes": list(structure.nodes),
        "operations": structure.operations,
        "seconds_uncompiled": structure.seconds,
        "variants": [_pass(v) for v in structure.variants],
    }


def _pass(spec: PassSpec) -> dict[str, Any]:
    from aot_backward_runtime.passes.compiled_pass import PassContract

    contract = PassContract(spec)
    return {
        "inputs": [dataclasses.asdict(s) for s in spec.inputs],
        "sizes": list(spec.sizes),
        "scalars": list(spec.scalars),
        "symbols": [dataclasses.asdict(s) | {"read_from": _place(s, spec)} for s in spec.symbols],
        "guards": list(spec.guards),
        "guards_in_words": [contract.words(g) for g in spec.guards],
        "segments": [dataclasses.asdict(s) for s in spec.segments],
        "steps": _steps(spec.segments),
        "ambient": dataclasses.asdict(spec.ambient),
        "verdict": dataclasses.asdict(spec.verdict),
        "further_verdicts": [dataclasses.asdict(v) for v in spec.verdicts],
    }


def _place(symbol: SymbolSpec, spec: PassSpec) -> str:
    return f"size {symbol.dim} of the pass" if symbol.input < 0 else f"{spec.inputs[symbol.input].name}.shape[{symbol.dim}]"


def _steps(segments: tuple[Segment, ...]) -> list[str]:
    """The segments in words, neighbours that run without native code together."""
    out = []
    for kind, group in groupby(segments, lambda s: s.library or (("leaf",) if s.operands else ("as it stands",))):
        steps = list(group)
        if isinstance(kind, str):
            out += [f"{kind} ({count(len(s.ops), 'operation')})" for s in steps]
        elif kind == ("leaf",):
            out.append(f"{count(len(steps), 'gradient')} handed to the leaves")
        else:
            out.append(f"{count(len(steps), 'operation')} as recorded (hooks, custom functions, leaves)")
    return out


def _tensor(spec: TensorSpec, contract: Any) -> dict[str, Any]:
    shape = [s if isinstance(s, int) else contract.words(s) for s in spec.shape]
    return {"name": spec.name, "dtype": spec.dtype, "device": spec.device, "shape": shape, "requires_grad": spec.requires_grad}


def _weight_bytes(archive: Archive) -> int:
    from aot_backward_runtime.format.manifest import WEIGHTS_MEMBER

    return archive.members()[WEIGHTS_MEMBER].size if archive.manifest.has_weights else 0


def _show(d: dict[str, Any]) -> None:
    weights, targets = d["weights"], d["targets"]
    arch = ", ".join(" ".join(filter(None, (t["device"], t["machine"], t["march"], t["cuda_arch"]))) for t in targets)
    version = ".".join(map(str, d["format_version"]))
    say(f"{d['path']}: {size(d['bytes'])}, format {version}, {d['producer']}, {d['created'] or 'no date'}")
    say(f"built for {arch} with torch {d['torch']}; manifest SHA-256 {d['manifest_sha256']}")
    say(f"signature: {d['signature']}, not looked at; verify --key PUBLIC.pem does" if d["signature"] else "signature: none beside it")
    stored = size(weights["bytes"]) if weights["stored"] else "not in the package: load(path, weights={…})"
    say(f"weights: {len(weights['tensors'])} tensors, {stored}")
    for what, note in d["notes"].items():
        say(f"{what}: {note}")
    for operator, by in d["operators"].items():
        say(f"calls {operator}, registered by {by['module'] or by['file'] or 'an unknown library'}{_to_import(by['module'])}")
    names = [t["name"] or t["device"] for t in targets]
    for name, entry in d["entries"].items():
        if entry["kind"] == "replay":
            say(f"\nentry {name!r}: replay, backward passes of {count(len(entry['structures']), 'structure')}")
            for structure in entry["structures"]:
                _show_structure(structure, names)
            continue
        say(f"\nentry {name!r}: {entry['kind']}, {entry['parameters']} parameters, {entry['buffers']} buffers")
        if entry["gradients"]:
            say(f"  gradients of {', '.join(entry['gradients'])}")
        if entry["step"]:
            _show_step(entry["step"])
        for i, v in enumerate(entry["variants"]):
            _show_variant(i, v, names)
    if len(names) > 1:
        rows = [(n, *(size(b["bytes"]) for b in x["builds"])) for n, x in d["libraries"].items()]
        table("native code for each target", ("graph", *names), rows)
    table(
        "native libraries",
        ("graph", "size", "nodes", "GLIBC", "GLIBCXX", "needs", "SHA-256"),
        [(n, size(x["bytes"]), x["nodes"], x["glibc"], x["glibcxx"], " ".join(x["needed"]), x["sha256"][:16]) for n, x in d["libraries"].items()],
    )


def _to_import(module: str) -> str:
    if module in ("", "__main__"):
        return " when it was exported"
    return f", which load does not import by itself: load(path, imports=[{module!r}]), --import {module}"


def _show_variant(number: int, v: dict[str, Any], targets: list[str]) -> None:
    mode = f", {v['mode']} mode" if v["mode"] else ""
    say(f"  variant {number}{mode}: {v['arguments']} -> {v['returns']}")
    for kind in ("inputs", "outputs"):
        for t in v[kind]:
            gradient = ", gets a gradient" if kind == "inputs" and t["requires_grad"] else ""
            onnx = f"; {t['onnx']} in ONNX graphs" if t.get("onnx", t["name"]) != t["name"] else ""
            say(f"    {kind[:-1]} {t['name']}: {t['dtype']} ({', '.join(map(str, t['shape']))}) on {t['device']}{gradient}{onnx}")
    for label, bounds in v["sizes"].items():
        top = "" if bounds["maximum"] is None else f" to {bounds['maximum']}"
        say(f"    {label}: from {bounds['minimum']}{top}")
    _show_conditions(v["guards"], v["ambient"], "    ")
    if v["gradients"]:
        names = v["gradients"] if len(v["gradients"]) <= 8 else [*v["gradients"][:7], f"{len(v['gradients']) - 7} more"]
        again = "" if v["order"] == 1 else f", differentiable up to order {v['order']}"
        say(f"    gradients of {', '.join(names)}{again}")
    for target, verdict in zip(targets, (v["verdict"], *v["further_verdicts"]), strict=True):
        say(f"    compared with eager{f', {target}' if len(targets) > 1 else ''}: {_verdict(verdict)}")


def _show_step(s: dict[str, Any]) -> None:
    state, gradients = s["state"], s["gradients"]
    made = "after steps that it made before the export" if s["steps_made_at_export"] else "before its first step"
    say(f"  optimizer {s['optimizer']}, {made}; {count(state['tensors'], 'tensor')} of state, {size(state['bytes'])}")
    for i, group in enumerate(s["groups"]):
        moved = {n["name"].partition("[")[0] for n in group["numbers"]}
        numbers = ", ".join(f"{n['name']} {n['value']:g}{_limits(n['allowed'])}" for n in group["numbers"])
        fixed = ", ".join(f"{k} {v}" for k, v in group["options"].items() if k not in moved)
        say(f"  group {i} of {count(len(group['parameters']), 'parameter')}: {numbers or 'no number that a schedule may move'}")
        if fixed:
            say(f"    fixed: {fixed}")
    for key, what in (("clip_norm", "norm"), ("clip_value", "elements")):
        if s[key] is not None:
            say(f"  clips the gradients' {what} at {s[key]:g}")
    if s["loss_scale"] is not None:
        say(f"  scales the loss, at first by {s['loss_scale']:g}, as torch.amp.GradScaler")
    if s["skip_nonfinite"]:
        say("  skips an update whose gradients have Inf or NaN")
    if s["gradients_can_wait"]:
        kept = f"{count(gradients['tensors'], 'tensor')}, {size(gradients['bytes'])}"
        say(f"  gradients can wait (update=False, several processes): {kept}")
    else:
        say("  gradients cannot wait: every call is an update, in one process")


def _limits(allowed: list[dict[str, Any]]) -> str:
    """Where a number may be moved to, `` (not 0)``; nothing where it may be any."""
    if len(allowed) == 2:
        below, above = allowed
        if below["low"] is None and above["high"] is None and below["high"] == above["low"] and below["high_open"] and above["low_open"]:
            return f" (not {below['high']:g})"
    words = " or ".join(filter(None, map(_interval, allowed)))
    return f" ({words})" if words else ""


def _interval(interval: dict[str, Any]) -> str:
    low, high = interval["low"], interval["high"]
    if low is not None and low == high:
        return f"only {low:g}"
    bounds = [f"{'above' if interval['low_open'] else 'from'} {low:g}"] if low is not None else []
    bounds += [f"{'below' if interval['high_open'] else 'to'} {high:g}"] if high is not None else []
    return " and ".join(bounds)


def _show_structure(s: dict[str, Any], targets: list[str]) -> None:
    counts = Counter(n.rpartition("::")[2] for n in s["nodes"])
    seconds = f", {s['seconds_uncompiled'] * 1e6:.0f} µs uncompiled" if s["seconds_uncompiled"] else ""
    say(f"  structure {s['fingerprint'][:12]}: {count(len(s['nodes']), 'node')}, {count(s['operations'], 'operation')}{seconds}")
    say(f"    {', '.join(n if k == 1 else f'{n} x{k}' for n, k in counts.items())}")
    for i, v in enumerate(s["variants"]):
        scalars = f", {count(len(v['scalars']), 'scalar')}" if v["scalars"] else ""
        say(f"    variant {i}: {count(len(v['inputs']), 'tensor')}, {count(len(v['sizes']), 'size')}{scalars}")
        for symbol in v["symbols"]:
            scaled = f"{symbol['scale']} * " if symbol["scale"] != 1 else ""
            offset = f" + {symbol['offset']}" if symbol["offset"] else ""
            label = f" ({symbol['label']})" if symbol["label"] != symbol["name"] else ""
            top = "" if symbol["maximum"] is None else f" to {symbol['maximum']}"
            say(f"      {symbol['read_from']} = {scaled}{symbol['name']}{offset}{label}: from {symbol['minimum']}{top}")
        _show_conditions(v["guards_in_words"], v["ambient"], "      ")
        say(f"      runs {', then '.join(v['steps']) or 'nothing'}")
        for target, verdict in zip(targets, (v["verdict"], *v["further_verdicts"]), strict=True):
            say(f"      compared with the recorded numbers{f', {target}' if len(targets) > 1 else ''}: {_verdict(verdict)}")


def _show_conditions(guards: list[str], ambient: dict[str, Any], indent: str) -> None:
    for guard in guards:
        say(f"{indent}only where {guard}")
    if ambient["autocast"]:
        say(f"{indent}under autocast {ambient['autocast']}")


def _verdict(verdict: dict[str, Any]) -> str:
    worst = f", worst {verdict['worst']} at {verdict['error']:.2g} of what is allowed" if verdict["worst"] else ""
    sizes = f", at {'; '.join(verdict['sizes'])}" if verdict["sizes"] else ""
    return f"{verdict['status']}{worst}{sizes}"

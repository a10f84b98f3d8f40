"""The description of a package, printed."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from aot_backward.report.wording import pass_speed_in_words, speed_in_words, standalone_in_words
from aot_backward_runtime.format.manifest import Speed
from aot_backward_runtime.format.manifest_json import read_as

from ..support.tables import count, say, size, table


def print_description(d: dict[str, Any]) -> None:
    """``d``: of :func:`.describe.describe`."""
    weights, targets = d["weights"], d["targets"]
    arch = ", ".join(" ".join(filter(None, (t["device"], t["machine"], t["march"], t["cuda_arch"]))) for t in targets)
    version = ".".join(map(str, d["format_version"]))
    say(f"{d['path']}: {size(d['bytes'])}, format {version}, {d['producer']}, {d['created'] or 'no date'}")
    say(f"built for {arch} with torch {d['torch']}; manifest SHA-256 {d['manifest_sha256']}")
    if not d["manifest_has_digest"]:
        say(
            f"format {version} has no digest of its manifest within the package, only a CRC; formats since 1.15 have one"
        )
    say(
        f"signature: {d['signature']}, not checked; verify --key PUBLIC.pem checks it"
        if d["signature"]
        else "signature: none next to the package"
    )
    stored = size(weights["bytes"]) if weights["stored"] else "not in the package: load(path, weights={…})"
    say(f"weights: {len(weights['tensors'])} tensors, {stored}")
    if d["metadata"]:
        say(f"metadata: {json.dumps(d['metadata'], ensure_ascii=False)}")
    for topic, note in d["notes"].items():
        say(f"{topic}: {note}")
    for operator, by in d["operators"].items():
        say(
            f"calls {operator}, registered by {by['module'] or by['file'] or 'an unknown library'}{_to_import(by['module'])}"
        )
    names = [t["name"] or t["device"] for t in targets]
    for name, entry in d["entries"].items():
        if entry["kind"] == "replay":
            say(f"\nentry {name!r}: replay, backward passes of {count(len(entry['structures']), 'structure')}")
            for structure in entry["structures"]:
                _show_structure(structure, names)
            for update in entry["updates"]:
                _show_update(update, names)
            for clipping in entry["clippings"]:
                _show_clipping(clipping, names)
            continue
        say(f"\nentry {name!r}: {entry['kind']}, {entry['parameters']} parameters, {entry['buffers']} buffers")
        if entry["metadata"]:
            say(f"  metadata: {json.dumps(entry['metadata'], ensure_ascii=False)}")
        if entry["gradients"]:
            say(f"  gradients of {', '.join(entry['gradients'])}")
        say(f"  without PyTorch: {standalone_in_words(entry['standalone'])}")
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
        [
            (n, size(x["bytes"]), x["nodes"], x["glibc"], x["glibcxx"], " ".join(x["needed"]), x["sha256"][:16])
            for n, x in d["libraries"].items()
        ],
    )


def _to_import(module: str) -> str:
    if module in ("", "__main__"):
        return " when it was exported"
    return f"; load does not import it by itself: use load(path, imports=[{module!r}]) or --import {module}"


def _show_variant(number: int, v: dict[str, Any], targets: list[str]) -> None:
    mode = f", {v['mode']} mode" if v["mode"] else ""
    say(f"  variant {number}{mode}: {v['arguments']} -> {v['returns']}")
    for kind in ("inputs", "outputs"):
        for t in v[kind]:
            gradient = ", gets a gradient" if kind == "inputs" and t["requires_grad"] else ""
            onnx = f"; {t['onnx']} in ONNX graphs" if t.get("onnx", t["name"]) != t["name"] else ""
            say(
                f"    {kind[:-1]} {t['name']}: {t['dtype']} ({', '.join(map(str, t['shape']))}) on {t['device']}{gradient}{onnx}"
            )
    for label, bounds in v["sizes"].items():
        top = "" if bounds["maximum"] is None else f" to {bounds['maximum']}"
        say(f"    {label}: from {bounds['minimum']}{top}")
    _show_conditions(v["guards"], v["ambient"], "    ")
    if v["gradients"]:
        names = v["gradients"] if len(v["gradients"]) <= 8 else [*v["gradients"][:7], f"{len(v['gradients']) - 7} more"]
        suffix = "" if v["order"] == 1 else f", differentiable up to order {v['order']}"
        say(f"    gradients of {', '.join(names)}{suffix}")
    for target, verdict in zip(targets, (v["verdict"], *v["further_verdicts"]), strict=True):
        say(f"    compared with eager{f', {target}' if len(targets) > 1 else ''}: {_verdict(verdict)}")
    if v["speed"]:
        say("    timed when it was exported:")
    for words in speed_in_words(read_as(Speed, v["speed"])) if v["speed"] else ():
        say(f"      {words}")


def _show_step(s: dict[str, Any]) -> None:
    state, gradients = s["state"], s["gradients"]
    origin = "after steps made before the export" if s["steps_made_at_export"] else "before its first step"
    say(f"  optimizer {s['optimizer']}, {origin}; {count(state['tensors'], 'tensor')} of state, {size(state['bytes'])}")
    for i, group in enumerate(s["groups"]):
        _show_group(i, len(group["parameters"]), group, "  ")
    for key, quantity in (("clip_norm", "norm"), ("clip_value", "elements")):
        if s[key] is not None:
            say(f"  clips the gradients' {quantity} at {s[key]:g}")
    if s["loss_scale"] is not None:
        say(f"  scales the loss as torch.amp.GradScaler does, starting at {s['loss_scale']:g}")
    if s["ema"] is not None:
        say(f"  averages the trained parameters with decay {s['ema']:g}")
    if s["skip_nonfinite"]:
        say("  skips an update if the gradients have Inf or NaN")
    if s["gradients_can_wait"]:
        buffers = f"{count(gradients['tensors'], 'tensor')}, {size(gradients['bytes'])}"
        say(f"  gradients can be accumulated (update=False, several processes): {buffers}")
    else:
        say("  gradients cannot be accumulated: every call is an update, in one process")


def _show_update(u: dict[str, Any], targets: list[str]) -> None:
    state = f", state {', '.join(u['state'])}" if u["state"] else ""
    say(f"  steps of {u['optimizer']} on {count(u['trained'], 'parameter')} with a gradient{state}")
    for i, group in enumerate(u["groups"]):
        _show_group(i, group["parameters"], group, "    ")
    _show_compared(u, targets)


def _show_clipping(c: dict[str, Any], targets: list[str]) -> None:
    say(
        f"  {c['function']}{f' of norm_type {kind}' if (kind := c['norm_type']) else ''} on {count(c['gradients'], 'gradient')}"
    )
    _show_compared(c, targets)


def _show_compared(code: dict[str, Any], targets: list[str]) -> None:
    """Of code that writes to a script's own tensors: its verdicts, and its times."""
    for target, verdict in zip(targets, (code["verdict"], *code["further_verdicts"]), strict=True):
        say(f"    compared with eager{f', {target}' if len(targets) > 1 else ''}: {_verdict(verdict)}")
    if code["speed"]:
        say("    timed when it was recorded:")
    for words in pass_speed_in_words(read_as(Speed, code["speed"])) if code["speed"] else ():
        say(f"      {words}")


def _show_group(number: int, parameters: int, group: dict[str, Any], indent: str) -> None:
    names = {n["name"].partition("[")[0] for n in group["numbers"]}
    numbers = ", ".join(f"{n['name']} {n['value']:g}{_limits(n['allowed'])}" for n in group["numbers"])
    fixed = ", ".join(f"{k} {v}" for k, v in group["options"].items() if k not in names)
    say(
        f"{indent}group {number} of {count(parameters, 'parameter')}: {numbers or 'no number that a schedule may change'}"
    )
    if fixed:
        say(f"{indent}  fixed: {fixed}")


def _limits(allowed: list[dict[str, Any]]) -> str:
    """The values that a number may be set to: `` (not 0)``; nothing where all are allowed."""
    if len(allowed) == 2:
        below, above = allowed
        if (
            below["low"] is None
            and above["high"] is None
            and below["high"] == above["low"]
            and below["high_open"]
            and above["low_open"]
        ):
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
    say(
        f"  structure {s['fingerprint'][:12]}: {count(len(s['nodes']), 'node')}, {count(s['operations'], 'operation')}{seconds}"
    )
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
            say(
                f"      compared with the recorded numbers{f', {target}' if len(targets) > 1 else ''}: {_verdict(verdict)}"
            )
        if v["speed"]:
            say("      timed when it was recorded:")
        for words in pass_speed_in_words(read_as(Speed, v["speed"])) if v["speed"] else ():
            say(f"        {words}")


def _show_conditions(guards: list[str], ambient: dict[str, Any], indent: str) -> None:
    for guard in guards:
        say(f"{indent}only if {guard}")
    if ambient["autocast"]:
        say(f"{indent}under autocast {ambient['autocast']}")


def _verdict(verdict: dict[str, Any]) -> str:
    worst = f", worst {verdict['worst']} at {verdict['error']:.2g} of its tolerance" if verdict["worst"] else ""
    sizes = f", at {'; '.join(verdict['sizes'])}" if verdict["sizes"] else ""
    return f"{verdict['status']}{worst}{sizes}"

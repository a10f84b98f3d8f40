"""Name an entry's parameters and arguments in its ONNX graphs. This imports no onnx, because ``inspect`` prints them,
too."""

from __future__ import annotations

import re

from aot_backward_runtime.format.manifest import EntrySpec, NumberSpec, VariantSpec

_MODULE, NUMBERS = "module.", "numbers"


def constant_names(entry: EntrySpec) -> dict[str, str]:
    """Return names of parameters, buffers and an optimizer's state: weight key -> name."""
    out: dict[str, str] = {}
    for state in entry.state:
        if state.name != NUMBERS or entry.step is None:
            out.setdefault(state.weight, state.name.removeprefix(_MODULE) if entry.step is not None else state.name)
    return out


def argument_names(entry: EntrySpec, variant: VariantSpec) -> list[str]:
    """Return one name for each flat input of the variant."""
    numbers = (
        ["optimizer.accumulate", "optimizer.first", *map(number_name, entry.step.numbers)]
        if entry.step is not None
        else []
    )
    used_names = {*constant_names(entry).values(), *numbers}
    return [free_name(_dotted(spec.name), "input", used_names) for spec in variant.inputs]


def number_name(number: NumberSpec) -> str:
    """Return ``optimizer.0.lr``, ``optimizer.0.betas.1``; for the entry's own numbers ``optimizer.clip_norm``."""
    parts = [
        "optimizer",
        *([str(number.group)] if number.group >= 0 else []),
        number.key,
        *([str(number.position)] if number.position >= 0 else []),
    ]
    return ".".join(parts)


def free_name(name: str, prefix: str, used_names: set[str]) -> str:
    return f"{prefix}.{name}" if name in used_names else name


def _dotted(name: str) -> str:
    """Return ``batch.x.0`` for ``batch['x'][0]``."""
    return re.sub(
        r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]", lambda m: "." + next(g for g in m.groups() if g is not None), name
    )

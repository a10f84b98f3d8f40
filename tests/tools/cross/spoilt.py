"""Show that the checks can fail: the same libraries with one fault each must be called wrong."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import interpreted, launches, machine_code
from .jobs import Source
from .watched import Compiled


def _other_code(source: Source) -> Source:
    at = source.cubin.index(
        dict(machine_code.sections(source.cubin))[".text." + machine_code.kernels_of(source.cubin)[0].name]
    )
    return dataclasses.replace(source, cubin=source.cubin[:at] + bytes([source.cubin[at] ^ 1]) + source.cubin[at + 1 :])


KERNELS: dict[str, Callable[[Source], Source]] = {
    "a minus for a plus": lambda s: dataclasses.replace(
        s, text=re.sub(r"(tmp\d+) \+ (_?tmp\d+)", r"\1 - \2", s.text, count=1)
    ),
    "blocks of one element": lambda s: dataclasses.replace(s, constants={**s.constants, "XBLOCK": 1}),
    "a flipped bit in the machine code": _other_code,
}
HOSTS: dict[str, Callable[[str], str]] = {
    "a missing argument": lambda w: re.sub(r"(kernel_args_\[\] = \{)&\w+, ", r"\1", w),
    "an int for a pointer": lambda w: re.sub(r"CUdeviceptr (var_\d+)", r"int32_t \1", w),
    "a different number of warps": lambda w: re.sub(r"grid_2, \d+, ", "grid_2, 7, ", w),
}


def unnoticed(
    libraries: Sequence[tuple[Path, Compiled, dict[str, str]]], weights: dict[str, torch.Tensor]
) -> list[str]:
    """Return the faults that the checks did not find, with the library."""
    found, tried = [], []
    for path, compiled, constants in libraries:
        kernels = machine_code.kernels(path.read_bytes())
        shared = {name: source.shared for name, source in compiled.kernels.items()}
        found += [
            f"{compiled.graph.name}: {what}"
            for what, spoil in HOSTS.items()
            if not launches.faults(spoil(compiled.wrapper), kernels, shared)
        ]
        for what, spoil in KERNELS.items():
            wrong = dataclasses.replace(
                compiled, kernels={name: spoil(source) for name, source in compiled.kernels.items()}
            )
            tried.append((f"{compiled.graph.name}: {what}", (path, wrong, constants)))
    verdicts = interpreted.judge([library for _, library in tried], weights, say=lambda expected: None)
    return found + [what for (what, _), verdict in zip(tried, verdicts, strict=True) if not verdict.wrong]

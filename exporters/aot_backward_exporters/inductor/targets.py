"""Meaning of target names: the processors that native code compiled for them runs on."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Target


@dataclass(frozen=True)
class Processor:
    """A level of x86-64, or of aarch64. ``isa``: Inductor's name for its vectors, "" for none (g++ may still use the
    narrower ones of ``march``). ``machine``: as uname writes it."""

    march: str
    simd_bits: int
    isa: str
    flags: tuple[str, ...]
    machine: str = "x86_64"


_V2 = ("cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
PROCESSORS = {
    "sse4": Processor("x86-64-v2", 1, "", _V2),
    "avx2": Processor("x86-64-v3", 256, "VecAVX2", _V3),
    "avx512": Processor("x86-64-v4", 512, "VecAVX512", (*_V3, *_V4)),
    "neon": Processor("armv8-a", 128, "VecNEON", ("asimd",), "aarch64"),
    "wasm": Processor("", 1, "", (), "wasm32"),
}
"""The levels of the x86-64 psABI ("Micro-Architecture Levels"), with the flags beyond v1 as /proc/cpuinfo writes them
(``abm`` is lzcnt); armv8-a, which all 64-bit processors of Arm implement, with NEON; and WebAssembly, for browsers and
Node.js."""
PLAIN = "neon" if platform.machine() == "aarch64" else "avx2"
"""The level that ``cpu`` alone means on this machine."""
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100")
"""GPUs supported for cross-compilation (:mod:`..cuda.cross_compile`)."""
KNOWN = ("cpu", *(f"cpu:{level}" for level in PROCESSORS), "cuda", *(f"cuda:{arch}" for arch in ARCHITECTURES))


def parsed(targets: str) -> tuple[str, ...]:
    """Return the names in ``targets``, separated by commas: "cpu:avx2,cpu:neon"; "cpu" is "cpu:avx2" on x86-64. Raise
    :class:`ExportError` for unknown ones."""
    names = [name.strip() for name in targets.split(",")] if isinstance(targets, str) else []
    for name in names or [str(targets)]:
        if name not in KNOWN:
            raise ExportError(f"unknown target {name!r}; known: {', '.join(KNOWN)}")
    full_names = tuple(f"cpu:{PLAIN}" if name == "cpu" else name for name in names)
    if duplicates := [name for name in full_names if full_names.count(name) > 1]:
        raise ExportError(f"target {duplicates[0]} is given twice (cpu is cpu:{PLAIN})")
    if len({name.partition(":")[0] for name in full_names}) > 1:
        raise ExportError(
            f"targets {targets!r}: expected one device type, got several; a package's graphs are captured on one"
        )
    return full_names


def processor(target: str) -> Processor:
    """Return the processor for the host part of ``target``'s code."""
    return PROCESSORS.get(target.partition(":")[2] or PLAIN) or PROCESSORS[PLAIN]


def target_spec(target: str) -> Target:
    """Return the specification of ``target``, one of :data:`KNOWN`; "cuda" is this machine's GPU, "cuda:sm_90" may be
    absent."""
    level = processor(target)
    if target.startswith("cpu"):
        return Target(
            "cpu",
            machine=level.machine,
            march=level.march,
            cpu_flags=level.flags,
            name=target if ":" in target else f"cpu:{PLAIN}",
        )
    arch = target.partition(":")[2]
    if not arch:
        if not torch.cuda.is_available():
            raise ExportError(f"target {target!r}: this machine has no GPU that torch {torch.__version__} can use")
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return Target(
        "cuda", march=level.march, cpu_flags=level.flags, cuda_arch=arch, cuda=torch.version.cuda or "", name=target
    )

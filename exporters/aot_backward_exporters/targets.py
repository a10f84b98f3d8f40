"""What a target name stands for: the processors that native code compiled for it runs on."""

from __future__ import annotations

import torch

from aot_backward_runtime.manifest import Target

MARCH = "x86-64-v3"
SIMD_BITS = 256
_V3_FLAGS = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
"""x86-64-v3 beyond v1 as /proc/cpuinfo writes it (``abm`` is lzcnt); x86-64 psABI, table "Micro-Architecture Levels"."""


def target_spec(target: str) -> Target:
    """``target``: "cpu" or "cuda" (this machine's GPU)."""
    if target == "cpu":
        return Target("cpu", march=MARCH, cpu_flags=_V3_FLAGS)
    major, minor = torch.cuda.get_device_capability()
    return Target("cuda", march=MARCH, cpu_flags=_V3_FLAGS, cuda_arch=f"sm_{major}{minor}", cuda=torch.version.cuda or "")

"""GPUs supported for cross-compilation: the device properties that Inductor and Triton query."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Properties of a GPU (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    name: str
    major: int
    minor: int
    multiprocessors: int
    shared: int  # bytes of shared memory that a block may opt in to
    shared_of_all: int  # bytes of shared memory in a multiprocessor
    threads: int  # resident threads per multiprocessor
    cache: int  # bytes of L2
    memory: int


DEVICES = {
    "sm_80": Device("NVIDIA A100", 8, 0, 108, 166912, 167936, 2048, 40 << 20, 80 << 30),
    "sm_89": Device("NVIDIA L40S", 8, 9, 142, 101376, 102400, 1536, 96 << 20, 48 << 30),
    "sm_90": Device("NVIDIA H100", 9, 0, 132, 232448, 233472, 2048, 50 << 20, 80 << 30),
    "sm_100": Device("NVIDIA B200", 10, 0, 148, 232448, 233472, 2048, 126 << 20, 180 << 30),
}

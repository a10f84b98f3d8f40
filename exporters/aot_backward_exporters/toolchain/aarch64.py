"""What generated C++ lacks if it is compiled for aarch64 with the headers of PyTorch for x86-64."""

from __future__ import annotations

from pathlib import Path

MACHINE = "aarch64"
_SINCE_2_17 = (
    "pthread_rwlock_rdlock",
    "pthread_rwlock_wrlock",
    "pthread_rwlock_unlock",
    "pow",
    "exp",
    "exp2",
    "hypot",
    "hypotf",
    "fmod",
)
_SLEEF = Path(__file__).with_name("sleef_neon.h")


def source(text: str) -> str:
    """Return ``text`` bound to the functions of glibc 2.17, with which the ABI of aarch64 begins, so that the library
    loads on older systems."""
    return "".join(f'__asm__(".symver {name},{name}@GLIBC_2.17");\n' for name in _SINCE_2_17) + text


def kernel_header(text: str) -> str:
    """Return ``text`` after the declarations of SLEEF: PyTorch's ``sleef.h`` has only those of the machine that it was
    built for."""
    return _SLEEF.read_text() + text

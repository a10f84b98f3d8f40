"""glibc's thresholds for returning freed memory to the system.

A step asks for the memory of its gradients at each call and gives it back. From a certain size on glibc returns it to the system each time, and
the next call has every page of it faulted in and cleared again: with 40 MB of gradients 18 of 28 ms. Whether it does depends on what else is
allocated at the heap's end.
"""

from __future__ import annotations

import ctypes
import os

_LARGE = 1 << 20  # bytes of gradients; below, it makes no difference that could be measured
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 1 << 30
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep(size: int) -> bool:
    """Has the process keep up to 1 GiB of freed memory for its next allocation, if ``size``, the bytes that are given back at each call, is
    large. Whether it was done: not where the user has set malloc's thresholds (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``)."""
    chosen = any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if size < _LARGE or chosen:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT) and mallopt(_TRIM_THRESHOLD, _KEPT))

"""glibc's thresholds for returning freed memory to the system.

Each step allocates memory for its gradients and frees it. Above a certain size glibc returns it to the system each time, and the next call has
every page faulted in and cleared again: with 40 MB of gradients 18 of 28 ms. Whether it does depends on the other allocations at the heap's end.

An export needs the opposite: a large model's gradients are blocks of a few megabytes, freed one by one; glibc kept more memory of them than the
weights take.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

_MIN_KEPT_BYTES = 1 << 20  # of a step's gradients; keeping smaller sizes made no measurable difference
_MIN_FREED_BLOCK_BYTES = 1 << 20  # that an export returns to the system at once: large models' gradients are a few megabytes
_LARGE_MODEL = 1 << 26  # bytes of weights from which an export returns freed blocks at once; a guess
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_NEVER = 1 << 30  # bytes, a threshold that no block of a step reaches
_LARGE_BLOCK = 32 << 20  # glibc's mmap threshold grows to this with the largest freed block, and the trim threshold to twice as much
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_state = {"keeps": False, "frees": False}  # whether a step has called keep(), and whether an export is inside freed_at_once()


def keep(size: int) -> bool:
    """Make the process keep up to 1 GiB of freed memory for its next allocation, if ``size``, the bytes freed by each call, is large. Return
    whether it was done. It is not done if the user has set malloc's thresholds (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES``)."""
    if size < _MIN_KEPT_BYTES or _is_configured():
        return False
    _state["keeps"] = True
    return _state["frees"] or _put(_NEVER, _NEVER)


@contextlib.contextmanager
def freed_at_once(size: int) -> Iterator[None]:
    """Return each block of a megabyte or more to the system as soon as it is freed, inside the context, if ``size``, the bytes of a model's
    weights, is large and the user has not set malloc's thresholds. Afterwards the thresholds are those of any process that once freed 32 MB, or
    :func:`keep`'s."""
    if size < _LARGE_MODEL or _is_configured() or _state["frees"] or not _put(_MIN_FREED_BLOCK_BYTES, _LARGE_BLOCK):
        yield
        return
    _state["frees"] = True
    try:
        yield
    finally:
        _state["frees"] = False
        _put(*((_NEVER, _NEVER) if _state["keeps"] else (_LARGE_BLOCK, 2 * _LARGE_BLOCK)))
        _libc().malloc_trim(0)


def _is_configured() -> bool:
    return any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def _put(mmap_threshold: int, trim_threshold: int) -> bool:
    try:
        mallopt = _libc().mallopt
    except (OSError, AttributeError):  # not glibc
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_threshold) and mallopt(_TRIM_THRESHOLD, trim_threshold))


def _libc() -> Any:
    return ctypes.CDLL(None)

"""glibc's thresholds for returning freed memory to the system.

Each call of compiled code allocates memory for intermediate values and results, which is freed before the next. Above a
certain size glibc returns it to the system each time, and the next call has every page faulted in and cleared again: 37
of 93 ms of processor time in a training step of PaiNN for 400 atoms (63 MB). Whether it does depends on the other
allocations at the heap's end.

An export needs the opposite: a large model's gradients are blocks of a few megabytes, freed one by one; glibc kept more
memory of them than the weights take.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Iterator
from typing import Any

_MIN_KEPT_BYTES = 1 << 20  # of fresh memory in a call; keeping smaller sizes made no measurable difference
# An export returns freed blocks of this size to the system at once: large models' gradients are a few megabytes
_MIN_FREED_BLOCK_BYTES = 1 << 20
_LARGE_MODEL = 1 << 26  # bytes of weights from which an export returns freed blocks at once; a guess
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_NEVER = 1 << 30  # bytes, a threshold that no block of a step reaches
# glibc's mmap threshold grows to this with the largest freed block, and the trim threshold to twice as much
_LARGE_BLOCK = 32 << 20
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
# Whether kept() keeps memory, and whether an export is inside freed_at_once()
_state = {"keeps": False, "frees": False}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Make the process keep up to 1 GiB of freed memory for its next allocation, if the call inside, which is to come
    again, takes much fresh memory. It is not done if the user has set malloc's thresholds (``MALLOC_TRIM_THRESHOLD_``,
    ``GLIBC_TUNABLES``)."""
    before = _faults()
    yield
    if _state["keeps"] or (_faults() - before) * resource.getpagesize() < _MIN_KEPT_BYTES or _is_configured():
        return
    _state["keeps"] = True
    if not _state["frees"]:
        _put(_NEVER, _NEVER)


def _faults() -> int:
    """Return the number of pages that the process has had mapped."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def freed_at_once(size: int) -> Iterator[None]:
    """Return each block of a megabyte or more to the system as soon as it is freed, inside the context, if ``size``,
    the bytes of a model's weights, is large and the user has not set malloc's thresholds. Afterwards the thresholds are
    those of any process that once freed 32 MB, or :func:`kept`'s."""
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

"""Eager's own kernels that end the process: asked so that they do not.

Of about thirty CPU operators, each asked for every combination of its gradients, one crashed (torch 2.13): ``group_norm`` over a channels_last
input, asked for the gradients of its parameters and not of its input. ``backward()`` asks that if the input needs no gradient.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from aot_backward_exporters.process_state import exclusive

_GROUP_NORM = "native_group_norm_backward"


@contextlib.contextmanager
def without_crashes() -> Iterator[list[str]]:
    """A context in which such a kernel computes the input's gradient, too, which is then dropped: the others are the same to the bit. Yields what
    will hold the operator's name for each call that would have crashed. A call that would not takes 8 µs longer."""
    kernel: Any = torch.library.get_kernel(f"aten::{_GROUP_NORM}", "CPU")
    avoided: list[str] = []

    def group_norm_backward(keys: Any, *args: Any) -> Any:
        *others, wanted = args
        values = others[1]  # behind the incoming gradient
        if not wanted[0] and not values.is_contiguous():
            avoided.append(_GROUP_NORM)
            wanted = [True, *wanted[1:]]
        return kernel.call_boxed(keys, *others, wanted)

    with exclusive():
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that a kernel is replaced
                library.impl(_GROUP_NORM, group_norm_backward, "CPU", with_keyset=True, allow_override=True)
            yield avoided
        finally:
            library._destroy()

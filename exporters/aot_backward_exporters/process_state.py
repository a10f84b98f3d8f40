"""Temporary changes of process-wide state for a capture, check or compilation: attributes of torch, entries of
mappings, switches in C++.

This module replaces every attribute and mapping entry under one lock, and restores them in reverse order, also after an
error; one thread may nest replacements. Settings that torch has its own function or context for (default dtype,
autocast, warnings, Inductor's options) are changed at the point of use, while the lock is held. The lock is held by:

- An export, from its first trace until the package is written (:func:`exclusive`): it also relies on the random state,
  and on the modes, buffers and parameters of the modules that it traces. Exports in several threads run one after the
  other.
- Other operations (a rebuild, a recorded pass, ``verify``), only while they have something replaced: while a program is
  traced, while Inductor lowers a graph, while a variant is compared with stored results.

The lock does not stop a training thread, and torch calls the replacements in that thread, too. A replacement that
refuses or records calls must therefore call the original in all threads but its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from . import torch_api

_LOCK = threading.RLock()
_ABSENT = object()


def _new_lock() -> None:
    global _LOCK
    _LOCK = threading.RLock()


# The lock's holder does not exist in the child, which keeps torch's state from the fork
os.register_at_fork(after_in_child=_new_lock)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Keep other threads from changing the process's state through this module."""
    with _LOCK:
        yield


@contextlib.contextmanager
def patched(owner: Any, /, **values: Any) -> Iterator[None]:
    """Set the attributes ``values`` on ``owner`` (a module, a class, an object) and restore them at exit.

    Attributes that it inherited are inherited again afterwards. Raise :class:`AttributeError` if a name is missing: if
    torch renamed it, the replacement would silently have no effect."""
    with _LOCK, contextlib.ExitStack() as stack:
        for name, value in values.items():
            if not hasattr(owner, name):
                raise AttributeError(
                    f"{owner!r} has no attribute {name!r} that could be replaced (torch {torch.__version__})"
                )
            # Keeps a staticmethod; getattr would return the function that it wraps
            old_value = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            if old_value is _ABSENT:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, old_value)
        yield


@contextlib.contextmanager
def patched_items(mapping: MutableMapping[str, Any], /, **values: Any) -> Iterator[None]:
    """Set the entries ``values`` in ``mapping`` (``os.environ``, a module's globals) and restore them at exit."""
    with _LOCK, contextlib.ExitStack() as stack:
        for name, value in values.items():
            old_value = mapping.get(name, _ABSENT)
            mapping[name] = value
            if old_value is _ABSENT:
                stack.callback(mapping.pop, name)
            else:
                stack.callback(mapping.__setitem__, name, old_value)
        yield


@contextlib.contextmanager
def sizes_of_one_open() -> Iterator[None]:
    """Let comparisons of a size with 1 leave the size open if the answer changes only strides or speed.

    torch's Python code makes such comparisons through ``guard_or_false``, which ``backed_size_oblivious`` answers. Its
    C++ code compares before it multiplies a stride by a size (``is_channels_last_strides_2d``), merges two dimensions
    (``view``), sums or copies: the size counts as other than 1, which is correct for all but ``squeeze``. Comparisons
    in user code are Python, and create a guard. The self-check runs the size 1. The example decides whether elements of
    a tensor that is written to share memory."""
    node, owner, overlap = torch_api.SymNode, threading.get_ident(), torch_api._debug_has_internal_overlap
    original = node.guard_bool

    def guard_bool(self: Any, file: str, line: int) -> bool:
        if file.endswith((".h", ".cpp")) and threading.get_ident() == owner:
            answer = _answer_for_other_than_one(self.expr, self.hint)
            if answer is not None:
                return answer
        return bool(original(self, file, line))

    def has_overlap(tensor: torch.Tensor) -> int:
        size = next((s for s in (*tensor.shape, *tensor.stride()) if isinstance(s, torch.SymInt)), None)
        with contextlib.nullcontext() if size is None else torch_api.unguarded(size.node):
            return int(overlap(tensor))

    with (
        torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True),
        patched(node, guard_bool=guard_bool),
        patched(torch, _debug_has_internal_overlap=has_overlap),
    ):
        yield


def _answer_for_other_than_one(expression: Any, hint: Any) -> bool | None:
    """Return the value of ``expression`` if its size is not 1; None if it depends on more than that. A stride of 8 * n
    is 8 only if n is 1."""
    kind = type(expression).__name__
    if kind == "StrictGreaterThan" and expression.rhs == 1:
        return True
    if kind == "StrictLessThan" and expression.rhs == 2:  # is_non_overlapping_and_dense
        return False
    if kind in ("Equality", "Unequality"):
        number, size = sorted(expression.args, key=lambda side: not side.is_Integer)
        backward = torch_api.backward_that_runs()
        if number == 1 and not (backward and backward[0].startswith("Squeeze")):
            return kind == "Unequality"
        if number.is_Integer and number > 1 and (size / number).is_Symbol and hint == (kind == "Unequality"):
            return bool(hint)
    return None


@contextlib.contextmanager
def without_convolution_libraries() -> Iterator[None]:
    """Turn off oneDNN and NNPACK, so that convolutions and recurrent layers are plain ATen operators.

    oneDNN's recurrent layers have no decomposition that can be traced. The batch size decides which library runs a
    convolution (both are for 16 and more): traced, that comparison would become a guard on the batch size. Compiled
    code compares again at run time.
    """
    with _LOCK, torch.backends.nnpack.flags(enabled=False):
        mkldnn = torch_api._get_mkldnn_enabled()
        torch_api._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch_api._set_mkldnn_enabled(mkldnn)


def matrix_products_for_any_size() -> contextlib.AbstractContextManager[None]:
    """Keep Inductor's decomposition of matrix products from checking for small dynamic sizes, which would narrow them.

    Lowering decomposes them, and from torch 2.15 on also the passes over joint graphs, which trace their patterns on
    the graph's own sizes.
    """
    return patched(torch_api.decomposition, guard_or_false=torch_api.statically_known_true)


_GROUP_NORM = "native_group_norm_backward"


@contextlib.contextmanager
def without_crashes() -> Iterator[list[str]]:
    """Keep eager's ``group_norm`` over a channels_last input from crashing the process.

    Its kernel crashes if the gradients of its parameters are requested without its input's (torch 2.13), which
    ``backward()`` does if the input does not require grad. This context also computes the input's gradient and drops
    it: the others are bit-identical. Among about thirty CPU operators, each tested with every combination of gradients,
    only this one crashed. Yields a list that receives the operator's name for each avoided crash. Other calls take 8 µs
    longer."""
    kernel: Any = torch.library.get_kernel(f"aten::{_GROUP_NORM}", "CPU")
    crashes: list[str] = []

    def group_norm_backward(keys: Any, *args: Any) -> Any:
        *inputs, output_mask = args
        values = inputs[1]  # after grad_output
        if not output_mask[0] and not values.is_contiguous():
            crashes.append(_GROUP_NORM)
            output_mask = [True, *output_mask[1:]]
        return kernel.call_boxed(keys, *inputs, output_mask)

    with exclusive():
        library = torch.library.Library("aten", "IMPL")
        try:
            with warnings.catch_warnings():
                # The warning that a kernel is replaced
                warnings.filterwarnings("ignore", message="Warning only once for all operators")
                library.impl(_GROUP_NORM, group_norm_backward, "CPU", with_keyset=True, allow_override=True)
            yield crashes
        finally:
            library._destroy()

"""State of the process that a capture, a check or a compilation changes for a while: attributes of torch, entries of mappings, switches in C++.

Every attribute and entry of a mapping is replaced through this module, under one lock, and put back in reverse order whatever happens; one thread may
nest as many as it needs. Settings that torch has a function or a context of its own for (default dtype, autocast, warnings, Inductor's options) are
changed where they are needed, while the lock is held. Who holds the lock, and how long:

- An export, from its first trace until the package is written (:func:`exclusive`): it also relies on the random state, and on the modes, buffers and
  parameters of the modules that it traces. Exports in several threads run one after the other.
- Anything else (a rebuild, a recorded pass, ``verify``), as long as something of its own is replaced: while a program is traced, while Inductor
  lowers a graph, while a variant is compared with what is stored.

The lock does not stop a thread that trains meanwhile, and torch calls the replacements there, too: where one would refuse or record what such a
thread does, it must hand over to the original for all threads but its own.
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


os.register_at_fork(after_in_child=_new_lock)  # whichever thread held it is not in the child, where torch stays as it was at the fork


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """A context in which no other thread changes the process's state through this module."""
    with _LOCK:
        yield


@contextlib.contextmanager
def patched(owner: Any, /, **values: Any) -> Iterator[None]:
    """A context in which ``owner`` (a module, a class, an object) has the attributes ``values``; what it only inherited it inherits again
    afterwards. :class:`AttributeError` where it has none of that name: a torch that renamed it would call the original in silence."""
    with _LOCK, contextlib.ExitStack() as stack:
        for name, value in values.items():
            if not hasattr(owner, name):
                raise AttributeError(f"{owner!r} has no attribute {name!r} that could be replaced (torch {torch.__version__})")
            before = vars(owner).get(name, _ABSENT)  # a staticmethod as it is; getattr would give what it wraps
            setattr(owner, name, value)
            if before is _ABSENT:
                stack.callback(delattr, owner, name)
            else:
                stack.callback(setattr, owner, name, before)
        yield


@contextlib.contextmanager
def patched_items(mapping: MutableMapping[str, Any], /, **values: Any) -> Iterator[None]:
    """A context in which ``mapping`` (``os.environ``, a module's globals) has the entries ``values``."""
    with _LOCK, contextlib.ExitStack() as stack:
        for name, value in values.items():
            before = mapping.get(name, _ABSENT)
            mapping[name] = value
            if before is _ABSENT:
                stack.callback(mapping.pop, name)
            else:
                stack.callback(mapping.__setitem__, name, before)
        yield


@contextlib.contextmanager
def sizes_of_one_open() -> Iterator[None]:
    """A context in which a question whether a size is 1 does not narrow that size, where the answer changes only strides or speed.

    torch's Python asks such questions by ``guard_or_false``, which ``backed_size_oblivious`` answers. Its C++ compares, before it multiplies a stride
    by a size (``is_channels_last_strides_2d``), merges two dimensions (``view``), sums or copies: the size counts as other than 1, which holds for
    all but ``squeeze``. A program that compares a size is Python, and makes a guard. The self-check runs the size 1. Whether elements of a tensor
    that is written to share memory is answered by the example."""
    node, owner, overlap = torch_api.SymNode, threading.get_ident(), torch_api._debug_has_internal_overlap
    original = node.guard_bool

    def guard_bool(self: Any, file: str, line: int) -> bool:
        if file.endswith((".h", ".cpp")) and threading.get_ident() == owner:
            answer = _answer_for_other_than_one(self.expr, self.hint)
            if answer is not None:
                return answer
        return bool(original(self, file, line))

    def has_overlap(tensor: torch.Tensor) -> int:
        symbolic = next((s for s in (*tensor.shape, *tensor.stride()) if isinstance(s, torch.SymInt)), None)
        with contextlib.nullcontext() if symbolic is None else torch_api.unguarded(symbolic.node):
            return int(overlap(tensor))

    with (
        torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True),
        patched(node, guard_bool=guard_bool),
        patched(torch, _debug_has_internal_overlap=has_overlap),
    ):
        yield


def _answer_for_other_than_one(expression: Any, hint: Any) -> bool | None:
    """What ``expression`` is where a size in it is other than 1; None if it says more than that. A stride of 8 * n is 8 only if n is 1."""
    kind = type(expression).__name__
    if kind == "StrictGreaterThan" and expression.rhs == 1:
        return True
    if kind == "StrictLessThan" and expression.rhs == 2:  # is_non_overlapping_and_dense
        return False
    if kind in ("Equality", "Unequality"):
        number, size = sorted(expression.args, key=lambda side: not side.is_Integer)
        running = torch_api.backward_that_runs()
        if number == 1 and not (running and running[0].startswith("Squeeze")):
            return kind == "Unequality"
        if number.is_Integer and number > 1 and (size / number).is_Symbol and hint == (kind == "Unequality"):
            return bool(hint)
    return None


@contextlib.contextmanager
def without_convolution_libraries() -> Iterator[None]:
    """A context in which convolutions and recurrent layers are plain ATen operators: oneDNN and NNPACK are off.

    oneDNN's recurrent layers have no formula that a trace could take. Which library a convolution runs on depends on the batch size (both are for 16
    and more): traced, that question would become a guard on it. Compiled code asks again when it runs.
    """
    with _LOCK, torch.backends.nnpack.flags(enabled=False):
        mkldnn = torch_api._get_mkldnn_enabled()
        torch_api._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch_api._set_mkldnn_enabled(mkldnn)


def matrix_products_for_any_size() -> contextlib.AbstractContextManager[None]:
    """A context in which Inductor's decomposition of matrix products does not ask whether a dynamic size is small, which would narrow the size.

    Lowering decomposes them, and from torch 2.15 on also the passes over joint graphs, which trace their patterns on the graph's own sizes.
    """
    return patched(torch_api.decomposition, guard_or_false=torch_api.statically_known_true)


_GROUP_NORM = "native_group_norm_backward"


@contextlib.contextmanager
def without_crashes() -> Iterator[list[str]]:
    """A context in which eager's ``group_norm`` over a channels_last input does not end the process.

    Its kernel crashes if the gradients of its parameters are asked for and its input's is not (torch 2.13), as ``backward()`` asks if the input needs
    none. Here it computes the input's gradient, too, and drops it: the others are the same to the bit. Of about thirty CPU operators, each asked for
    every combination of its gradients, no other crashed. Yields a list that gets the operator's name for each call that would have crashed. A call
    that would not takes 8 µs longer."""
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

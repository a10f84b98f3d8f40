"""Calls of the tensor operators that compiled code calls through a C interface, on plain memory. Both libtorch and
``libaotb_core.so`` have them.

This module imports only the standard library: ``make arm`` also runs :func:`serve` in an emulated Python, which has no
PyTorch.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

SIZES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 11: 1, 15: 2}
"""Bytes of an element, by PyTorch's number of the dtype."""
_STATE = 5056  # bytes of a random generator's state


class Refused(Exception):
    """The library returned an error, with the text of ``core_error``."""


class Optional:
    """An argument that C takes as a pointer or NULL."""

    def __init__(self, value: Any):
        self.value = value


class Tensor:
    """``data`` has the memory from the first element to the last; a call changes it in place."""

    def __init__(self, code: int, sizes: Sequence[int], strides: Sequence[int], data: bytearray | None = None):
        self.code, self.sizes, self.strides = code, tuple(sizes), tuple(strides)
        self.data = bytearray(self.reach) if data is None else data

    @property
    def reach(self) -> int:
        if 0 in self.sizes:
            return 0
        return SIZES[self.code] * (1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)))


class _Handle:
    def __init__(self, c: ctypes.CDLL, tensor: Tensor | None = None):
        self.c, self.pointer, self.keep = c, ctypes.c_void_p(), None
        if tensor is None:
            return
        rank = len(tensor.sizes)
        sizes, strides = (
            (ctypes.c_int64 * max(1, rank))(*tensor.sizes),
            (ctypes.c_int64 * max(1, rank))(*tensor.strides),
        )
        data = tensor.data or bytearray(1)
        self.keep = (ctypes.c_char * len(data)).from_buffer(data)
        number = ctypes.c_int64(rank)
        assert not c.aoti_torch_create_tensor_from_blob(
            self.keep, number, sizes, strides, ctypes.c_int64(0), tensor.code, 0, 0, ctypes.byref(self.pointer)
        )

    def _ask(self, name: str, kind: Any) -> Any:
        out = kind()
        assert self.c[f"aoti_torch_get_{name}"](self.pointer, ctypes.byref(out)) == 0
        return out.value if hasattr(out, "value") else out

    def read(self) -> Tensor | None:
        """Return a copy with its strides, or None if the result was not requested. libtorch then has an undefined
        tensor without strides."""
        if not self.pointer or self.c.aoti_torch_get_strides(
            self.pointer, ctypes.byref(ctypes.POINTER(ctypes.c_int64)())
        ):
            return None
        rank, pointer = self._ask("dim", ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)
        out = Tensor(
            self._ask("dtype", ctypes.c_int32), self._ask("sizes", pointer)[:rank], self._ask("strides", pointer)[:rank]
        )
        if out.data:
            out.data[:] = ctypes.string_at(self._ask("data_ptr", ctypes.c_void_p), out.reach)
        return out

    def drop(self) -> None:
        if self.pointer:
            self.c.aoti_torch_delete_tensor_object(self.pointer)


class Library:
    def __init__(self, path: str):
        self.c = ctypes.CDLL(path)
        self._has_errors = hasattr(self.c, "core_error")
        if self._has_errors:
            self.c.core_error.restype = ctypes.c_char_p

    def _refused(self, name: str) -> Refused:
        return Refused(self.c.core_error().decode() if self._has_errors else name)

    def call(self, name: str, arguments: Sequence[Any], results: int) -> list[Tensor | None]:
        """Return the results of ``aoti_torch_cpu_NAME``. int: int64_t; float: double; bool: int32_t; list: a pointer
        and a count; str: const char *. The results of ``clone`` are those of ``aoti_torch_clone``."""
        handles: list[_Handle] = []
        given: list[Any] = []

        def tensor(value: Tensor) -> ctypes.c_void_p:
            handles.append(_Handle(self.c, value))
            return handles[-1].pointer

        for value in arguments:
            if isinstance(value, Tensor):
                given.append(tensor(value))
            elif isinstance(value, bool):
                given.append(ctypes.c_int32(value))
            elif isinstance(value, int):
                given.append(ctypes.c_int64(value))
            elif isinstance(value, float):
                given.append(ctypes.c_double(value))
            elif isinstance(value, str):
                given.append(ctypes.c_char_p(value.encode()))
            elif isinstance(value, list):
                kind = ctypes.c_int32 if value and isinstance(value[0], bool) else ctypes.c_int64
                given += [(kind * max(1, len(value)))(*value), ctypes.c_int64(len(value))]
            elif value is None or value.value is None:
                given.append(None)
            elif isinstance(value.value, Tensor):
                given.append(ctypes.pointer(tensor(value.value)))
            elif isinstance(value.value, list):
                pointer = ctypes.POINTER(ctypes.c_int64)((ctypes.c_int64 * len(value.value))(*value.value))
                given += [ctypes.pointer(pointer), ctypes.c_int64(len(value.value))]
            else:
                given.append(
                    ctypes.pointer(
                        ctypes.c_int32(value.value)
                        if isinstance(value.value, (bool, int))
                        else ctypes.c_double(value.value)
                    )
                )
        made = [_Handle(self.c) for _ in range(results)]
        function = self.c["aoti_torch_clone" if name == "clone" else f"aoti_torch_cpu_{name}"]
        try:
            if function(*given, *(ctypes.byref(h.pointer) for h in made)):
                raise self._refused(name)
            return [h.read() for h in made]
        finally:
            for handle in (*handles, *made):
                handle.drop()

    def by_name(self, operator: str, arguments: Sequence[Any], results: int, version: int) -> list[Tensor | None]:
        """Return the results of an operator that compiled code calls by name, through ``torch_call_dispatcher``."""
        stack = (ctypes.c_uint64 * 24)()
        given = [_Handle(self.c, value) if isinstance(value, Tensor) else value for value in arguments]
        for i, value in enumerate(given):
            if isinstance(value, _Handle):
                stack[i] = value.pointer.value or 0  # the call takes ownership
            elif isinstance(value, str):
                text = ctypes.c_void_p()
                assert (
                    self.c.torch_new_string_handle(value.encode(), ctypes.c_size_t(len(value)), ctypes.byref(text)) == 0
                )
                stack[i] = text.value or 0
            else:
                stack[i] = int(value)
        if self.c.torch_call_dispatcher(f"aten::{operator}".encode(), b"", stack, ctypes.c_uint64(version)):
            raise self._refused(operator)
        made = [_Handle(self.c) for _ in range(results)]
        for i, handle in enumerate(made):
            handle.pointer.value = stack[i]
        out = [handle.read() for handle in made]
        for handle in made:
            handle.drop()
        return out

    def seed(self, seed: int) -> None:
        """Seed the generator of ``libaotb_core.so``."""
        self.c.core_seed(ctypes.c_uint64(seed))

    def random_state(self) -> bytes:
        """Return the state of that generator in PyTorch's layout."""
        state = (ctypes.c_uint8 * _STATE)()
        self.c.core_random_state(state)
        return bytes(state)

    def loop(self, path: str, name: str, arguments: Sequence[Tensor], count: int) -> None:
        """Call ``void NAME(const T *, const T *, T *out, long count)`` of the library at ``path``."""
        memory = [(ctypes.c_char * len(t.data)).from_buffer(t.data) for t in arguments]
        ctypes.CDLL(path)[name](*memory, ctypes.c_long(count))


class Emulated:
    """The methods of :class:`Library` for a library of another machine, called in a process of ``command``, an emulated
    Python with this module in its path."""

    def __init__(self, command: Sequence[str], library: str):
        argv = [*command, "-c", f"from {__name__} import serve; serve()", library]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        atexit.register(self._process.communicate)

    def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()
        refused, results, data = pickle.load(self._process.stdout)
        if refused is not None:
            raise Refused(refused)
        for tensor, changed in zip(_tensors(arguments), data, strict=True):
            tensor.data[:] = changed
        return results

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return functools.partial(self._ask, method)


def _tensors(value: Any) -> list[Tensor]:
    """Return each tensor in nested arguments once."""
    if isinstance(value, Tensor):
        return [value]
    inner = [value.value] if isinstance(value, Optional) else value if isinstance(value, (list, tuple)) else []
    return list({id(t): t for v in inner for t in _tensors(v)}.values())


def serve() -> None:
    """Answer the requests of :class:`Emulated` on standard input for the library that the command names."""
    library, requests, answers = Library(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            results = getattr(library, method)(*arguments)
            answer = None, results, [bytes(t.data) for t in _tensors(arguments)]
        except Refused as error:
            answer = str(error), None, []
        pickle.dump(answer, answers)
        answers.flush()

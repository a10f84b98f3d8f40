"""The C library of runtime/native, built by gcc once in a test run and called by ctypes. It uses the libtorch of this
process, so its results equal the Python runtime's bit for bit."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

NATIVE = Path(__file__).parents[2] / "runtime" / "native"
OK, IO, FORMAT, INCOMPATIBLE, SIGNATURE, NAME, INPUT, STATE, RUN, MEMORY = range(10)
INPUTS, OUTPUTS, GRADIENTS, INCOMING, STATES, NUMBERS = range(6)
_DTYPES = {
    torch.float32: (2, 32), torch.float64: (2, 64), torch.int64: (0, 64), torch.int32: (0, 32), torch.int16: (0, 16), torch.int8: (0, 8),
    torch.uint8: (1, 8), torch.bool: (6, 8), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.complex64: (5, 64), torch.complex128: (5, 128),
}  # fmt: skip
_NAMED = {number: dtype for dtype, number in _DTYPES.items()}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Description(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", _DataType),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_char_p)),
        ("group", ctypes.c_int64),
        ("position", ctypes.c_int64),
        ("value", ctypes.c_double),
    )


class Progress(ctypes.Structure):
    _fields_ = (
        ("updates", ctypes.c_int64),
        ("skipped", ctypes.c_int64),
        ("accumulated", ctypes.c_int64),
        ("grad_norm", ctypes.c_double),
        ("loss_scale", ctypes.c_double),
    )


class Options(ctypes.Structure):
    _fields_ = (("backend", ctypes.c_char_p), ("public_key", ctypes.c_char_p), ("unchecked", ctypes.c_int))


class Failed(Exception):
    """An ``aotb_status`` other than AOTB_OK, with the text of ``aotb_error``."""

    def __init__(self, status: int, words: str):
        super().__init__(words)
        self.status = status


def build(name: str = "native", *flags: str) -> Path:
    """Return the library's folder, compiled with ``flags`` in the folder that this test run shares."""
    folder = Path(os.environ["AOT_BACKWARD_TEST_FOLDER"]) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "libaotb_core.so").exists():
            make = ["make", "-C", str(NATIVE), f"BUILD={folder}", "-j2", *flags]
            done = subprocess.run(make, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


@functools.cache
def library() -> ctypes.CDLL:
    opened = ctypes.CDLL(str(build() / "libaot_backward.so"))
    for name in ("aotb_error", "aotb_entry", "aotb_kind", "aotb_metadata", "aotb_structure", "aotb_digest"):
        getattr(opened, name).restype = ctypes.c_char_p
    return opened


def check(status: int) -> None:
    if status:
        raise Failed(status, library().aotb_error().decode())


def dl_tensor(tensor: torch.Tensor | None) -> DLTensor:
    """Return ``tensor`` as a C struct that keeps the tensor's memory alive."""
    if tensor is None:
        return DLTensor()
    count = max(1, tensor.dim())
    shape, strides = (ctypes.c_int64 * count)(*tensor.shape), (ctypes.c_int64 * count)(*tensor.stride())
    out = DLTensor(
        tensor.data_ptr(), _Device(1, 0), tensor.dim(), _DataType(*_DTYPES[tensor.dtype], 1), shape, strides, 0
    )
    out.keep = tensor, shape, strides
    return out


def tensor_of(given: DLTensor) -> torch.Tensor | None:
    """Return a copy of the tensor that ``given`` points to, with its strides."""
    if given.ndim < 0:
        return None
    shape, strides = given.shape[: given.ndim], given.strides[: given.ndim]
    dtype = _NAMED[given.dtype.code, given.dtype.bits]
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(given.data + given.byte_offset)
    return torch.frombuffer(bytearray(memory), dtype=dtype).as_strided(shape, strides)


def _array(tensors: Sequence[DLTensor]) -> ctypes.Array[DLTensor]:
    return (DLTensor * max(1, len(tensors)))(*tensors)


class Function:
    """An ``aotb_function``."""

    def __init__(self, handle: ctypes.c_void_p):
        self.handle = handle

    @property
    def kind(self) -> str:
        return library().aotb_kind(self.handle).decode()

    def count(self, part: int, variant: int = 0) -> int:
        return library().aotb_count(self.handle, variant, part)

    def describe(self, part: int, variant: int = 0) -> list[tuple[str, tuple[str, ...]]]:
        """Return names and shapes."""
        out, description = [], _Description()
        for number in range(self.count(part, variant)):
            check(library().aotb_describe(self.handle, variant, part, number, ctypes.byref(description)))
            out.append((description.name.decode(), tuple(s.decode() for s in description.shape[: description.ndim])))
        return out

    def numbers(self) -> dict[tuple[int, str, int], float]:
        out, d = {}, _Description()
        for number in range(self.count(NUMBERS)):
            check(library().aotb_describe(self.handle, 0, NUMBERS, number, ctypes.byref(d)))
            out[d.group, d.name.decode(), d.position] = d.value
        return out

    def _call(self, name: str, tensors: Sequence[torch.Tensor | None], count: int) -> list[torch.Tensor | None]:
        given, results = [dl_tensor(t) for t in tensors], (DLTensor * max(1, count))()
        check(library()[f"aotb_{name}"](self.handle, _array(given), len(given), results, count))
        return [tensor_of(r) for r in results[:count]]

    def run(self, *inputs: torch.Tensor, variant: int = 0) -> list[torch.Tensor | None]:
        """Return the outputs and, for a gradient function, the gradients."""
        return self._call(
            "run", inputs, self.count(OUTPUTS, variant) + (self.count(GRADIENTS, variant) if self.kind == "grad" else 0)
        )

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        return self._call("forward", inputs, self.count(OUTPUTS))

    def backward(self, *incoming: torch.Tensor | None) -> list[torch.Tensor | None]:
        return self._call("backward", incoming, self.count(GRADIENTS, library().aotb_served(self.handle)))

    def accumulate(self, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        return self._call("accumulate", inputs, self.count(OUTPUTS))

    def update(self) -> None:
        check(library().aotb_update(self.handle))

    def train(self, training: bool) -> None:
        check(library().aotb_train(self.handle, int(training)))

    def use_variant(self, number: int) -> None:
        check(library().aotb_use_variant(self.handle, ctypes.c_int64(number)))

    def state(self, name: str) -> torch.Tensor:
        view = DLTensor()
        check(library().aotb_state(self.handle, name.encode(), ctypes.byref(view)))
        found = tensor_of(view)
        assert found is not None
        return found

    def number(self, group: int, key: str, value: float, position: int = -1) -> None:
        check(
            library().aotb_number(
                self.handle, ctypes.c_int64(group), key.encode(), ctypes.c_int64(position), ctypes.c_double(value)
            )
        )

    def progress(self) -> Progress:
        out = Progress()
        check(library().aotb_progress_of(self.handle, ctypes.byref(out)))
        return out

    def save(self, path: Path, extra: str | None = None) -> None:
        check(library().aotb_save(self.handle, bytes(path), None if extra is None else extra.encode()))

    def resume(self, path: Path) -> str:
        extra = ctypes.c_char_p()
        check(library().aotb_resume(self.handle, bytes(path), ctypes.byref(extra)))
        return (extra.value or b"").decode()


class OpenPackage:
    """An ``aotb_package``."""

    def __init__(self, handle: ctypes.c_void_p):
        self.handle = handle

    @property
    def entries(self) -> list[str]:
        return [library().aotb_entry(self.handle, i).decode() for i in range(library().aotb_entries(self.handle))]

    def seed(self, seed: int) -> None:
        check(library().aotb_seed(self.handle, ctypes.c_uint64(seed)))

    @contextmanager
    def function(self, entry: str) -> Iterator[Function]:
        handle = ctypes.c_void_p()
        check(library().aotb_get(self.handle, entry.encode(), ctypes.byref(handle)))
        try:
            yield Function(handle)
        finally:
            library().aotb_free(handle)


@contextmanager
def opened(path: Path, backend: str = "libtorch", *, unchecked: bool = True) -> Iterator[OpenPackage]:
    handle, options = ctypes.c_void_p(), Options(backend.encode(), None, unchecked)
    check(library().aotb_open(bytes(path), ctypes.byref(options), ctypes.byref(handle)))
    try:
        yield OpenPackage(handle)
    finally:
        library().aotb_close(handle)


@contextmanager
def function(path: Path, entry: str, backend: str = "libtorch") -> Iterator[Function]:
    with opened(path, backend) as package, package.function(entry) as found:
        yield found

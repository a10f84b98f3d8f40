"""Guards: check that tensors fit the compiled code before it runs.

AOTInductor checks nothing: a tensor of another dtype, size or layout gives wrong numbers or a crash (docs/format.md).
There are two checks. :class:`Contract` compares everything in Python, makes the error message, and copies a tensor if
only its strides differ. Tensors that it accepted without a copy give a :class:`Fast` check: one call into C for the
whole list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError
from ..format.expressions import evaluate
from ..format.manifest import Ambient, SymbolSpec, TensorSpec
from .memory import extent, room

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Contract:
    """The recorded contract of a list of tensors: specs, their symbols, and guards on the symbols."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        symbols: Sequence[SymbolSpec],
        guards: Sequence[str],
        device: torch.device | None = None,
    ):
        """``device``: the device that the code runs on; None: any device of the recorded type."""
        self.specs, self.symbols, self.guards, self.device = tuple(specs), tuple(symbols), tuple(guards), device
        self.dtypes = tuple(dtype_of(s.dtype) for s in specs)

    def solve(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """Return the value of every symbol, read from ``tensors``. Raise :class:`InputError` if a range, an equality or
        a guard fails."""
        values: dict[str, int] = {}
        for symbol in self.symbols:
            size = self._size(symbol, tensors)
            value, rest = divmod(size - symbol.offset, symbol.scale)
            place = self._place(symbol)
            label = place if symbol.label == symbol.name else f"{symbol.label} ({place})"
            if rest:
                raise InputError(
                    f"{label} is {size}; expected {symbol.scale} * n{f' + {symbol.offset}' if symbol.offset else ''}"
                )
            if value < symbol.minimum or (symbol.maximum is not None and value > symbol.maximum):
                low, high = (
                    None if v is None else symbol.scale * v + symbol.offset for v in (symbol.minimum, symbol.maximum)
                )
                top = "" if high is None else f" and at most {high}"
                raise InputError(f"{label} is {size}; expected at least {low}{top}: export a variant for other sizes")
            values[symbol.name] = value
        for tensor, spec in zip(tensors, self.specs, strict=True):
            for d, (size, expected) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
                expected_size = evaluate(expected, values)
                if size != expected_size:
                    raise InputError(
                        f"{spec.name} has size {size} in dimension {d}; expected {self._reason(expected, expected_size)}"
                    )
        for guard in self.guards:
            if not evaluate(guard, values):
                at = ", ".join(f"{self._label(n)}={v}" for n, v in values.items())
                raise InputError(
                    f"the compiled code is valid only if {self.words(guard)}; got {at}: export a variant for these sizes"
                )
        return values

    def fit(
        self, tensors: Sequence[torch.Tensor], values: Mapping[str, int] | None = None
    ) -> tuple[list[torch.Tensor], dict[str, int], bool]:
        """Return the tensors with the compiled strides, the symbols' values, and whether no tensor was copied.

        ``values``: the symbols' values if they are known (for incoming gradients).
        """
        for tensor, spec, dtype in zip(tensors, self.specs, self.dtypes, strict=True):
            check_kind(tensor, spec, dtype, self.device)
        symbol_values = dict(values) if values is not None else self.solve(tensors)
        out, untouched = [], True
        for tensor, spec in zip(tensors, self.specs, strict=True):
            if values is not None:
                shape = tuple(evaluate(s, symbol_values) for s in spec.shape)
                if tensor.shape != shape:
                    raise InputError(f"{spec.name} has shape {tuple(tensor.shape)}; expected {shape}")
            fitting = with_strides(tensor, spec, symbol_values, self.device)
            untouched = untouched and fitting is tensor
            out.append(fitting)
        return out, symbol_values, untouched

    def words(self, guard: str) -> str:
        """Return a guard with the symbols' labels in it."""
        labels = {s.name: self._label(s.name) for s in self.symbols}
        guard = re.sub(r"\b[A-Za-z_]\w*", lambda m: labels.get(m[0], m[0]), guard)
        return guard.removeprefix("(").removesuffix(")") if guard.count("(") == 1 else guard

    def _size(self, symbol: SymbolSpec, tensors: Sequence[torch.Tensor]) -> int:
        return tensors[symbol.input].shape[symbol.dim]

    def _place(self, symbol: SymbolSpec) -> str:
        return f"{self.specs[symbol.input].name}.shape[{symbol.dim}]"

    def _label(self, name: str) -> str:
        symbol = next(s for s in self.symbols if s.name == name)
        return symbol.label if symbol.label != name else self._place(symbol)

    def _reason(self, expected: int | str, value: int) -> str:
        if isinstance(expected, int):
            return f"{value}"
        symbol = next((s for s in self.symbols if s.name == expected), None)
        where = f", as {self._place(symbol)} says" if symbol else ""
        return f"{value} ({self.words(expected)}{where})"


class Fast:
    """A check in C for tensors like an accepted list: type, dtype, device, sizes, strides, dispatch keys,
    requires_grad.

    The C check ignores storages, which can be shrunk under a tensor, or be smaller at an address that passed before. So
    :meth:`holds` also compares their sizes and the tensors' offsets.
    """

    __slots__ = ("_aligned", "_needed", "_seen", "check")

    def __init__(self, tensors: Sequence[torch.Tensor]):
        shapes = [list(t.shape) for t in tensors]
        strides = [list(t.stride()) for t in tensors]
        guards = torch_api.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        self.check = guards.check
        self._needed = [extent(t) for t in tensors]
        self._aligned = [_alignment(t) for t in tensors]
        # Addresses, bytes of the storages, offsets in them
        self._seen: tuple[list[int], list[int], list[Any]] = ([], [], [])

    @property
    def addresses(self) -> list[int]:
        """The addresses of the tensors that last passed :meth:`holds`."""
        return self._seen[0]

    def looks_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` (any objects) match the accepted ones, ignoring addresses and storages."""
        for tensor in tensors:
            # The C check aborts the process on a strided nested tensor: asking for its sizes throws through a noexcept
            # frame.
            if type(tensor) not in _PLAIN or tensor.is_nested:
                return False
        return self.check(*tensors)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether native code may read ``tensors`` (any objects) without a copy."""
        if not self.looks_alike(tensors):
            return False
        if len(tensors) == 1:  # the common case, cheaper without lists
            tensor = tensors[0]
            pointers, sizes, offsets = [tensor.data_ptr()], [len(tensor.untyped_storage())], [tensor.storage_offset()]
        else:
            pointers = list(map(_data_ptr, tensors))
            sizes = list(map(len, map(_storage, tensors)))
            offsets = list(map(_offset, tensors))
        last_seen = self._seen
        if sizes != last_seen[1] or offsets != last_seen[2]:
            for tensor, size, offset, needed in zip(tensors, sizes, offsets, self._needed, strict=True):
                if size - offset * tensor.itemsize < needed:
                    return False
        if pointers != last_seen[0]:
            for pointer, aligned in zip(pointers, self._aligned, strict=True):
                if pointer % aligned:
                    return False
        elif sizes == last_seen[1] and offsets == last_seen[2]:
            return True
        self._seen = (pointers, sizes, offsets)
        return True


class Same:
    """A check that accepted tensors are unchanged: the same objects with the same metadata and memory. It keeps that
    memory alive, so that nothing else can use its addresses. It is cheaper than :class:`Fast`, for tensors that stay
    from call to call."""

    __slots__ = ("_check", "_pointers", "_sizes", "_storages", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.tensors = list(tensors)
        self._check = Fast(tensors).check
        self._pointers = list(map(_data_ptr, tensors))
        self._storages = list(map(_storage, tensors))
        self._sizes = list(map(len, self._storages))

    def stayed(self) -> bool:
        """Return whether the tensors are unchanged."""
        return (
            self._check(*self.tensors)
            and list(map(_data_ptr, self.tensors)) == self._pointers
            and list(map(len, self._storages)) == self._sizes
        )


def check_ambient(ambient: Ambient, device: str) -> None:
    """Raise :class:`InputError` if autocast, determinism or matmul precision differ from the capture."""
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""
    if autocast != ambient.autocast:
        raise InputError(
            f"called under autocast {autocast or 'off'}; captured under autocast {ambient.autocast or 'off'}: call it under that "
            "setting, or export it under this one"
        )
    if torch_api.deterministic() and not ambient.deterministic:
        raise InputError(
            "torch.use_deterministic_algorithms is on; the package was captured without it: export it under that setting"
        )
    if torch_api.matmul_precision() != ambient.matmul_precision:
        raise InputError(
            f"float32 matmul precision is {torch_api.matmul_precision()!r}; the package was captured under {ambient.matmul_precision!r}: "
            f"torch.set_float32_matmul_precision({ambient.matmul_precision!r})"
        )


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"the package names the dtype {name!r}, which torch {torch.__version__} does not know")
    return dtype


_data_ptr = torch.Tensor.data_ptr
_storage = torch.Tensor.untyped_storage
_offset = torch.Tensor.storage_offset


def _alignment(tensor: torch.Tensor) -> int:
    # Triton's vector loads; on CPU only scalars must be aligned, to their size
    return 16 if tensor.is_cuda else tensor.itemsize


def check_kind(
    tensor: torch.Tensor, spec: TensorSpec, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> None:
    """Raise :class:`InputError` if the type, layout, device, dtype or rank of ``tensor`` differs, or its storage is too
    small for its sizes.

    ``device``: the device that the code runs on. A 0-d CPU tensor is accepted for one on a GPU, as in eager."""
    dtype = dtype or dtype_of(spec.dtype)
    if type(tensor) not in _PLAIN:
        raise InputError(
            f"{spec.name} is a {type(tensor).__module__}.{type(tensor).__qualname__}; expected a plain torch.Tensor"
        )
    if torch_api.is_functorch_wrapped(tensor):
        raise InputError(
            f"{spec.name} is wrapped by a torch.func transform (vmap, grad, jvp); export the transformed function"
        )
    if torch_api.is_batched(tensor):
        raise InputError(
            f"{spec.name} is a batch of gradients (is_grads_batched=True, jacobian(vectorize=True)), and native code takes them one by one: "
            "loop over them (torch.autograd.grad(…, retain_graph=True) for each, or vectorize=False)"
        )
    if tensor.is_nested:
        raise InputError(
            f"{spec.name} is a nested tensor; expected a plain torch.Tensor: pass torch.nested.to_padded_tensor({spec.name}, 0.0)"
        )
    if tensor.layout is not torch.strided:
        raise InputError(f"{spec.name} has layout {tensor.layout}; expected torch.strided: pass {spec.name}.to_dense()")
    if not _is_there(tensor, spec, device):
        expected_device = str(device) if device is not None and device.type == spec.device else spec.device
        elsewhere = f", or load(path, device={str(tensor.device)!r})" if tensor.device.type == spec.device else ""
        raise InputError(
            f"{spec.name} is on {tensor.device}; expected {expected_device}: pass {spec.name}.to({expected_device!r}){elsewhere}"
        )
    if tensor.dtype is not dtype:
        raise InputError(f"{spec.name} has dtype {tensor.dtype}; expected {dtype}: pass {spec.name}.to({dtype})")
    if tensor.dim() != len(spec.shape):
        raise InputError(
            f"{spec.name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; expected {len(spec.shape)}, {_shape(spec)}"
        )
    needed, held = extent(tensor), room(tensor)
    if held < needed:
        raise InputError(
            f"{spec.name} of shape {tuple(tensor.shape)} needs {needed} bytes, its storage holds {max(0, held)}: it was freed or shrunk"
        )
    if tensor.numel() and not torch_api.is_zerotensor(tensor) and not torch_api.has_memory(tensor):
        raise InputError(
            f"{spec.name} has no memory: it stands for a tensor within a transform (functionalize); export the transformed function"
        )


def _is_there(tensor: torch.Tensor, spec: TensorSpec, device: torch.device | None) -> bool:
    if tensor.device.type != spec.device:
        return spec.device == "cuda" and tensor.device.type == "cpu" and tensor.dim() == 0 and not tensor.requires_grad
    return device is None or device.type != spec.device or tensor.device == device


def with_strides(
    tensor: torch.Tensor, spec: TensorSpec, values: Mapping[str, int], device: torch.device | None = None
) -> torch.Tensor:
    """Return ``tensor`` if it has the strides of ``spec`` and is aligned, else a copy that has them. A ZeroTensor
    (zeros without memory, made by forward-mode differentiation) becomes zeros that native code can read."""
    plain = tensor.resolve_conj().resolve_neg()
    if plain.device.type != spec.device:
        return plain.detach().to(device or spec.device)
    stride = tuple(evaluate(s, values) for s in spec.stride)
    if torch_api.is_zerotensor(plain):
        return torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device).zero_()
    fits = all(n <= 1 or s == w for n, s, w in zip(plain.shape, plain.stride(), stride, strict=True))
    if plain.numel() and (not fits or plain.data_ptr() % _alignment(plain)):
        copy = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
        return copy.copy_(plain.detach())
    return plain


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(map(str, spec.shape)) + ")"

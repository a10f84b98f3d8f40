"""Conditions of a trace: traceable forms of libraries and layers, decompositions, and no random numbers that the trace
would not see."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

from aot_backward_exporters import fake_quantization, sixteen_bits, torch_api
from aot_backward_exporters.process_state import patched, without_convolution_libraries
from aot_backward_runtime.errors import ExportError

from . import interpolation
from .layer_patches import traceable_layers
from .shapes import numeric_sizes

aten = torch.ops.aten


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Make libraries take their traceable paths, and trace recurrent layers as plain operators."""
    with (
        without_convolution_libraries(),
        warnings.catch_warnings(),
        torch_api._compiling_state_context(),
        _checks_as_plain_operators(),
        traceable_layers(),
        fake_quantization.shapes_known(),
        interpolation.axis_by_axis(),
        numeric_sizes.carried(),
        _control_flow_compiled_anew(),
    ):
        # Dynamo reads it for torch.cond
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # torch's own rules for forward mode are scripted
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        yield


@contextlib.contextmanager
def _control_flow_compiled_anew() -> Iterator[None]:
    """Compile ``torch.cond``, ``scan`` and similar operators, which Dynamo compiles to trace them, without sharing
    earlier results.

    Dynamo caches results by the code object of the operator's wrapper. The guards of an earlier call (eager's, or
    another export's) would fix dynamic sizes when they are evaluated on them. Sizes that changed between calls would
    become symbols that Inductor does not know.
    """
    torch_compile, owner = torch.compile, threading.get_ident()

    def compile_anew(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, FunctionType) and threading.get_ident() == owner:
            copy = FunctionType(
                model.__code__.replace(), model.__globals__, model.__name__, model.__defaults__, model.__closure__
            )
            copy.__kwdefaults__ = model.__kwdefaults__
            model = copy
        return torch_compile(model, *args, **kwargs)

    with torch_api.dynamo_config.patch(automatic_dynamic_shapes=False), patched(torch, compile=compile_anew):
        yield


@contextlib.contextmanager
def _checks_as_plain_operators() -> Iterator[None]:
    """Make the check by which linear algebra raises for a singular matrix an ordinary node that nothing removes.

    torch 2.13 threads it through the graph by tokens, which are extra inputs and outputs.
    """
    check = aten._linalg_check_errors.default
    effect = torch_api._get_effect(check)
    if effect is None:
        yield
        return
    torch_api.has_side_effect(check)
    torch_api._register_effectful_op(check, None)
    try:
        yield
    finally:
        torch_api._register_effectful_op(check, effect)


@contextlib.contextmanager
def no_unseen_randomness() -> Iterator[None]:
    """Refuse a program that consumes random numbers of Python or NumPy, which a trace does not see; restore their
    generators."""
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    try:
        yield
        modules = ["random"] if random.getstate() != state else []
        if numpy:
            pairs = zip(_numbers(numpy_state), _numbers(numpy.random.get_state(legacy=False)), strict=True)
            modules += ["numpy.random"] if any(numpy.any(a != b) for a, b in pairs) else []
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)
    if modules:
        raise ExportError(
            f"the forward draws numbers with Python's {modules[0]}, and a package would have the same ones at every call: draw them with torch, or "
            "outside, and pass them as a tensor"
        )


def _numbers(state: Any) -> list[Any]:
    return [*state["state"].values(), state["has_gauss"], state["gauss"]]


_DECOMPOSITIONS: dict[Any, Any] = {}


def decompositions() -> dict[Any, Any]:
    """Return Inductor's table for ``fallback_random``, without ``native_dropout`` (its masks then equal eager's to the
    bit), with the products of vectors alone among matrix products (the others would guard a dynamic batch by its size:
    ``batch <= 16``), and without the pooling that eager's own kernels do faster (``inductor.graph_fixes.KERNELS``)."""
    if not _DECOMPOSITIONS:
        _ = torch_api.partition_fn  # imports the lowerings, which some decompositions look up
        with torch_api.inductor_config.patch(fallback_random=True):
            _DECOMPOSITIONS.update(sixteen_bits.rounding_as_kernels(torch_api.select_decomp_table()))
        pooling = (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
        for operator in (aten.native_dropout.default, aten.mm.default, aten.addmm.default, *pooling):
            _DECOMPOSITIONS.pop(operator, None)
        _DECOMPOSITIONS[aten.bmm.default] = _products_of_vectors
        for operator in (aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default):
            _DECOMPOSITIONS[operator] = _for_fixed_sizes(_DECOMPOSITIONS[operator])
        _DECOMPOSITIONS[aten.constant_pad_nd.default] = _cropped
        # The gradient of sgn: native code would return it without memory
        _DECOMPOSITIONS[aten._efficientzerotensor.default] = _zeros
    return _DECOMPOSITIONS


def _products_of_vectors(left: torch.Tensor, right: torch.Tensor) -> Any:
    """Outer and inner products of a batch are fused with their surroundings. Tensor products of equivariant networks
    are full of them: a NequIP's energies and forces of 200 atoms took 5.5 ms with the kernel of products, and 5.0
    so."""
    if left.dtype not in (torch.float32, torch.float64):
        return NotImplemented  # the kernel rounds once
    (_, rows, inner), columns = left.shape, right.shape[2]
    if torch_api.statically_known_true(inner == 1):
        return (left * right).contiguous()
    if torch_api.statically_known_true(rows == 1) and torch_api.statically_known_true(columns == 1):
        return (left * right.transpose(1, 2)).sum(2, keepdim=True)
    return NotImplemented


def _cropped(x: torch.Tensor, pad: Any, value: Any = 0) -> Any:
    """The gradient of a padding is one by negative numbers. As a slice it is read in vectors. Inductor would ask for
    each element whether it is inside: a MobileNet's gradients in bfloat16 took 154 ms, and 141 with slices."""
    if not all(torch_api.statically_known_true(n <= 0) for n in pad):
        return NotImplemented
    for i, (first, last) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = x.dim() - 1 - i
        x = x.narrow(dim, -first, x.shape[dim] + first + last)
    return x.clone()


def _for_fixed_sizes(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the operator if a size is dynamic: the decomposition asks whether the windows divide the image."""

    def decomposed(x: torch.Tensor, output_size: Any) -> Any:
        return NotImplemented if any(isinstance(n, torch.SymInt) for n in x.shape) else decomposition(x, output_size)

    return decomposed


def _zeros(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    return torch.full(size, 0, dtype=dtype, device=device)

"""Context managers for lowering a graph: each replaces process-wide state or a torch context, and restores it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import sympy
import torch

from .. import torch_api
from ..graph import Graph
from ..process_state import matrix_products_for_any_size, patched, without_convolution_libraries
from ..sixteen_bits import DTYPES
from .targets import Processor


@contextlib.contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Ignore torch's own deprecation warnings: if the caller's filters turn them into errors, the affected graphs
    cannot compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        # Advice on speed: "bf16 and fp16 are mixed in the scheduler node"
        warnings.filterwarnings("ignore", module=r"torch\._inductor")
        yield


@contextlib.contextmanager
def missing_kernels_unlogged() -> Iterator[None]:
    """Keep Inductor from logging that an operator has no Inductor kernel and calls PyTorch's, which is intended.

    The caller's log stays the same in other threads, and if it asks for more than warnings
    (``TORCH_LOGS=+inductor``)."""
    logger, thread = torch_api.inductor_ir_log, threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or "is missing a c-shim implementation" not in str(record.msg)

    if logger.isEnabledFor(logging.INFO):
        yield
        return
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def sizes_left_open() -> Iterator[None]:
    """Keep Inductor from narrowing a dynamic size to the example's side of a limit that matters only for speed.

    Inductor has another way to sum more than 4096 floats; that accurate way serves any number (a bias gradient adds up
    over the batch). The size also selects the library of a convolution, and whether a product of at most 16 rows is
    written out. A view's strides do not depend on whether a size is 1. The smaller of two sizes is found by comparing
    only these two.
    """
    kernel, V, sizes = torch_api.CppKernel, torch_api.V, torch_api.SizeVarAllocator
    original, minimum = kernel.need_use_acc_helper, sizes.evaluate_min

    def evaluate_min(self: Any, left: Any, right: Any) -> Any:
        try:
            return minimum(self, left, right)
        except TypeError:  # the ranges do not decide which is smaller
            return left if self.evaluate_expr(sympy.Le(left, right)) else right

    def need_use_acc_helper(self: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
        if reduction_type == "sum" and dtype == torch.float:
            return not V.graph.sizevars.statically_known_leq(math.prod(self.call_ranges[self.reduction_depth :]), 4096)
        return bool(original(self, reduction_type, dtype, use_scalar))

    with (
        patched(kernel, need_use_acc_helper=need_use_acc_helper),
        patched(sizes, evaluate_min=evaluate_min),
        matrix_products_for_any_size(),
        without_convolution_libraries(),
        _strides_for_any_size(),
    ):
        yield


def dtype_rules_made_once() -> contextlib.AbstractContextManager[None]:
    """Inductor (torch 2.13) has one object with the rules for dtypes, and fills it again for each operator of each
    loop: 0.2 ms, 4 % of the export of a MobileNet's training step."""
    rules = torch_api.DtypePropagationOpsHandler
    rules()
    return patched(rules, __init__=lambda self: None)


def exact_expm1() -> contextlib.AbstractContextManager[None]:
    """Compile ``expm1`` to a call of the vector library, as in eager. Inductor writes exp(x) - 1, which is 0 for x =
    1e-8."""
    return patched(torch_api.CppVecOverrides, expm1=staticmethod(lambda x: f"{x}.expm1()"))


@contextlib.contextmanager
def values_rounded_once() -> Iterator[None]:
    """Do not round a 16-bit value again that was only converted to float32. Inductor (torch 2.13) rounds for
    ``emulate_precision_casts``, for a call of ``rounded``, and to store it: a MobileNet's gradients under autocast took
    161 ms instead of 142."""

    def noting(original: Any) -> Any:
        def to_dtype(
            x: Any, dtype: torch.dtype, src_dtype: torch.dtype | None = None, use_compute_types: bool = True
        ) -> Any:
            result = original(x, dtype, src_dtype, use_compute_types)
            if dtype == torch.float32 and x.dtype in DTYPES:
                torch_api.V.kernel.cache_dtype_convert(x, x.dtype, result, dtype)
            return result

        return staticmethod(to_dtype)

    with contextlib.ExitStack() as stack:
        for overrides in (torch_api.CppOverrides, torch_api.CppVecOverrides):
            stack.enter_context(patched(overrides, to_dtype=noting(overrides.to_dtype)))
        yield


def scatters_to_one_place() -> contextlib.AbstractContextManager[None]:
    """Let a vectorised loop add all its values to one element, such as ``index_add`` into a tensor of size 1: Inductor
    (torch 2.13) asserts that the position differs from value to value."""
    kernel = torch_api.CppVecKernel
    original = kernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: str | None = None) -> None:
        if mode == "atomic_add":
            place = torch_api.V.ops.index_expr(self.rename_indexing(index), torch.int64)
            if not place.is_vec:
                index = sympy.Symbol(str(self.broadcast(place)), integer=True, nonnegative=True)
        original(self, name, index, value, mode)

    return patched(kernel, store=store)


def masked_indices_checked() -> contextlib.AbstractContextManager[None]:
    """Check an index that is one number, not a vector, wherever its mask holds. Inductor (torch 2.13) writes
    ``in bounds | ~mask`` for a mask that is a bool of C++, whose ``~`` is never 0; and it takes a vector of masks to
    hold only if all of it does."""
    kernel = torch_api.CppKernel
    original = kernel.indirect_assert

    def indirect_assert(self: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        if mask is not None:
            vector = str(mask).removesuffix(".all_masked()")
            condition = str(mask) if vector == str(mask) else f"!{vector}.all_zero()"
            mask = f"-static_cast<int>({condition})"  # ~ of -1 is 0
        text: str = original(self, var, lower, upper, mask)
        return text

    return patched(kernel, indirect_assert=indirect_assert)


def _strides_for_any_size() -> contextlib.AbstractContextManager[None]:
    """Compute a view's strides for sizes other than 1, if they exist: the stride of a size of 1 does not matter."""
    module, name = torch_api.strides_of_view()
    if not name:
        return contextlib.nullcontext()
    original = getattr(module, name)

    def strides(shape: Any, stride: Any, wanted: Any, size_oblivious: bool = False) -> Any:
        new_stride = original(shape, stride, wanted, size_oblivious=True)
        return original(shape, stride, wanted, size_oblivious=size_oblivious) if new_stride is None else new_stride

    return patched(module, **{name: strides})


@contextlib.contextmanager
def donating(graph: Graph, fake_mode: Any) -> Iterator[bool]:
    """Let Inductor write its own values into the memory of donated inputs. Yield whether there are any.

    Subgraphs (of cond, of scan) donate no inputs: before 2.15 Inductor applies the outer graph's donated indices to
    their inputs, too, and generated code overwrote a weight with its gradient."""
    if not graph.donated:
        yield False
        return
    lowering = torch_api.SubgraphLowering
    original = lowering.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        torch_api.donate_no_inputs(self)

    context = torch_api.TracingContext(fake_mode)
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(graph.donated))
    with torch_api.in_tracing_context(context), patched(lowering, __init__=made):
        yield True


@contextlib.contextmanager
def loop_results_kept() -> Iterator[None]:
    """Keep Inductor from reusing the memory of a buffer that a loop fills. It then declares the buffer twice (torch
    2.13), and the C++ code does not compile."""
    loop, V = torch_api.WhileLoop, torch_api.V
    original = loop.codegen

    def codegen(self: Any, wrapper: Any) -> None:
        V.graph.never_reuse_buffers.update(output.get_name() for output in self.mutation_outputs)
        original(self, wrapper)

    with patched(loop, codegen=codegen):
        yield


@contextlib.contextmanager
def generated_code() -> Iterator[None]:
    """Correct the code that Inductor generates, and the time that it takes."""
    with contextlib.ExitStack() as stack:
        for patch in (
            dtype_rules_made_once,
            exact_expm1,
            values_rounded_once,
            scatters_to_one_place,
            masked_indices_checked,
            loop_results_kept,
        ):
            stack.enter_context(patch())
        yield


@contextlib.contextmanager
def generating_for(built_for: Processor) -> Iterator[None]:
    """Make Inductor generate code for that processor on any machine, without compiling probes for it (10 s in a fresh
    cache)."""
    isa = torch_api.cpu_vec_isa
    vectors = [getattr(isa, built_for.isa)()] if built_for.isa else []
    with patched(isa, valid_vec_isa_list=lambda: vectors):
        yield

"""Context managers within which Inductor lowers a graph: each replaces something process-wide, or a context of torch's, and puts it back."""

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
from .targets import Processor


@contextlib.contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Lowerings call functions that torch has deprecated since; where the caller's filters make warnings errors, no graph that has one compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice on speed: "bf16 and fp16 are mixed in the scheduler node"
        yield


@contextlib.contextmanager
def missing_kernels_unlogged() -> Iterator[None]:
    """A context in which Inductor does not log, for each operator, that it has no kernel of its own for it and calls PyTorch's, which is as intended.

    The caller's log is left alone otherwise: in other threads, and where it asks for more than warnings (``TORCH_LOGS=+inductor``)."""
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
    """A context in which Inductor does not narrow a dynamic size to the example's side of a limit that matters only for speed.

    How to add up more than 4096 floats: the accurate way serves any number (a bias gradient adds up over the batch). Which library a
    convolution would run on. Whether a product of at most 16 rows is better written out. Whether a size is 1, which matters not to a view's strides.
    The smaller of two sizes is found by comparing those two alone.
    """
    kernel, V, sizes = torch_api.CppKernel, torch_api.V, torch_api.SizeVarAllocator
    original, minimum = kernel.need_use_acc_helper, sizes.evaluate_min

    def evaluate_min(self: Any, left: Any, right: Any) -> Any:
        try:
            return minimum(self, left, right)
        except TypeError:  # which of the two cannot be told from the ranges
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


def exact_expm1() -> contextlib.AbstractContextManager[None]:
    """A context in which ``expm1`` is a call of the vector library's, as in eager. Inductor writes exp(x) - 1, which is 0 for x = 1e-8."""
    return patched(torch_api.CppVecOverrides, expm1=staticmethod(lambda x: f"{x}.expm1()"))


def _strides_for_any_size() -> contextlib.AbstractContextManager[None]:
    """A context in which a view's strides are those of sizes that are not 1, where there are some: of a size that is 1 no stride matters."""
    module, name = torch_api.strides_of_view()
    if not name:
        return contextlib.nullcontext()
    original = getattr(module, name)

    def strides(shape: Any, stride: Any, wanted: Any, size_oblivious: bool = False) -> Any:
        found = original(shape, stride, wanted, size_oblivious=True)
        return original(shape, stride, wanted, size_oblivious=size_oblivious) if found is None else found

    return patched(module, **{name: strides})


@contextlib.contextmanager
def donating(graph: Graph, fake_mode: Any) -> Iterator[bool]:
    """A context in which Inductor may put its own values into the memory of the inputs that are donated. Whether there are any.

    None of the inputs of a graph within the graph (of cond, of scan) is: before 2.15 Inductor takes the numbers of those that are for numbers of its
    inputs, too, and code wrote the gradient of a weight over the weight."""
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
def generating_for(built_for: Processor) -> Iterator[None]:
    """A context in which Inductor generates code for that processor whichever builds it, and compiles no probes to find out (10 s in a fresh
    cache)."""
    isa = torch_api.cpu_vec_isa
    vectors = [getattr(isa, built_for.isa)()] if built_for.isa else []
    with patched(isa, valid_vec_isa_list=lambda: vectors):
        yield

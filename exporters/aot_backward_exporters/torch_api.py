"""Every private torch name that the library and the exporters use, with the first torch version that has it, if not all
do.

``torch_api.NAME`` resolves lazily (PEP 562), so that ``import aot_backward`` stays light, and fails loudly if a name is
missing. ``tests/project/test_torch_api.py`` resolves all of them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from aot_backward_runtime.torch_api import SUPPORTED

_NAMES = {
    # capture
    "aot_export_joint_with_descriptors": "torch._functorch.aot_autograd",
    "make_fake_inputs": "torch._export.non_strict_utils",
    "produce_guards_and_solve_constraints": "torch._export.non_strict_utils",
    "ParamAOTInput": "torch._functorch._aot_autograd.descriptors",
    "BufferAOTInput": "torch._functorch._aot_autograd.descriptors",
    "PlainAOTInput": "torch._functorch._aot_autograd.descriptors",
    "TangentAOTInput": "torch._functorch._aot_autograd.descriptors",
    "PlainAOTOutput": "torch._functorch._aot_autograd.descriptors",
    "InputMutationAOTOutput": "torch._functorch._aot_autograd.descriptors",
    "GradAOTOutput": "torch._functorch._aot_autograd.descriptors",
    "OutputType": "torch._functorch._aot_autograd.schemas",
    "ConstraintViolationError": "torch.fx.experimental.symbolic_shapes",
    "GuardOnDataDependentSymNode": "torch.fx.experimental.symbolic_shapes",
    "compute_unbacked_bindings": "torch.fx.experimental.symbolic_shapes",
    "free_unbacked_symbols": "torch.fx.experimental.symbolic_shapes",
    "sympy_functions": "torch.utils._sympy.functions",  # the module itself
    "symbolic_shapes_config": "torch.fx.experimental._config",  # the module itself
    "_get_effect": "torch._higher_order_ops.effects",
    "_register_effectful_op": "torch._higher_order_ops.effects",
    "higher_order_utils": "torch._higher_order_ops.utils",  # the module itself
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "has_side_effect": "torch.fx.node",
    "_compiling_state_context": "torch._export.utils",
    "_combine_args": "torch.export.dynamic_shapes",
    "_check_dynamic_shapes": "torch.export.dynamic_shapes",
    "_tree_map_with_path": "torch.export.dynamic_shapes",
    "_process_dynamic_shapes": "torch.export.dynamic_shapes",
    "_swap_tensor_impl": "torch._C",
    "_global_forward_pre_hooks": "torch.nn.modules.module",
    "_global_forward_hooks": "torch.nn.modules.module",
    "_global_backward_pre_hooks": "torch.nn.modules.module",
    "_global_backward_hooks": "torch.nn.modules.module",
    "decompositions": "torch._decomp.decompositions",  # the module itself
    "transformer": "torch.nn.modules.transformer",  # the module itself
    "_BatchNorm": "torch.nn.modules.batchnorm",
    "_assert_async": "torch",
    "_fake_quantize_learnable_per_channel_affine": "torch",
    "_fake_quantize_learnable_per_tensor_affine": "torch",
    "peek_interpreter_stack": "torch._C._functorch",
    "current_level": "torch._C._functorch",
    "_unwrap_batched": "torch._C._functorch",
    "_add_batch_dim": "torch._C._functorch",
    "_get_mkldnn_enabled": "torch._C",
    "_set_mkldnn_enabled": "torch._C",
    "_recursive_joint_graph_passes": "torch._inductor.compile_fx",
    "partition_fn": "torch._inductor.compile_fx",
    "default_partition": "torch._functorch.partitioners",
    "CustomPartitionerFn": "torch._inductor.custom_graph_pass",
    "select_decomp_table": "torch._inductor.decomposition",
    "inductor_config": "torch._inductor.config",  # the module itself
    "fake_impls": "torch._subclasses.fake_impls",  # the module itself
    "_global_optimizer_pre_hooks": "torch.optim.optimizer",
    "_global_optimizer_post_hooks": "torch.optim.optimizer",
    "fx_graph_cse": "torch._functorch.compile_utils",
    # recorded passes
    "FakeTensorMode": "torch._subclasses.fake_tensor",
    "ShapeEnv": "torch.fx.experimental.symbolic_shapes",
    "bound_sympy": "torch.utils._sympy.value_ranges",
    "ValueRanges": "torch.utils._sympy.value_ranges",
    "int_oo": "torch.utils._sympy.numbers",
    "DimDynamic": "torch.fx.experimental.symbolic_shapes",
    "SymNode": "torch.fx.experimental.sym_node",
    "_debug_has_internal_overlap": "torch",
    "ConstantSource": "torch._dynamo.source",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor",
    "enable_python_dispatcher": "torch._dispatch.python",
    "OpOverload": "torch._ops",
    "HigherOrderOperator": "torch._ops",
    "_dispatch_has_kernel": "torch._C",
    "_dispatch_get_registrations_for_dispatch_key": "torch._C",
    "_dispatch_find_schema_or_throw": "torch._C",
    "_dispatch_pystub": "torch._C",
    "OPDEFS": "torch._library.custom_ops",
    "fake_registry": "torch._library.simple_registry",
    "_ExcludeDispatchKeyGuard": "torch._C",
    "DispatchKeySet": "torch._C",
    "DispatchKey": "torch._C",
    "make_fx": "torch.fx.experimental.proxy_tensor",
    "PythonKeyTracer": "torch.fx.experimental.proxy_tensor",
    "aot_export_module": "torch._functorch.aot_autograd",
    "is_non_overlapping_and_dense": "torch._prims_common",
    "contiguous_strides": "torch._prims_common",
    "is_contiguous_or_false": "torch._prims_common",
    # compilation (aot_backward_exporters)
    "OperatorBase": "torch._ops",
    "functorch_config": "torch._functorch.config",  # the module itself
    "dynamo_config": "torch._dynamo.config",  # the module itself
    "compile_fx_inner": "torch._inductor.compile_fx",
    "get_cpp_wrapper_config": "torch._inductor.compile_fx",
    "V": "torch._inductor.virtualized",
    "GraphLowering": "torch._inductor.graph",
    "SubgraphLowering": "torch._inductor.graph",
    "WhileLoop": "torch._inductor.ir",
    "KernelDefinitionLine": "torch._inductor.codegen.wrapper",
    "inductor_ir": "torch._inductor.ir",  # the module itself
    "DtypePropagationOpsHandler": "torch._inductor.dtype_propagation",
    "SizeVarAllocator": "torch._inductor.sizevars",
    "fresh_cache": "torch._inductor.utils",
    "TracingContext": "torch._guards",
    "in_tracing_context": "torch._guards",
    "CppBuilder": "torch._inductor.cpp_builder",
    "cpu_vec_isa": "torch._inductor.cpu_vec_isa",  # the module itself
    "decomposition": "torch._inductor.decomposition",  # the module itself
    "lowering": "torch._inductor.lowering",  # the module itself
    "statically_known_true": "torch.fx.experimental.symbolic_shapes",
    "CppKernel": "torch._inductor.codegen.cpp",
    "CppOverrides": "torch._inductor.codegen.cpp",
    "CppVecKernel": "torch._inductor.codegen.cpp",
    "CppVecOverrides": "torch._inductor.codegen.cpp",
    "get_cpp_compiler": "torch._inductor.cpp_builder",
    "InvalidCxxCompiler": "torch._inductor.exc",
    "InductorError": "torch._inductor.exc",
    "inductor_ir_log": "torch._inductor.ir",
    # ONNX (aot_backward_exporters)
    "decomposition_table": "torch._decomp",
    "InsertTypePromotion": "torch.onnx._internal.fx.passes",
    "ONNXRegistry": "torch.onnx._internal.exporter._registration",
    "_translate_fx_graph": "torch.onnx._internal.exporter._core",
    "add_opset_imports": "torch.onnx._internal.exporter._ir_passes",
}
_MODULES = {
    "decompositions",
    "decomposition",
    "lowering",
    "higher_order_utils",
    "transformer",
    "sympy_functions",
    "symbolic_shapes_config",
    "inductor_config",
    "inductor_ir",
    "fake_impls",
    "functorch_config",
    "dynamo_config",
    "cpu_vec_isa",
}

_SINCE: dict[str, str] = {}
"""First torch minor version of each name that some supported versions lack."""

_RENAMED = {
    "is_non_overlapping_and_dense": "is_non_overlapping_and_dense_or_false",
    "contiguous_strides": "make_contiguous_strides_for",
    "in_tracing_context": "tracing",
    "fake_registry": "singleton",
    "inductor_ir_log": "log",
}

NAMESPACES = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_native_aot", "_quantized", "_test", "aten", "c10d", "coor",
    "debug_mode_ops", "debugprims", "export", "flex_gemm", "fsdp", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn",
    "prepacked", "prims", "profiler", "quantization", "quantized", "rngprims", "sparse", "static_runtime", "symm_mem",
})  # fmt: skip
"""Namespaces of the operators that ``import torch`` registers, in any supported version."""

_OPTIONS_SINCE = {
    "aot_inductor.enable_frame_pointer": "2.12",
    "aot_inductor.enable_line_tables": "2.13",
    "cpp.march": "2.13",
}
"""First torch minor version of an option of ``torch._inductor.config``. An option that is not listed must be in all
supported versions."""


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward mode is active (2.11 to 2.15)."""
    levels: Any = torch.autograd.forward_ad
    return __getattr__("peek_interpreter_stack")() is not None or levels._current_level >= 0


def control_flow_modules() -> list[Any]:
    """Return the modules of the operators that trace their own bodies, each with the name ``reenter_make_fx`` (2.11 to
    2.15)."""
    names = ("associative_scan", "cond", "map", "scan", "while_loop")
    return [importlib.import_module(f"torch._higher_order_ops.{name}") for name in names]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key that tensors of one storage share, traced ones too, as long as they live."""
    return tensor.untyped_storage()._cdata


def minor() -> str:
    """Return torch's version without patch and build, "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])


def at_least(version: str) -> bool:
    """Return whether this is torch ``version`` ("2.13") or a newer one."""
    return _numbers(minor()) >= _numbers(version)


def _numbers(version: str) -> list[int]:
    return [int(n) for n in version.split(".")]


def known_options(options: dict[str, object]) -> dict[str, object]:
    """Return the ``options`` that this torch's ``torch._inductor.config`` has: it raises on any other."""
    return {name: value for name, value in options.items() if at_least(_OPTIONS_SINCE.get(name, SUPPORTED[0]))}


def module_of_custom_op(operator: str) -> str:
    """Return the module of the function that ``torch.library.custom_op`` made the operator ("mine::cube") from; "" for
    other operators."""
    definition = __getattr__("OPDEFS").get(operator)
    return "" if definition is None else str(definition._init_fn.__module__)


def places_of_operator(operator: str, overload: str) -> list[str]:
    """Return the known files that defined the operator and that registered its fake implementation."""
    # "registered at FILE:LINE"
    registration = __getattr__("_dispatch_find_schema_or_throw")(operator, overload).debug()
    fake_entry = __getattr__("fake_registry")._data.get(f"{operator}.{overload}" if overload else operator)
    kernel = fake_entry.fake_impl.kernel if fake_entry is not None else None
    sources = [registration.partition(" at ")[2], *([kernel.source] if kernel is not None else [])]
    return [source.rpartition(":")[0] for source in sources if source]


@contextlib.contextmanager
def _quiet_search_for_cuda() -> Iterator[None]:
    """Silence ``torch.utils.cpp_extension`` while it is imported: on a machine with CUDA's compiler but without a GPU
    it logs a warning to stderr, which may carry one of our reports (``record --json``)."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def gradient_shapes(node: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the gradients that go into an autograd node (``Node._input_metadata``, 2.11 to 2.15). Raise
    :class:`TypeError` for a symbolic size, as during tracing: reading its value would create a guard."""
    shapes = tuple(tuple(metadata.shape) for metadata in node._input_metadata)
    if any(type(n) is not int for shape in shapes for n in shape):
        raise TypeError("a symbolic size")
    return shapes


def backward_that_runs() -> tuple[str, int] | None:
    """Return name and number of the autograd node that runs in this thread. Its forward operators have the number as
    ``seq_nr`` (``torch._C._current_autograd_node``, ``Node._sequence_nr``, 2.11 to 2.15)."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def unguarded(of: Any) -> contextlib.AbstractContextManager[None]:
    """Answer comparisons of symbolic sizes by the example, without a guard (``ShapeEnv.suppress_guards``, 2.11 to
    2.15). Use it only if the answer makes no difference, such as which of its kernels eager would select for the same
    numbers and strides. ``of``: a fake mode, or the node of a size."""
    return of.shape_env.suppress_guards()


def clear_kernel_cache(operator: Any) -> None:
    """Make the Python dispatcher look up the kernels of ``operator`` again (``OpOverload._dispatch_cache``, 2.11 to
    2.15)."""
    operator._dispatch_cache.clear()


def call_kernel(operator: Any, key: Any, *args: Any) -> Any:
    """Call torch's own kernel of ``operator`` for a dispatch key, also if Python code replaces it
    (``OpOverload._op_dk``, 2.11 to 2.15)."""
    return operator._op_dk(key, *args)


def kernel_lookup() -> tuple[Any, str]:
    """Return the class of operators and the name of its method that looks up, once, the kernel for a dispatch key
    (``OpOverload._get_dispatch``, 2.11 to 2.15)."""
    return __getattr__("OpOverload"), "_get_dispatch"


def donate_no_inputs(lowering: Any) -> None:
    """Keep Inductor from writing into the inputs of the graph that it lowers (``GraphLowering.bw_donated_idxs``, 2.11
    to 2.15)."""
    lowering.bw_donated_idxs = None


def strides_of_view() -> tuple[Any, str]:
    """Return the module and name of Inductor's function for the strides of a view (``_compute_stride``, seen in 2.13
    and 2.14); "" if it is missing. If Inductor calls another one, a batch of 1 is refused: ``test_declared_ranges``
    tests this."""
    module = __getattr__("fake_impls")
    return module, "_compute_stride" if hasattr(module, "_compute_stride") else ""


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, since = _NAMES[name], _SINCE.get(name, SUPPORTED[0])
    if minor() not in SUPPORTED:
        raise ImportError(
            f"aot-backward supports torch {', '.join(SUPPORTED)}; this is {torch.__version__}: {module}.{name} was not looked up"
        )
    if not at_least(since):
        raise ImportError(
            f"{module}.{name} came with torch {since}; this is {torch.__version__}: pip install 'torch=={SUPPORTED[-1]}.*'"
        )
    with warnings.catch_warnings(), _quiet_search_for_cuda():
        # torch's own modules use deprecated functions (torch.jit); with warnings as errors, every import would fail
        warnings.simplefilter("ignore")
        if module.startswith("torch._inductor"):
            with contextlib.suppress(ImportError):  # it needs setuptools
                importlib.import_module("torch.utils.cpp_extension")  # lowering imports it
        owner = importlib.import_module(module)
    value = owner if name in _MODULES else getattr(owner, _RENAMED.get(name, name))
    globals()[name] = value
    return value

"""Every private torch name that the library and the exporters use, and the versions in which each was seen.

``torch_api.NAME`` resolves lazily (PEP 562), so that ``import aot_backward`` stays light, and fails loudly where a name is gone.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

VERSIONS = ("2.11", "2.12", "2.13")
"""The torch minors that this distribution supports. 2.13 is proved by the tests; 2.12 by `make rebuild-matrix`, 2.11 by `make cross`,
and by `make gpu` where there is a GPU."""

_ALL = VERSIONS

_NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    # capture
    "aot_export_joint_with_descriptors": ("torch._functorch.aot_autograd", _ALL),
    "make_fake_inputs": ("torch._export.non_strict_utils", _ALL),
    "produce_guards_and_solve_constraints": ("torch._export.non_strict_utils", _ALL),
    "ParamAOTInput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "BufferAOTInput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "PlainAOTInput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "TangentAOTInput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "PlainAOTOutput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "InputMutationAOTOutput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "GradAOTOutput": ("torch._functorch._aot_autograd.descriptors", _ALL),
    "OutputType": ("torch._functorch._aot_autograd.schemas", _ALL),
    "ConstraintViolationError": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "Unsupported": ("torch._dynamo.exc", _ALL),
    "GuardOnDataDependentSymNode": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "compute_unbacked_bindings": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "free_unbacked_symbols": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "sympy_functions": ("torch.utils._sympy.functions", _ALL),  # the module itself
    "symbolic_shapes_config": ("torch.fx.experimental._config", _ALL),  # the module itself
    "_get_effect": ("torch._higher_order_ops.effects", ("2.13",)),
    "_register_effectful_op": ("torch._higher_order_ops.effects", ("2.13",)),
    "TorchDispatchMode": ("torch.utils._python_dispatch", _ALL),
    "has_side_effect": ("torch.fx.node", _ALL),
    "_compiling_state_context": ("torch._export.utils", _ALL),
    "_combine_args": ("torch.export.dynamic_shapes", _ALL),
    "_check_dynamic_shapes": ("torch.export.dynamic_shapes", _ALL),
    "_tree_map_with_path": ("torch.export.dynamic_shapes", _ALL),
    "_process_dynamic_shapes": ("torch.export.dynamic_shapes", _ALL),
    "_swap_tensor_impl": ("torch._C", _ALL),
    "_global_forward_pre_hooks": ("torch.nn.modules.module", _ALL),
    "_global_forward_hooks": ("torch.nn.modules.module", _ALL),
    "_global_backward_pre_hooks": ("torch.nn.modules.module", _ALL),
    "_global_backward_hooks": ("torch.nn.modules.module", _ALL),
    "decompositions": ("torch._decomp.decompositions", _ALL),  # the module itself
    "transformer": ("torch.nn.modules.transformer", _ALL),  # the module itself
    "_get_mkldnn_enabled": ("torch._C", _ALL),
    "_set_mkldnn_enabled": ("torch._C", _ALL),
    "_recursive_joint_graph_passes": ("torch._inductor.compile_fx", _ALL),
    "partition_fn": ("torch._inductor.compile_fx", _ALL),
    "select_decomp_table": ("torch._inductor.decomposition", _ALL),
    "inductor_config": ("torch._inductor.config", _ALL),  # the module itself
    "_global_optimizer_pre_hooks": ("torch.optim.optimizer", _ALL),
    "_global_optimizer_post_hooks": ("torch.optim.optimizer", _ALL),
    "fx_graph_cse": ("torch._functorch.compile_utils", _ALL),
    # recorded passes
    "FakeTensorMode": ("torch._subclasses.fake_tensor", _ALL),
    "ShapeEnv": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "bound_sympy": ("torch.utils._sympy.value_ranges", _ALL),
    "ValueRanges": ("torch.utils._sympy.value_ranges", _ALL),
    "int_oo": ("torch.utils._sympy.numbers", _ALL),
    "DimDynamic": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "ConstantSource": ("torch._dynamo.source", _ALL),
    "unset_fake_temporarily": ("torch._subclasses.fake_tensor", _ALL),
    "enable_python_dispatcher": ("torch._dispatch.python", _ALL),
    "OpOverload": ("torch._ops", _ALL),
    "HigherOrderOperator": ("torch._ops", _ALL),
    "_dispatch_has_kernel": ("torch._C", _ALL),
    "_dispatch_get_registrations_for_dispatch_key": ("torch._C", _ALL),
    "_dispatch_find_schema_or_throw": ("torch._C", _ALL),
    "_dispatch_pystub": ("torch._C", _ALL),
    "OPDEFS": ("torch._library.custom_ops", _ALL),
    "fake_registry": ("torch._library.simple_registry", _ALL),
    "_ExcludeDispatchKeyGuard": ("torch._C", _ALL),
    "DispatchKeySet": ("torch._C", _ALL),
    "DispatchKey": ("torch._C", _ALL),
    "make_fx": ("torch.fx.experimental.proxy_tensor", _ALL),
    "PythonKeyTracer": ("torch.fx.experimental.proxy_tensor", _ALL),
    "aot_export_module": ("torch._functorch.aot_autograd", _ALL),
    "is_non_overlapping_and_dense": ("torch._prims_common", _ALL),
    "contiguous_strides": ("torch._prims_common", _ALL),
    # compilation (aot_backward_exporters)
    "OperatorBase": ("torch._ops", _ALL),
    "functorch_config": ("torch._functorch.config", _ALL),  # the module itself
    "compile_fx_inner": ("torch._inductor.compile_fx", _ALL),
    "get_cpp_wrapper_config": ("torch._inductor.compile_fx", _ALL),
    "V": ("torch._inductor.virtualized", _ALL),
    "fresh_cache": ("torch._inductor.utils", _ALL),
    "TracingContext": ("torch._guards", _ALL),
    "in_tracing_context": ("torch._guards", _ALL),
    "CppBuilder": ("torch._inductor.cpp_builder", _ALL),
    "cpu_vec_isa": ("torch._inductor.cpu_vec_isa", _ALL),  # the module itself
    "decomposition": ("torch._inductor.decomposition", _ALL),  # the module itself
    "statically_known_true": ("torch.fx.experimental.symbolic_shapes", _ALL),
    "CppKernel": ("torch._inductor.codegen.cpp", _ALL),
    "get_cpp_compiler": ("torch._inductor.cpp_builder", _ALL),
    "InvalidCxxCompiler": ("torch._inductor.exc", _ALL),
    "InductorError": ("torch._inductor.exc", _ALL),
    # ONNX (aot_backward_exporters)
    "decomposition_table": ("torch._decomp", _ALL),
    "InsertTypePromotion": ("torch.onnx._internal.fx.passes", ("2.13",)),
    "ONNXRegistry": ("torch.onnx._internal.exporter._registration", ("2.13",)),
    "_translate_fx_graph": ("torch.onnx._internal.exporter._core", ("2.13",)),
    "add_opset_imports": ("torch.onnx._internal.exporter._ir_passes", ("2.13",)),
}
_MODULES = {
    "decompositions",
    "decomposition",
    "transformer",
    "sympy_functions",
    "symbolic_shapes_config",
    "inductor_config",
    "functorch_config",
    "cpu_vec_isa",
}

_RENAMED = {
    "is_non_overlapping_and_dense": "is_non_overlapping_and_dense_or_false",
    "contiguous_strides": "make_contiguous_strides_for",
    "in_tracing_context": "tracing",
    "fake_registry": "singleton",
}

NAMESPACES = frozenset({
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "aten", "c10d", "debug_mode_ops", "debugprims",
    "export", "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "prims", "profiler", "quantization", "quantized",
    "rngprims", "sparse", "static_runtime", "symm_mem",
})  # fmt: skip
"""Of the operators that ``import torch`` registers (2.13)."""

_MISSING_OPTIONS: dict[str, frozenset[str]] = {
    "2.12": frozenset({"cpp.march", "aot_inductor.enable_line_tables"}),
    "2.11": frozenset({"cpp.march", "aot_inductor.enable_line_tables", "aot_inductor.enable_frame_pointer"}),
}


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors of one storage, traced ones too, as long as they live."""
    return tensor.untyped_storage()._cdata


def minor() -> str:
    """torch's version without patch and build, "2.13"."""
    return ".".join(torch.__version__.split(".")[:2])


def known_options(options: dict[str, object]) -> dict[str, object]:
    """Those of ``options`` that this torch's ``torch._inductor.config`` has: it raises on any other."""
    return {name: value for name, value in options.items() if name not in _MISSING_OPTIONS.get(minor(), ())}


def module_of_custom_op(operator: str) -> str:
    """The module of the function that ``torch.library.custom_op`` made the operator ("mine::cube") of; "" where it was not made so."""
    definition = __getattr__("OPDEFS").get(operator)
    return "" if definition is None else str(definition._init_fn.__module__)


def places_of_operator(operator: str, overload: str) -> list[str]:
    """The files, as far as they are known, that defined the operator and that registered its rule for fake tensors."""
    written = __getattr__("_dispatch_find_schema_or_throw")(operator, overload).debug()  # "registered at FILE:LINE"
    fake = __getattr__("fake_registry").get(f"{operator}.{overload}" if overload else operator)
    kernel = fake.fake_impl.kernel if fake is not None else None
    sources = [written.partition(" at ")[2], *([kernel.source] if kernel is not None else [])]
    return [source.rpartition(":")[0] for source in sources if source]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, versions = _NAMES[name]
    if minor() not in versions:
        raise ImportError(f"aot-backward supports torch {', '.join(VERSIONS)}; this is {torch.__version__}: {module}.{name} was not looked up")
    with warnings.catch_warnings():  # importing Inductor makes torch warn of its own use of torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        loaded = importlib.import_module(module)
    value = loaded if name in _MODULES else getattr(loaded, _RENAMED.get(name, name))
    globals()[name] = value
    return value

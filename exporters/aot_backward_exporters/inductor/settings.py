"""Inductor's settings for every graph."""

from __future__ import annotations

from .. import torch_api
from ..graph import Options
from .targets import Processor

FIXED: Options = {
    "cpp_wrapper": True,
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    # Otherwise a tensor of at most 8 elements (a bias) is baked into the code, and new weights silently give wrong
    # numbers.
    "always_keep_tensor_constants": True,
    # Likewise for a tensor of equal elements (a LayerNorm's weight of ones); torch 2.13 runs that pass only when it
    # partitions.
    "joint_graph_constant_folding": False,
    "cpp.weight_prepack": False,
    "freezing": False,
    # With it, gradients of ResNet-18 are off by 7e-2 relative, in 60 of 62 tensors (torch 2.13 on a CPU; torch.compile
    # has the same error).
    "layout_optimization": False,
    "shape_padding": False,  # on a GPU it guards sizes and times kernels
    "fallback_random": True,  # the dropout masks are eager's
    "cpp.dynamic_threads": True,  # otherwise the builder's number of cores is in the code
    # Inductor selects parallel loops for this number of threads, not for the builder's. With one, no region would span
    # several loops.
    "cpp.threads": 8,
    "cpp.vec_isa_ok": True,  # without a probe
    "aot_inductor.compile_wrapper_opt_level": "O2",
    "aot_inductor.precompile_headers": False,  # toolchain/gcc.py has its own
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.embed_kernel_binary": True,
}


def settings_for(built_for: Processor) -> Options:
    """Return Inductor's settings for ``built_for``, limited to names that this torch has."""
    return torch_api.known_options({**FIXED, "cpp.march": built_for.march, "cpp.simdlen": built_for.simd_bits})

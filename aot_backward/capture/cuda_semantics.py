"""Differences between eager on a GPU and on a CPU, for programs that are captured on a CPU and compiled for a GPU.

**Autocast.** Each device has its own lists of operators to cast. Under CUDA's, softmax, normalisations, losses, powers
and sums compute in float32; under the CPU's, most of them compute in their input's dtype. Within :func:`as_on_gpu` the
CPU's autocast follows CUDA's lists, both in capture and in the eager run that it is compared with. The lists come from
the header that torch was built with (``ATen/autocast_mode.h``; ``CastPolicy`` describes them).
``torch.autocast("cuda")`` takes effect, although a machine without a GPU switches it off with a warning. So does
``torch.autocast("cpu")``: a program that asks its tensors for their device would say "cuda" on a GPU. The cache of cast
weights is off, as in every trace.

**Dropout in attention.** A CPU computes a formula with ``dropout``; a GPU's attention kernels draw their own masks from
the same seed. This is refused unless ``sdpa_kernel(SDPBackend.MATH)`` or dtype float64 makes eager use the formula on a
GPU, too.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import exclusive, patched
from aot_backward_runtime.errors import ExportError

_Kernel = Callable[..., Any]
_WITH_DTYPE = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
"""Overloads of ``norm`` that CUDA's autocast calls instead, with a float32 result."""


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Make eager on a CPU cast as on a GPU; attention with dropout raises :class:`ExportError`."""
    kernels = [("AutocastCPU", name, kernel) for name, kernel in {**_kernels(), **_rules_of_other_libraries()}.items()]
    kernels.append(("AutogradCPU", "aten::scaled_dot_product_attention", _attention))
    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusive())
        stack.callback(_clear_dispatch_caches, [name for _, name, _ in kernels])
        with warnings.catch_warnings():
            # The warning says that a kernel is replaced
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            libraries: dict[tuple[str, str], torch.library.Library] = {}
            for key, name, kernel in kernels:
                namespace, _, operator_name = name.partition("::")
                if (namespace, key) not in libraries:
                    libraries[namespace, key] = torch.library.Library(namespace, "IMPL", key)
                    stack.callback(libraries[namespace, key]._destroy)
                libraries[namespace, key].impl(operator_name, kernel, allow_override=True)
        _clear_dispatch_caches([name for _, name, _ in kernels])
        stack.enter_context(_autocast_of_both_devices())
        yield


def lists() -> dict[str, tuple[str, ...]]:
    """Return CUDA's lists: name of the policy -> its operators, such as "pow.Tensor_Scalar"."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    out = {}
    for policy in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "DIFFERENT_REDISPATCH_SIGNATURE", "PROMOTE"):
        match = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)*.*\n)", text)
        if match is None:
            raise ExportError(
                f"{header.name}: expected the operators that autocast casts on a GPU (AT_FORALL_{policy}), got none from torch {torch.__version__}. "
                "Export on a GPU (target='cuda')"
            )
        quoted_names = re.findall(r'"([\w.]+)"', match[1])  # a list that contains more than names
        out[policy] = tuple(
            quoted_names or [f"{n}.{o}" if o else n for n, o in re.findall(r"\b_\((\w+)(?:, (\w+))?\)", match[1])]
        )
    return out


@functools.cache
def _kernels() -> dict[str, Any]:
    """Return operator -> kernel that casts as on a GPU. Operators that are only in the CPU's lists are not cast."""
    cpu_names = torch_api._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    out: dict[str, Any] = {name: torch.library.fallthrough_kernel for name in cpu_names if name.startswith("aten::")}
    policies = {
        "LOWER_PRECISION_FP": _lower_precision,
        "FP32": _float32,
        "FP32_SET_OPT_DTYPE": _float32_result,
        "DIFFERENT_REDISPATCH_SIGNATURE": _with_dtype,
        "PROMOTE": _promote,
    }
    for policy, names in lists().items():
        out |= {
            f"aten::{name}": functools.partial(_apply_policy, policies[policy], _operator(f"aten::{name}"))
            for name in names
        }
    out["aten::binary_cross_entropy"] = _refuse_binary_cross_entropy
    return out


def _rules_of_other_libraries() -> dict[str, Any]:
    """Return kernels that refuse other libraries' operators with an autocast rule for GPUs: without a GPU the rule
    cannot be read or run."""
    gpu_names = torch_api._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    return {name: functools.partial(_refuse_unknown_rule, name) for name in gpu_names if not name.startswith("aten::")}


def _refuse_unknown_rule(name: str, *args: Any, **kwargs: Any) -> Any:
    raise ExportError(
        f"{name} has its own rule for autocast on a GPU (torch.library.register_autocast), and the rule needs a GPU. Export on a GPU "
        "(target='cuda'), or call the operator under torch.autocast(\"cuda\", enabled=False) with tensors already cast to the dtype that it needs"
    )


def _clear_dispatch_caches(names: Iterable[str]) -> None:
    """Clear the kernels that torch's Python dispatcher has cached for these operators."""
    for name in names:
        _operator(name)._dispatch_cache.clear()


def _operator(name: str) -> Any:
    namespace, _, operator_name = name.partition("::")
    packet, _, overload = operator_name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _apply_policy(policy: _Kernel, operator: Any, *args: Any, **kwargs: Any) -> Any:
    with torch_api._ExcludeDispatchKeyGuard(torch_api.DispatchKeySet(torch_api.DispatchKey.AutocastCPU)):
        return policy(operator, args, kwargs)


def _lower_precision(operator: Any, args: Any, kwargs: Any) -> Any:
    to = torch.get_autocast_dtype("cpu")
    return operator(*_cast(args, to), **_cast(kwargs, to))


def _float32(operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _float32_result(operator: Any, args: Any, kwargs: Any) -> Any:
    """Keep a dtype that the program passes; otherwise the result of a floating-point argument is float32."""
    named_args = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    if _eligible(args[0]) and named_args.get("dtype") is None:
        named_args["dtype"] = torch.float32
    return operator(**named_args)


def _with_dtype(operator: Any, args: Any, kwargs: Any) -> Any:
    overload = getattr(torch.ops.aten.norm, _WITH_DTYPE[f"norm.{operator._overloadname}"])
    named_args = {a.name: v for a, v in zip(operator._schema.arguments, args, strict=False)} | kwargs
    defaults = {a.name: a.default_value for a in operator._schema.arguments if a.has_default_value()}
    return overload(**(defaults | named_args), dtype=torch.float32 if _eligible(args[0]) else args[0].dtype)


def _promote(operator: Any, args: Any, kwargs: Any) -> Any:
    """Compute in float32 if one of the tensors is float32, else in the lower precision."""
    low_dtype = torch.get_autocast_dtype("cpu")
    dtypes = {t.dtype for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _eligible(t)}
    if unsupported := dtypes - {low_dtype, torch.float32}:
        raise RuntimeError(
            f"{operator} under autocast {low_dtype}: got {unsupported.pop()}; expected {low_dtype} or torch.float32"
        )
    to = torch.float32 if torch.float32 in dtypes else low_dtype
    return operator(*_cast(args, to), **_cast(kwargs, to))


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise ExportError(
        "binary_cross_entropy under autocast raises on a GPU (its input would be 0 or 1 in half precision): use binary_cross_entropy_with_logits, "
        'or torch.autocast("cuda", enabled=False) around it'
    )


def _cast(value: Any, to: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast(v, to) for v in value)
    if isinstance(value, dict):
        return {k: _cast(v, to) for k, v in value.items()}
    return value.to(to) if _eligible(value) else value


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        and value.device.type == "cpu"
    )


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    operator = torch.ops.aten.scaled_dot_product_attention.default
    if query.dtype is torch.float64:  # a GPU has only the formula for float64
        with sdpa_kernel(SDPBackend.MATH):
            return operator.decompose(query, key, value, *args, **kwargs)
    dropout = args[1] if len(args) > 1 else kwargs.get("dropout_p", 0.0)
    cuda = torch.backends.cuda
    if dropout and (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()):
        raise ExportError(
            f"scaled_dot_product_attention with dropout {dropout}: eager's attention kernel on a GPU draws the mask, and a package captured without "
            "a GPU would draw a different one. Export on a GPU (target='cuda'), or call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), "
            "both here and in training"
        )
    return operator.decompose(query, key, value, *args, **kwargs)


@contextlib.contextmanager
def _autocast_of_both_devices() -> Iterator[None]:
    """Make ``torch.autocast`` for either device apply to both."""
    module, kind = torch.amp.autocast_mode, torch.amp.autocast_mode.autocast
    originals = {name: vars(kind)[name] for name in ("__init__", "__enter__", "__exit__")}
    cast = module._cast
    states = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}

    def agree() -> None:
        torch.set_autocast_enabled("cuda", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_dtype("cuda", torch.get_autocast_dtype("cpu"))

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        originals["__init__"](self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def enter(self: Any) -> Any:
        if self.device == "cuda":
            raise ExportError(
                'torch.autocast("cuda") was created before the export, and torch disabled it because this machine has no GPU. Create it in the '
                'forward (with torch.autocast("cuda", dtype=torch.bfloat16):), not as a decorator'
            )
        result = originals["__enter__"](self)
        agree()
        return result

    def exit(self: Any, *raised: Any) -> Any:
        result = originals["__exit__"](self, *raised)
        agree()
        return result

    def cast_inputs(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    with patched(kind, __init__=init, __enter__=enter, __exit__=exit), patched(module, _cast=cast_inputs):
        try:
            # Use CUDA's state, which was set by hand: torch.autocast("cuda") has no effect without a GPU
            if not states["cpu"][0]:
                torch.set_autocast_enabled("cpu", states["cuda"][0])
                torch.set_autocast_dtype("cpu", states["cuda"][1])
            agree()
            yield
        finally:
            for device, (enabled, dtype) in states.items():
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)

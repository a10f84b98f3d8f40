"""Every private torch name that the runtime uses, and which torch is supported. None of them imports Dynamo or Inductor."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import importlib.abc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import _C, Tensor
from torch._C import _functorch
from torch._C import _get_deterministic_algorithms as deterministic  # the public one is a Python function of five times the cost
from torch._C import _get_float32_matmul_precision as matmul_precision
from torch._C._aoti import AOTIModelContainerRunnerCpu
from torch._C._dynamo import compiled_autograd as _engine
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
    set_eval_frame,
)
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.optim import optimizer as _optimizers

from .errors import GradientError

SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The torch minors ("2.15") that both distributions support, oldest first: CONTRIBUTING.md, "Add a torch version"."""

is_functorch_wrapped = _functorch.is_functorch_wrapped_tensor
is_batched = _functorch.is_legacy_batchedtensor
is_zerotensor = torch._is_zerotensor
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
call_cpp_tensor_pre_hooks = _engine.call_cpp_tensor_pre_hooks
clear_cache = _engine.clear_cache
is_cache_empty = _engine.is_cache_empty
set_autograd_compiler = _engine.set_autograd_compiler
set_verbose_logger = _engine.set_verbose_logger
make_subclass = Tensor._make_subclass
backward_hooks: Any = Tensor._backward_hooks  # the descriptors, whatever a subclass puts in their place
post_accumulate_grad_hooks: Any = Tensor._post_accumulate_grad_hooks  # type: ignore[misc]
requires_grad: Any = Tensor.requires_grad
engine_run_backward = torch.autograd.graph._engine_run_backward
execution_engine = torch.autograd.Variable._execution_engine
keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # of the backward that runs now; True outside of any
saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
in_a_mode = _C._len_torch_dispatch_stack  # how many dispatch modes are at work in this thread
push_dispatch_mode = _C._push_on_torch_dispatch_stack
pop_dispatch_mode = _C._pop_torch_dispatch_stack

__all__ = [
    "CONSTANT_LAYOUTS",
    "SUPPORTED",
    "AOTIModelContainerRunnerCpu",
    "InterceptZeros",
    "Runner",
    "Stated",
    "TensorGuards",
    "adopt_functional",
    "backward_hooks",
    "call_cpp_tensor_pre_hooks",
    "call_hooks",
    "clear_cache",
    "deterministic",
    "dtype_of_number",
    "end_allocating_to_pool",
    "engine_run_backward",
    "execution_engine",
    "fires_reducer",
    "foreach_add_",
    "foreach_copy_",
    "has_loading_hooks",
    "has_memory",
    "has_step_hooks",
    "in_backward",
    "in_forward_mode",
    "in_functorch",
    "is_batched",
    "is_cache_empty",
    "is_functorch_wrapped",
    "is_profiled",
    "is_registered",
    "is_traced",
    "is_watched",
    "is_wrapper",
    "is_zerotensor",
    "keeps_graph",
    "make_subclass",
    "matmul_precision",
    "opaque_to_dynamo",
    "post_accumulate_grad_hooks",
    "refuse_duals",
    "requires_grad",
    "saved_tensors_hooks",
    "set_autograd_compiler",
    "set_execution_engine",
    "set_verbose_logger",
    "share_functional",
    "stated",
    "takes_boxed_gradients",
    "wrapped_cell",
]


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor of at least one element has an address that can be read: a ZeroTensor has none, nor has what stands for another tensor within
    ``functionalize``."""
    return not is_zerotensor(tensor) and not torch._is_functional_tensor(tensor) and tensor.data_ptr() != 0


def set_execution_engine(engine: Any) -> None:
    """What scripts that queue callbacks take for the engine."""
    torch.autograd.Variable._execution_engine = engine


def in_functorch() -> bool:
    """Whether a ``vmap`` or another transform of functorch is at work in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is at work: ``torch.autograd.forward_ad.dual_level``, ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def takes_boxed_gradients(function: Any) -> bool:
    """Whether an ``autograd.Function``'s backward takes its incoming gradients as one list, which it may empty: that of ``torch.compile`` does,
    since torch 2.13."""
    return getattr(function, "boxed_grads_call", False)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for others (DTensor, fake tensors, those inside ``vmap``) and holds no values that C++ could copy."""
    return is_functorch_wrapped(tensor) or _C._dispatch_keys(tensor).has(_C.DispatchKey.Python)


def has_loading_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks may give the tensors of a state other names before it is loaded."""
    return any(m._load_state_dict_pre_hooks for m in module.modules())


_CALL_HOOKS = {
    "_compiled_call_impl": "been compiled by torch.compile",
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_GLOBAL_HOOKS = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre")
]  # dicts that stay the same objects (seen in torch 2.13)


def call_hooks(module: torch.nn.Module) -> str:
    """What a call of ``module`` runs beside its forward, in words, or ""."""
    if any(_GLOBAL_HOOKS):
        return "a hook of all modules"
    for name, words in _CALL_HOOKS.items():
        if getattr(module, name):
            return words
    return ""


def keeping_versions(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Autograd does not see what is written into ``tensors`` inside."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def in_backward() -> bool:
    """Whether a backward pass calls this code."""
    return _C._current_graph_task_id() != -1


def is_watched() -> bool:
    """Whether forward-mode differentiation or a dispatch mode is at work, which a native call passes by."""
    return forward_ad._current_level >= 0 or in_a_mode() > 0


def is_profiled() -> bool:
    """Whether a profiler runs, in any thread."""
    return torch.autograd.profiler._is_profiler_enabled


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are to be called around the optimizer's ``step()``, its own or those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)


def wrapped_cell(function: Any) -> Any:
    """Where a function of ``torch.nn.utils`` that turns gradient mode off around another one keeps that other one, or None where it does not (2.11 to
    2.15 do)."""
    cells = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents is getattr(function, "__wrapped__", None)), None)


def is_traced() -> bool:
    """Whether ``make_fx`` or ``torch.export`` records what operators are called."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


def is_registered(operator: str) -> bool:
    """Whether the dispatcher has the operator ("aten::add.Tensor"), whoever registered it. Nothing is looked up in modules."""
    name, _, overload = operator.partition(".")
    try:
        _C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def refuse_duals(tensors: Iterable[Any]) -> None:
    """:class:`GradientError` where a tensor carries a tangent, which native code would drop."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise GradientError(
                "a tensor carries a tangent (forward-mode differentiation), and a package has backward gradients alone: use eager there"
            )


class InterceptZeros:
    """While open, every ``zeros`` that C++ makes in this thread is made by ``zeros(size, dtype, device)``.

    A dispatch mode, without the base class: that one imports Dynamo when it is used. Sizes may be symbolic, which no kernel accepts.
    """

    def __init__(self, zeros: Callable[[Sequence[Any], torch.dtype, torch.device], Tensor]):
        self._zeros, self._open = zeros, False

    def open(self) -> None:
        push_dispatch_mode(self)  # type: ignore[arg-type]
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            pop_dispatch_mode(None)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.zeros.default:
            return self._zeros(args[0], kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device") or torch.device("cpu"))
        return function(*args, **kwargs)


def fires_reducer(hook: Any) -> bool:
    """Whether a hook is one by which ``DistributedDataParallel(…, mixed_precision=…)`` calls its reducer: the engine knows nothing of those."""
    called = getattr(getattr(hook, "func", None), "__func__", None)  # functools.partial of a method
    return called is not None and called is torch.nn.parallel.DistributedDataParallel._fire_reducer_autograd_hook


Function = TypeVar("Function", bound=Callable[..., Any])


def opaque_to_dynamo(function: Function) -> Function:
    """Like ``torch.compiler.disable``, which would import Dynamo: inside a compiled caller the call is a graph break, and runs as it is."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if get_eval_frame_callback() is None:  # no Dynamo in this thread
            return function(*args, **kwargs)
        callback = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(callback)

    set_code_exec_strategy(outside.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))  # type: ignore[attr-defined]
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]


class Runner:
    """A compiled library that is open on ``device``, one instance of the model, and the tensors that its constants point at.

    What AOTInductor calls a user-managed constant (``update_constant_buffer(…, user_managed=True)``) leaks: up to torch 2.14 each such call makes
    handles that nothing frees, and each handle keeps the memory of its tensor (pytorch#194480; the code is part of every compiled library, so that
    a newer torch does not mend an older package). So each constant gets one handle, once, and from then on its tensor is given other memory.

    On a GPU it is opened in its single-threaded form: the other one waits in each call until the one before it has come to its end on the GPU, and
    records events, which a stream that is being captured does not allow. One caller at a time is ours to see to."""

    def __init__(self, library: str, device: torch.device, owning: bool | None = None):
        """``owning``: whether the container owns the handles; by default on a CPU."""
        if device.type == "cpu":
            self._container: Any = AOTIModelContainerRunnerCpu(library, 1)
        else:
            from torch._C._aoti import AOTIModelContainerRunnerCuda  # only CUDA builds of torch have it

            self._container = AOTIModelContainerRunnerCuda(library, 1, str(device), "", True)  # type: ignore[call-overload]
        self._original = self._container.get_constant_names_to_original_fqns()
        self._owning = device.type == "cpu" if owning is None else owning
        self._places: dict[str, Tensor] = {}
        self.constants = frozenset(self._original)
        self.run: Callable[[list[Tensor]], list[Tensor]] = self._container.run

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Points each constant at the memory of a tensor, which the library keeps from then on. ``tensors``: one for each of :attr:`constants`.

        :class:`ValueError` where a tensor is not what a constant was compiled for. Until this has returned, the library reads the memory from before,
        which the caller must keep; what is broken off half-way must be done again before the next run."""
        if not self._places:
            self._places = self._handles_owned_by_container(tensors) if self._owning else self._handles_never_freed(tensors)
        for name, tensor in tensors.items():
            self._places[name].data = tensor
        self._container.update_constant_buffer({}, False, False, True)  # no new handles: it reads the addresses of those that it has

    def _handles_owned_by_container(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors behind handles that the container owns, and frees with itself.

        It makes such where it is to copy constants into memory of its own. What it is given has no bytes, so that none of that memory is touched, and
        more dimensions than any constant, since it reads a stride for each of the constant's. The memory is given back: that of the set of constants
        which is not in use can be."""
        container = self._container
        with torch.inference_mode(False):  # what an inference makes could not be given other memory outside of one
            nothing = torch.empty((0,) * 64, device="cpu")
            container.update_constant_buffer(dict.fromkeys(tensors, nothing), False, True, False)
            found = container.extract_constants_map(False)
        for what in (container.swap_constant_buffer, container.free_inactive_constant_buffer, container.swap_constant_buffer):
            what()
        places = {name: found[self._original[name]] for name in tensors}
        for name, tensor in tensors.items():
            if (places[name].dtype, places[name].shape) != (tensor.dtype, tensor.shape):
                raise ValueError(
                    f"the constant {name} is {places[name].dtype} of shape {list(places[name].shape)} in the compiled code; "
                    f"it was to be bound to {tensor.dtype} of shape {list(tensor.shape)}"
                )
        return places

    def _handles_never_freed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors behind handles that nothing frees, for a GPU, where memory for a copy of all constants may not be left. When the container goes,
        what stays is an empty tensor for each constant (0.6 kB of the host's memory)."""
        with torch.inference_mode(False):
            places = {name: tensor.detach() for name, tensor in tensors.items()}
        self._container.update_constant_buffer(places, False, True, True)
        weakref.finalize(self._container, _emptied, list(places.values())).atexit = False
        return places


def _emptied(places: Iterable[Tensor]) -> None:
    for place in places:
        place.data = place.new_empty(0)


@dataclass(frozen=True)
class Stated:
    """What a compiled library says of itself: how many tensors it takes and gives, and the bytes that the memory of each constant had at the export,
    a multiple of 64. ``layouts``: dtype, shape and strides of each, as :data:`CONSTANT_LAYOUTS` has them; empty in libraries of 0.1.0."""

    inputs: int
    outputs: int
    constants: dict[str, int]
    layouts: dict[str, str]


CONSTANT_LAYOUTS = "AOTInductorConstantLooks"
"""A symbol that the exporter puts into each library for a CPU: a line of text for each constant, ``NAME float32 [2,3] [3,1]``."""


def stated(library: str) -> Stated:
    """Asks a library that is open in this process, by AOTInductor's C interface: the runner knows this, and does not tell."""
    opened = ctypes.CDLL(library)
    container, number, text = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_char_p()

    def ask(what: str, *arguments: Any) -> None:
        if opened[f"AOTInductorModelContainer{what}"](*arguments):
            raise RuntimeError(f"AOTInductorModelContainer{what} failed")

    try:
        ask("CreateWithDevice", ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None)
        try:
            counts = []
            for what in ("GetNumInputs", "GetNumOutputs", "GetNumConstants"):
                ask(what, container, ctypes.byref(number))
                counts.append(number.value)
            constants = {}
            for i in map(ctypes.c_size_t, range(counts[2])):
                ask("GetConstantName", container, i, ctypes.byref(text))
                ask("GetConstantDataSize", container, i, ctypes.byref(number))
                constants[(text.value or b"").decode(errors="replace")] = number.value
            return Stated(counts[0], counts[1], constants, _layouts_in(opened))
        finally:
            ask("Delete", container)
    finally:
        _ctypes.dlclose(opened._handle)


def _layouts_in(opened: ctypes.CDLL) -> dict[str, str]:
    try:
        text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(opened, CONSTANT_LAYOUTS)))
    except ValueError:  # it has no such symbol
        return {}
    return dict(line.partition(" ")[::2] for line in text.decode().splitlines())


def end_allocating_to_pool(device: torch.device, pool: Any) -> None:
    """What a CUDA graph does when its capture ends, where a capture that failed did not."""
    with contextlib.suppress(RuntimeError):  # it did
        _C._cuda_endAllocateToPool(device.index, pool)


_NUMBERED = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64", "complex128", "bool",
    None, None, None, "bfloat16",
)  # fmt: skip
"""The dtypes by the numbers of ``c10::ScalarType``, which the engine writes where a tape says what a gradient must look like."""


def dtype_of_number(number: int) -> torch.dtype:
    name = _NUMBERED[number] if 0 <= number < len(_NUMBERED) else None
    if name is None:
        raise ValueError(f"dtype number {number} is not known")
    return getattr(torch, name)


_DYNAMO = "torch._dynamo"
_DYNAMO_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_shared: dict[str, tuple[Callable[..., Any], bool]] = {}
"""Functional backwards that were bound to us. The engine hands each out once per process, so PyTorch's own compiled autograd, which looks
for them in its table, would miss those; it gets them from us, also where it is imported later."""


def share_functional(name: str, function: Callable[..., Any], is_traceable: bool) -> None:
    if not _shared and _DYNAMO not in sys.modules:
        sys.meta_path.insert(0, _DynamoImportHook())
    _shared[name] = (function, is_traceable)
    if _DYNAMO in sys.modules and not any(isinstance(f, _DynamoImportHook) for f in sys.meta_path):
        _register_with_dynamo(sys.modules[_DYNAMO_COMPILED_AUTOGRAD], name)


def adopt_functional(name: str, into: dict[str, Callable[..., Any]]) -> bool:
    """Takes a functional backward that was bound to PyTorch's compiled autograd before us. Whether it is there now."""
    theirs = sys.modules.get(_DYNAMO_COMPILED_AUTOGRAD)
    found = getattr(getattr(theirs, "ops", None), name, None)
    if found is not None:
        into[name] = found
    return found is not None


def _register_with_dynamo(theirs: ModuleType, name: str) -> None:
    function, is_traceable = _shared[name]
    if not hasattr(theirs.ops, name):
        theirs.ops.add(name, function, False, is_traceable)


class _DynamoImportHook(importlib.abc.MetaPathFinder):
    """Lets the import of Dynamo go its way, and fills the table of compiled autograd afterwards."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if name != _DYNAMO:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                for known in list(_shared):
                    _register_with_dynamo(sys.modules[_DYNAMO_COMPILED_AUTOGRAD], known)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

"""All private torch names that the runtime uses, and the supported torch versions. None of these names imports Dynamo
or Inductor."""

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

# The public counterpart of the first is a Python function and takes five times as long
from torch._C import _get_deterministic_algorithms as deterministic
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
backward_hooks: Any = Tensor._backward_hooks  # the descriptors, even if a subclass overrides them
post_accumulate_grad_hooks: Any = Tensor._post_accumulate_grad_hooks  # type: ignore[misc]
requires_grad: Any = Tensor.requires_grad
engine_run_backward = torch.autograd.graph._engine_run_backward
execution_engine = torch.autograd.Variable._execution_engine
keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # of the current backward; True outside of any
saved_tensors_hooks = _C._autograd._top_saved_tensors_default_hooks
in_a_mode = _C._len_torch_dispatch_stack  # number of active dispatch modes in this thread
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
    "is_mapped",
    "is_profiled",
    "is_registered",
    "is_traced",
    "is_watched",
    "is_wrapper",
    "is_zerotensor",
    "keeps_graph",
    "make_subclass",
    "mapped",
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
    "unmapped",
    "wrapped_cell",
]


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor of at least one element has a readable address. A ZeroTensor has none, nor has a
    functional tensor inside ``functionalize``."""
    return not is_zerotensor(tensor) and not torch._is_functional_tensor(tensor) and tensor.data_ptr() != 0


def set_execution_engine(engine: Any) -> None:
    """Replace the engine on which scripts queue callbacks."""
    torch.autograd.Variable._execution_engine = engine


def in_functorch() -> bool:
    """Return whether a ``vmap`` or another functorch transform is active in this thread."""
    return _functorch.peek_interpreter_stack() is not None


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the innermost ``vmap`` maps ``tensor``, or it is a batch of gradients
    (``is_grads_batched=True``)."""
    return is_batched(tensor) or (
        _functorch.is_batchedtensor(tensor) and _functorch.maybe_get_level(tensor) == _functorch.current_level()
    )


def unmapped(tensor: Tensor) -> Tensor:
    """Return the values of a mapped tensor, with the mapped dimension first."""
    if is_batched(tensor):
        return torch._remove_batch_dim(tensor, _batch_level(), 1, 0)
    values, dim = _functorch._unwrap_batched(tensor, _functorch.current_level())
    return values.movedim(dim or 0, 0)


def mapped(values: Tensor, like: Tensor) -> Tensor:
    """Return ``values`` as a tensor that is mapped like another one, by the first dimension."""
    if is_batched(like):
        return torch._add_batch_dim(values, 0, _batch_level())
    return _functorch._add_batch_dim(values, 0, _functorch.current_level())


def _batch_level() -> int:
    """Return the level of the innermost ``vmap`` of ``is_grads_batched=True``, which can only be read by entering
    another one."""
    level: int = _C._vmapmode_increment_nesting() - 1
    _C._vmapmode_decrement_nesting()
    return level


def in_forward_mode() -> bool:
    """Return whether forward-mode differentiation is active: ``torch.autograd.forward_ad.dual_level``,
    ``torch.func.jvp``."""
    return forward_ad._current_level >= 0


def takes_boxed_gradients(function: Any) -> bool:
    """Return whether an ``autograd.Function``'s backward takes its incoming gradients as one list, which it may empty.
    ``torch.compile`` generates such a backward since torch 2.13."""
    return getattr(function, "boxed_grads_call", False)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether ``tensor`` wraps others (DTensor, fake tensors, tensors inside ``vmap``) and holds no values that
    C++ could copy."""
    return is_functorch_wrapped(tensor) or _C._dispatch_keys(tensor).has(_C.DispatchKey.Python)


def has_loading_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks may rename the tensors of a state before it is loaded."""
    return any(m._load_state_dict_pre_hooks for m in module.modules())


_CALL_HOOKS = {
    "_compiled_call_impl": "been compiled by torch.compile",
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
_GLOBAL_HOOKS = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("forward", "forward_pre", "backward", "backward_pre")
]  # these dicts stay the same objects (seen in torch 2.13)


def call_hooks(module: torch.nn.Module) -> str:
    """Return a description of the code that a call of ``module`` runs in addition to its forward, or ""."""
    if any(_GLOBAL_HOOKS):
        return "a hook of all modules"
    for name, words in _CALL_HOOKS.items():
        if getattr(module, name):
            return words
    return ""


def keeping_versions(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a context in which writes to ``tensors`` do not change their version counters."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def in_backward() -> bool:
    """Return whether a backward pass calls this code."""
    return _C._current_graph_task_id() != -1


def is_watched() -> bool:
    """Return whether forward-mode differentiation or a dispatch mode is active, which a native call would bypass."""
    return forward_ad._current_level >= 0 or in_a_mode() > 0


def is_profiled() -> bool:
    """Return whether a profiler is active in any thread."""
    return torch.autograd.profiler._is_profiler_enabled


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's ``step()`` runs hooks, its own or those of all optimizers."""
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)


def wrapped_cell(function: Any) -> Any:
    """Return the closure cell in which a function of ``torch.nn.utils`` keeps the function that it runs without
    gradient mode, or None (torch 2.11 to 2.15 have one)."""
    cells = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents is getattr(function, "__wrapped__", None)), None)


def is_traced() -> bool:
    """Return whether ``make_fx`` or ``torch.export`` records operator calls."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


def is_registered(operator: str) -> bool:
    """Return whether the dispatcher has the operator ("aten::add.Tensor"), whoever registered it. Modules are not
    searched."""
    name, _, overload = operator.partition(".")
    try:
        _C._dispatch_find_schema_or_throw(name, overload)
    except RuntimeError:
        return False
    return True


def refuse_duals(tensors: Iterable[Any]) -> None:
    """Raise :class:`GradientError` if a tensor carries a tangent, which native code would drop."""
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise GradientError(
                "a tensor has a tangent (forward-mode differentiation), and a package has only backward gradients: use eager there"
            )


class InterceptZeros:
    """A dispatch mode: while open, ``zeros(size, dtype, device)`` makes every tensor that C++ requests in this thread
    with ``zeros``.

    It does not derive from torch's base class, which imports Dynamo when it is used. Sizes may be symbolic, which no
    kernel accepts.
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

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.zeros.default:
            return self._zeros(
                args[0], kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device") or torch.device("cpu")
            )
        return function(*args, **kwargs)


def fires_reducer(hook: Any) -> bool:
    """Return whether ``DistributedDataParallel(…, mixed_precision=…)`` calls its reducer in this hook. The engine does
    not know these hooks."""
    called = getattr(getattr(hook, "func", None), "__func__", None)  # functools.partial of a method
    return called is not None and called is torch.nn.parallel.DistributedDataParallel._fire_reducer_autograd_hook


Function = TypeVar("Function", bound=Callable[..., Any])


def opaque_to_dynamo(function: Function) -> Function:
    """Decorate like ``torch.compiler.disable``, which would import Dynamo: in a compiled caller the call is a graph
    break and runs in eager."""

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
    """A compiled library that is open on ``device``: one instance of the model, and the tensors that its constants
    point at.

    AOTInductor's user-managed constants (``update_constant_buffer(…, user_managed=True)``) leak: up to torch 2.14 each
    such call makes handles that nothing frees, and each handle keeps the memory of its tensor (pytorch#194480; the code
    is part of every compiled library, so a newer torch does not mend an older package). So each constant gets one
    handle, once. Later its tensor is given other memory.

    On a GPU the library is opened in its single-threaded form. The other form waits in each call until the previous one
    has finished on the GPU, and records events, which stream capture does not allow. The caller must ensure that only
    one call runs at a time."""

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
        """Point each constant at the memory of a tensor, which the library keeps from then on. ``tensors``: one for
        each of :attr:`constants`.

        Raise :class:`ValueError` if a tensor does not fit its compiled constant. Until this returns, the library reads
        the previous memory, which the caller must keep. Repeat an interrupted call before the next run."""
        if not self._places:
            self._places = (
                self._handles_owned_by_container(tensors) if self._owning else self._handles_never_freed(tensors)
            )
        for name, tensor in tensors.items():
            self._places[name].data = tensor
        # No new handles: it reads the addresses of the existing ones
        self._container.update_constant_buffer({}, False, False, True)

    def _handles_owned_by_container(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors behind handles that the container owns and frees.

        It makes such handles when it copies constants. It is given a tensor without bytes, so that no memory is
        touched, and with more dimensions than any constant, because it reads a stride for each of the constant's
        dimensions. Then the copies' memory is freed: only the inactive set of constants can be."""
        container = self._container
        with torch.inference_mode(False):  # memory of an inference tensor cannot be replaced outside inference mode
            nothing = torch.empty((0,) * 64, device="cpu")
            container.update_constant_buffer(dict.fromkeys(tensors, nothing), False, True, False)
            found = container.extract_constants_map(False)
        for what in (
            container.swap_constant_buffer,
            container.free_inactive_constant_buffer,
            container.swap_constant_buffer,
        ):
            what()
        places = {name: found[self._original[name]] for name in tensors}
        for name, tensor in tensors.items():
            if (places[name].dtype, places[name].shape) != (tensor.dtype, tensor.shape):
                raise ValueError(
                    f"the constant {name} is {places[name].dtype} of shape {list(places[name].shape)} in the compiled code; "
                    f"it cannot be bound to {tensor.dtype} of shape {list(tensor.shape)}"
                )
        return places

    def _handles_never_freed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors behind handles that nothing frees, for a GPU, which may lack memory for a copy of all
        constants. After the container is freed, an empty tensor for each constant remains (0.6 kB of the host's
        memory)."""
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
    """The metadata in a compiled library: how many tensors it takes and returns, and the bytes of each constant's
    memory at export, a multiple of 64. ``layouts``: dtype, shape and strides of each constant, as in
    :data:`CONSTANT_LAYOUTS`; empty in libraries of 0.1.0."""

    inputs: int
    outputs: int
    constants: dict[str, int]
    layouts: dict[str, str]


CONSTANT_LAYOUTS = "AOTInductorConstantLooks"
"""A symbol that the exporter puts into each library for a CPU: a line of text for each constant,
``NAME float32 [2,3] [3,1]``."""


def stated(library: str) -> Stated:
    """Query an open library through AOTInductor's C interface, because the runner does not expose this metadata."""
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
    except ValueError:  # the symbol is missing
        return {}
    return dict(line.partition(" ")[::2] for line in text.decode().splitlines())


def end_allocating_to_pool(device: torch.device, pool: Any) -> None:
    """End allocation to a CUDA graph's pool after a capture that failed before it did so."""
    with contextlib.suppress(RuntimeError):  # it already ended
        _C._cuda_endAllocateToPool(device.index, pool)


_NUMBERED = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64", "complex128", "bool",
    None, None, None, "bfloat16",
)  # fmt: skip
"""The dtypes by the numbers of ``c10::ScalarType``. The engine writes these numbers in a tape's gradient metadata."""


def dtype_of_number(number: int) -> torch.dtype:
    name = _NUMBERED[number] if 0 <= number < len(_NUMBERED) else None
    if name is None:
        raise ValueError(f"dtype number {number} is not known")
    return getattr(torch, name)


_DYNAMO = "torch._dynamo"
_DYNAMO_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
_shared: dict[str, tuple[Callable[..., Any], bool]] = {}
"""Functional backwards that were bound to us. The engine hands each out once per process, so PyTorch's own compiled
autograd would not find them in its table. We register them there, even if it is imported later."""


def share_functional(name: str, function: Callable[..., Any], is_traceable: bool) -> None:
    if not _shared and _DYNAMO not in sys.modules:
        sys.meta_path.insert(0, _DynamoImportHook())
    _shared[name] = (function, is_traceable)
    if _DYNAMO in sys.modules and not any(isinstance(f, _DynamoImportHook) for f in sys.meta_path):
        _register_with_dynamo(sys.modules[_DYNAMO_COMPILED_AUTOGRAD], name)


def adopt_functional(name: str, into: dict[str, Callable[..., Any]]) -> bool:
    """Take a functional backward that was bound to PyTorch's compiled autograd before us. Return whether it was
    found."""
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
    """An import hook that lets Dynamo load, and then fills the table of compiled autograd."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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

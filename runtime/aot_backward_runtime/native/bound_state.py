"""The parameters and buffers that an entry's libraries are bound to: check that they fit, and notice changes between
calls."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from .. import torch_api
from ..errors import WeightsError
from ..format.manifest import EntrySpec, WeightSpec
from . import tensor_values
from .guards import Fast, dtype_of
from .library import Binding
from .memory import HeldStorages


class BoundState:
    """The parameters and buffers that an entry's libraries are bound to, one per distinct weight."""

    def __init__(
        self,
        entry: EntrySpec,
        weights: Mapping[str, WeightSpec],
        fixed: Mapping[str, torch.Tensor],
        device: torch.device,
    ):
        """``fixed``: tensors by weight key that are constants of the program, not state of the entry. ``device``: where
        the code runs."""
        self._device = device
        self.names = tuple(s.name for s in entry.state)
        self._weights = [(s.name, s.weight, weights[s.weight]) for s in entry.state]
        keys = [s.weight for s in entry.state]
        self.owned = [key not in keys[:i] for i, key in enumerate(keys)]  # False for the later names of a tie
        self.targets = [f"parameter:{name}" for name in self.names]
        """The names of the tensors as gradient targets."""
        self.wrt = [(i, self.targets[i]) for i, owned in enumerate(self.owned) if owned]
        """The index and the target name of each distinct tensor."""
        self._ties = [(i, keys.index(key)) for i, key in enumerate(keys) if not self.owned[i]]
        self._fixed = dict(fixed)
        # All guards are of the same addresses, the latest first. The list is replaced as a whole, because threads may
        # call concurrently.
        self._guards: list[_StateGuard] = []

    def copy(self) -> BoundState:
        """Return an unbound copy of the contract."""
        out = copy.copy(self)
        out._guards = []
        return out

    def refresh(self, current: Sequence[torch.Tensor]) -> Binding:
        """Return the binding of ``current``, the present tensors of :attr:`names`. Check new ones first; if they fail,
        keep the old binding."""
        try:
            addresses = tuple(map(torch.Tensor.data_ptr, current))
        except (RuntimeError, TypeError, ValueError):  # a tensor without memory, None, or an UninitializedParameter
            for tensor, (name, _, spec) in zip(current, self._weights, strict=True):
                check_weight(name, tensor, spec, self._device)
            raise
        guards = self._guards
        same_memory = bool(guards) and addresses == guards[0].binding[1] and not guards[0].storages.resized()
        if same_memory:
            for guard in guards:
                if self._matches(current, guard):
                    if guard is not guards[0]:
                        self._guards = [guard, *(other for other in guards if other is not guard)]
                    return guard.binding
        tensors = self.check(current)
        own = [t for t, owned in zip(current, self.owned, strict=True) if owned]
        requires_grad = self._requiring(current)
        # New memory may lie at the address of resized memory, which the libraries still hold: bind them to the new
        # tensors.
        guard = _StateGuard(Fast(own), (tensors, guards[0].binding[1] if same_memory else addresses), HeldStorages(own))
        # Another thread may set requires_grad meanwhile
        guard.asked = requires_grad if requires_grad == self._requiring(current) else None
        self._guards = [guard, *guards[: _MAX_LOOKS - 1]] if same_memory else [guard]
        return guard.binding

    def asked(self, binding: Binding) -> list[int] | None:
        """Return the indices of the distinct tensors that require grad under that binding of :meth:`refresh`, or None
        if unknown."""
        return next((guard.asked for guard in self._guards if guard.binding is binding), None)

    def check(self, current: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return ``current`` and the constants by weight key. Raise :class:`WeightsError` if libraries cannot be bound
        to them."""
        tensors, first = dict(self._fixed), dict[str, torch.Tensor]()
        for tensor, (name, key, spec) in zip(current, self._weights, strict=True):
            check_weight(name, tensor, spec, self._device)
            if key not in tensors:
                tensors[key] = tensor.detach()  # keeps this memory even if the parameter's .data is replaced later
                first[key] = tensor
            elif tensors[key].data_ptr() != tensor.data_ptr() or (
                # Each gets its own gradient
                tensor is not first.get(key, tensor) and (tensor.requires_grad or first[key].requires_grad)
            ):
                tied = next(n for n, k, _ in self._weights if k == key)
                raise WeightsError(
                    f"{name} and {tied} were one tensor when the package was exported; assign the same tensor to both, or export it untied"
                )
        return tensors

    def _requiring(self, current: Sequence[torch.Tensor]) -> list[int]:
        return [i for i, _ in self.wrt if current[i].requires_grad]

    def _matches(self, current: Sequence[torch.Tensor], guard: _StateGuard) -> bool:
        """Return whether ``current`` matches ``guard``. The check is in C, except for ties: later names must hold the
        same object as the first (the C check takes no tensor twice). ``current`` has the bound addresses, so objects
        that passed last are not nested tensors."""
        ids = list(map(id, current))
        if self._ties:
            if not all(current[i] is current[first] for i, first in self._ties):
                return False
            current = [t for t, owned in zip(current, self.owned, strict=True) if owned]
        if ids == guard.ids:
            return not current or guard.fast.check(*current)
        if current and not guard.fast.looks_alike(current):
            return False
        guard.ids = ids
        return True


_MAX_LOOKS = 4
"""Guards kept per set of addresses, for example for parameters that a script freezes and thaws in each step: full
checks cost 0.2 to 0.3 ms a call. The number is a guess."""


class _StateGuard:
    """The metadata of a binding's tensors. ``ids``: ids of the objects that last passed as plain tensors. Each has its
    own binding, with the same addresses, so that data that depends on the metadata can be kept by binding."""

    __slots__ = ("asked", "binding", "fast", "ids", "storages")

    def __init__(self, fast: Fast, binding: Binding, storages: HeldStorages):
        self.fast, self.binding, self.storages = fast, binding, storages
        self.ids: list[int] = []
        self.asked: list[int] | None = None


def check_weight(name: str, tensor: torch.Tensor | None, spec: WeightSpec, device: torch.device | None = None) -> None:
    """Raise :class:`WeightsError` if native code compiled for ``spec`` and running on ``device`` cannot read
    ``tensor``."""
    if tensor is None:
        raise WeightsError(
            f"{name} is None, and compiled code reads it: give it a tensor of shape {spec.shape}, or load the package again"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch_api.is_functorch_wrapped(tensor):
        raise WeightsError(
            f"{name} is a {type(tensor).__qualname__} that native code cannot read; expected a plain tensor or Parameter"
        )
    if device is not None and tensor.device != device:
        raise WeightsError(
            f"{name} is on {tensor.device}; the loaded code runs on {device}: move it back, or load(path, device={str(tensor.device)!r})"
        )
    if problem := tensor_values.unplain(tensor):
        raise WeightsError(f"{name} {problem}")
    if tensor.dtype is not dtype_of(spec.dtype):
        raise WeightsError(
            f"{name} has dtype {tensor.dtype}; the package was compiled for torch.{spec.dtype}: export it with that dtype"
        )
    if tuple(tensor.shape) != spec.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}; the package was compiled for {spec.shape}")
    if problem := tensor_values.unbacked(tensor):
        raise WeightsError(f"{name} {problem}")
    if any(n > 1 and s != w for n, s, w in zip(tensor.shape, tensor.stride(), spec.stride, strict=True)):
        raise WeightsError(
            f"{name} has strides {tensor.stride()}; the package was compiled for {spec.stride}: copy it into the old tensor instead"
        )
    if tensor.is_cuda and tensor.numel() and tensor.data_ptr() % 16:
        raise WeightsError(
            f"{name} is at an address that is not a multiple of 16 bytes, and GPU kernels need this alignment: copy it (.clone())"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise WeightsError(
            f"{name} is a lazily conjugated or negated view; resolve it first (tensor.resolve_conj().resolve_neg())"
        )

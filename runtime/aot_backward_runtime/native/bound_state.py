"""The parameters and buffers that an entry's libraries are bound to: what fits, and whether anything has changed since the last call."""

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

    def __init__(self, entry: EntrySpec, weights: Mapping[str, WeightSpec], fixed: Mapping[str, torch.Tensor], device: torch.device):
        """``fixed``: tensors by weight key that are constants of the program, not state of the entry. ``device``: where the code runs."""
        self._device = device
        self.names = tuple(s.name for s in entry.state)
        self._weights = [(s.name, s.weight, weights[s.weight]) for s in entry.state]
        keys = [s.weight for s in entry.state]
        self.owned = [key not in keys[:i] for i, key in enumerate(keys)]  # False for the later names of a tie
        self.targets = [f"parameter:{name}" for name in self.names]
        """The names of tensors as what a gradient is asked of."""
        self.wrt = [(i, self.targets[i]) for i, owned in enumerate(self.owned) if owned]
        """Each distinct tensor's place, and such a name."""
        self._ties = [(i, keys.index(key)) for i, key in enumerate(keys) if not self.owned[i]]
        self._fixed = dict(fixed)
        self._looks: list[_Look] = []  # of the same addresses, the last first; replaced as a whole: threads may call side by side

    def copy(self) -> BoundState:
        """The same contract, bound to nothing yet."""
        out = copy.copy(self)
        out._looks = []
        return out

    def refresh(self, current: Sequence[torch.Tensor]) -> Binding:
        """``current``: the tensors of :attr:`names` now. New ones are checked first; where they do not fit, the old binding stays."""
        try:
            addresses = tuple(map(torch.Tensor.data_ptr, current))
        except (RuntimeError, TypeError, ValueError):  # one without memory, None, or an UninitializedParameter
            for tensor, (name, _, spec) in zip(current, self._weights, strict=True):
                check_weight(name, tensor, spec, self._device)
            raise
        looks = self._looks
        stayed = bool(looks) and addresses == looks[0].binding[1] and not looks[0].storages.resized()
        if stayed:
            for look in looks:
                if self._look_the_same(current, look):
                    if look is not looks[0]:
                        self._looks = [look, *(other for other in looks if other is not look)]
                    return look.binding
        tensors = self.check(current)
        own = [t for t, owned in zip(current, self.owned, strict=True) if owned]
        before = self._requiring(current)
        # new memory may lie where memory that was resized lay, and tensors of the old are what libraries have: they are bound to the new ones
        look = _Look(Fast(own), (tensors, looks[0].binding[1] if stayed else addresses), HeldStorages(own))
        look.asked = before if before == self._requiring(current) else None  # another thread sets it meanwhile
        self._looks = [look, *looks[: _MAX_LOOKS - 1]] if stayed else [look]
        return look.binding

    def asked(self, binding: Binding) -> list[int] | None:
        """The places of the distinct tensors that require gradients where :meth:`refresh` gave that binding; None where that is not sure."""
        return next((look.asked for look in self._looks if look.binding is binding), None)

    def check(self, current: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """``current``, and what is fixed, by weight key; :class:`WeightsError` where libraries could not be bound to it."""
        tensors, first = dict(self._fixed), dict[str, torch.Tensor]()
        for tensor, (name, key, spec) in zip(current, self._weights, strict=True):
            check_weight(name, tensor, spec, self._device)
            if key not in tensors:
                tensors[key] = tensor.detach()  # this memory, also if the parameter is given other memory (.data = …) later
                first[key] = tensor
            elif tensors[key].data_ptr() != tensor.data_ptr() or (
                tensor is not first.get(key, tensor) and (tensor.requires_grad or first[key].requires_grad)  # each gets a gradient of its own
            ):
                tied = next(n for n, k, _ in self._weights if k == key)
                raise WeightsError(f"{name} and {tied} were one tensor when the package was exported; give both the same, or export it untied")
        return tensors

    def _requiring(self, current: Sequence[torch.Tensor]) -> list[int]:
        return [i for i, _ in self.wrt if current[i].requires_grad]

    def _look_the_same(self, current: Sequence[torch.Tensor], look: _Look) -> bool:
        """In C, but for ties, whose later names must hold the very tensor of the first (the check in C takes no tensor twice). ``current`` has the
        addresses that were bound: the objects that passed last are then no nested tensors."""
        ids = list(map(id, current))
        if self._ties:
            if not all(current[i] is current[first] for i, first in self._ties):
                return False
            current = [t for t, owned in zip(current, self.owned, strict=True) if owned]
        if ids == look.ids:
            return not current or look.fast.check(*current)
        if current and not look.fast.looks_alike(current):
            return False
        look.ids = ids
        return True


_MAX_LOOKS = 4
"""Of tensors at the same addresses, such as parameters that a script freezes and thaws in each step."""


class _Look:
    """How the tensors of a binding look. ``ids``: of the objects that were last found to be plain tensors. Each has a binding of its own, of the same
    addresses, so that what depends on the looks can be kept by the binding."""

    __slots__ = ("asked", "binding", "fast", "ids", "storages")

    def __init__(self, fast: Fast, binding: Binding, storages: HeldStorages):
        self.fast, self.binding, self.storages = fast, binding, storages
        self.ids: list[int] = []
        self.asked: list[int] | None = None


def check_weight(name: str, tensor: torch.Tensor | None, spec: WeightSpec, device: torch.device | None = None) -> None:
    """:class:`WeightsError` where native code compiled for ``spec``, which runs on ``device``, could not read ``tensor``."""
    if tensor is None:
        raise WeightsError(f"{name} is None, and compiled code reads it: give it a tensor of shape {spec.shape}, or load the package again")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or torch_api.is_functorch_wrapped(tensor):
        raise WeightsError(f"{name} is a {type(tensor).__qualname__} that native code cannot read; expected a plain tensor or Parameter")
    if device is not None and tensor.device != device:
        raise WeightsError(
            f"{name} is on {tensor.device}; the loaded code runs on {device}: move it back, or load(path, device={str(tensor.device)!r})"
        )
    if problem := tensor_values.unplain(tensor):
        raise WeightsError(f"{name} {problem}")
    if tensor.dtype is not dtype_of(spec.dtype):
        raise WeightsError(f"{name} has dtype {tensor.dtype}; the package was compiled for torch.{spec.dtype}: export it with that dtype")
    if tuple(tensor.shape) != spec.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}; the package was compiled for {spec.shape}")
    if problem := tensor_values.unbacked(tensor):
        raise WeightsError(f"{name} {problem}")
    if any(n > 1 and s != w for n, s, w in zip(tensor.shape, tensor.stride(), spec.stride, strict=True)):
        raise WeightsError(f"{name} has strides {tensor.stride()}; the package was compiled for {spec.stride}: copy it into the old tensor instead")
    if tensor.is_cuda and tensor.numel() and tensor.data_ptr() % 16:
        raise WeightsError(f"{name} lies at an address that is no multiple of 16 bytes, which kernels on a GPU count on: copy it (.clone())")
    if tensor.is_conj() or tensor.is_neg():
        raise WeightsError(f"{name} is a lazily conjugated or negated view; resolve it first (tensor.resolve_conj().resolve_neg())")

"""``load(path).module()``: a package's entry as an ``nn.Module`` with native forward and backward code."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import torch_api
from ..errors import InputError, StateDictError, WeightsError
from ..format.manifest import StateSpec
from ..native import tensor_values
from .attachment import Attachment, Otherwise, detach
from .dispatch import Entry
from .module_call import call_entry
from .named_tensors import slot_of
from .pickling import pickled, refuse_shallow_copy, restore


class LoadedModule(nn.Module):
    """A module that behaves like the exported one: parameters, buffers, ``state_dict``, ``train``/``eval`` and
    autograd.

    Submodules are empty modules that carry the names. The command ``aot-backward inspect`` lists shapes and dtypes of
    inputs and outputs. A pickle holds the tensors and the path of the package, which must still be there when it is
    read.

    Examples:
        >>> model = load("net.pt2").module()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.randn(100, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(self, entry: Entry, tensors: dict[str, torch.Tensor]):
        """``tensors``: the entry's state by weight key."""
        super().__init__()
        for name in entry.spec.modules:
            _submodule(self, name)
        by_weight: dict[str, torch.Tensor] = {}
        for spec in entry.spec.state:
            _place(self, spec, by_weight, tensors)
        self._aot_entry = entry
        self._aot_slots = _Slots([slot_of(self, name) for name in entry.state.names])
        modes = {v.spec.mode: frozenset(v.spec.set_apart) for v in entry.variants}
        self._aot_set_apart = {mode: modes.get(mode, frozenset()) for mode in ("train", "eval")}
        self.train(entry.spec.training)

    @torch_api.opaque_to_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward. Autograd runs the compiled backward; incoming gradients may have any strides.

        Args:
            *args: The exported module's arguments: the dtypes and ranks of the example, and sizes in the exported
                range.
            **kwargs: Its keyword arguments.

        Returns:
            The module's outputs, in the same nesting as in eager.

        Raises:
            InputError: An argument does not fit; nothing was run.
            GradientError: A tensor requires a gradient that was not exported, or a derivative is asked for that the
                package does not have.
            WeightsError: A parameter or buffer was given another shape, dtype or device.
            ExecutionError: Native code failed, for example because of an index out of range.
        """
        return call_entry(self._aot_entry, self._aot_current(), "train" if self.training else "eval", args, kwargs)

    def train(self, mode: bool = True) -> LoadedModule:
        """Set the mode, like ``nn.Module.train``. Submodules that had another mode than the whole at export keep a
        different one.

        Args:
            mode: Whether later calls run the variants of training mode; otherwise they run the variants of evaluation
                mode.

        Returns:
            The module itself.
        """
        set_apart = self._aot_set_apart["train" if mode else "eval"]
        for name, module in self.named_modules(remove_duplicate=False):
            if name == "" or isinstance(module, _Part):
                module.training = mode != (name in set_apart)
            elif type(module) is not _Part:
                module.train(mode)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load like ``nn.Module.load_state_dict``, but all or nothing.

        Args:
            state_dict: Tensors by name.
            strict: Whether names must match exactly.
            assign: Whether to take the tensors themselves instead of copying their values.

        Returns:
            The missing and the unexpected names.

        Raises:
            StateDictError: A tensor does not fit; nothing was changed. It is also a ``RuntimeError``.
        """
        if isinstance(state_dict, Mapping) and not torch_api.has_loading_hooks(self):
            self._aot_check_state(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _aot_check_state(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> None:
        entry = self._aot_entry
        own = {s.name: t for s, t in zip(entry.spec.state, self._aot_current(), strict=True)}
        persistent = {s.name: own[s.name] for s in entry.spec.state if s.persistent}
        if problem := tensor_values.unlike(
            persistent, {n: v for n, v in state_dict.items() if n in persistent}, strict=strict
        ):
            raise StateDictError(f"state of entry {entry.name!r}: {problem}; nothing was changed")
        # Submodules added by the caller
        prefixes = tuple(f"{n}." for n, m in self.named_children() if type(m) is not _Part)
        others = {
            *dict(self.named_parameters(remove_duplicate=False)),
            *dict(self.named_buffers(remove_duplicate=False)),
        } - own.keys()
        unexpected = sorted(map(str, state_dict.keys() - persistent.keys() - others))
        if strict and (unexpected := [n for n in unexpected if not n.startswith(prefixes)]):
            raise StateDictError(f"state of entry {entry.name!r}: unexpected {unexpected[:5]}; nothing was changed")
        if assign:
            try:
                entry.state.check([state_dict.get(n, t).detach() if n in persistent else t for n, t in own.items()])
            except WeightsError as error:
                raise StateDictError(f"state of entry {entry.name!r}: {error}; nothing was changed") from error

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(self.__dict__.get("_modules", {}).get(name), _Part) and not isinstance(value, _Part):
            _refuse_change(name)
        super().__setattr__(name, value)

    def _aot_current(self) -> list[torch.Tensor]:
        try:
            return [owner[name] for owner, name in self._aot_slots.pairs]
        except KeyError as error:
            raise WeightsError(
                f"the parameter or buffer {error.args[0]!r} was deleted from the loaded module; load the package again"
            ) from error

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the entry, given at export; {} if there is none."""
        return self._aot_entry.spec.json_metadata

    def __copy__(self) -> LoadedModule:
        return refuse_shallow_copy(self)

    def __reduce__(self) -> Any:
        tensors = pickled(self._aot_entry.spec.state, self._aot_tensors())
        return (
            self._aot_entry.reopen,
            (),
            {"tensors": tensors, "training": self.training, "own": self._aot_own(), "modules": self._aot_added()},
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self._aot_entry.spec.state, self._aot_current(), state["tensors"])
        self.train(state["training"])
        self.__dict__.update(state["own"])
        for name, module in state["modules"].items():
            self.add_module(name, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModule:
        entry = self._aot_entry
        tensors = {s.weight: t.detach().clone() for s, t in zip(entry.spec.state, self._aot_tensors(), strict=True)}
        out = LoadedModule(copy.deepcopy(entry, memo), tensors)
        out.train(self.training)
        for old, new in zip(self._aot_current(), out._aot_current(), strict=True):
            if isinstance(old, nn.Parameter):
                new.requires_grad_(old.requires_grad)
                new.grad = None if old.grad is None else old.grad.clone()
        memo[id(self)] = out
        for name, value in self._aot_own().items():
            out.__dict__[name] = copy.deepcopy(value, memo)
        for name, module in self._aot_added().items():
            out.add_module(name, copy.deepcopy(module, memo))
        return out

    def _aot_tensors(self) -> list[torch.Tensor]:
        """Return the state for a copy."""
        tensors = self._aot_current()
        for spec, tensor in zip(self._aot_entry.spec.state, tensors, strict=True):
            if tensor is None:
                raise WeightsError(
                    f"{spec.name} is None, and compiled code reads it: give it a tensor before the copy, or load the package again"
                )
        return tensors

    def _aot_own(self) -> dict[str, Any]:
        """Return the caller's own attributes and hooks."""
        return {
            n: v
            for n, v in self.__dict__.items()
            if n not in _STANDARD or n.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
        }

    def _aot_added(self) -> dict[str, nn.Module | None]:
        """Return the submodules that the caller added."""
        return {n: m for n, m in self._modules.items() if not isinstance(m, _Part)}

    def attach(
        self, net: nn.Module, *, otherwise: Otherwise = "error", strict: bool = False, compare: int = 0
    ) -> Attachment:
        """Make ``net(x)`` run this entry's compiled code, on the parameters and buffers of ``net``.

        Only the ``forward`` of ``net`` is replaced: its hooks, ``train()``, ``state_dict()``, ``.to()``, optimizers and
        ``DistributedDataParallel`` work as before. A copy or pickle of it has its own forward. Tensors that move are
        bound again.

        If source or attributes of classes outside PyTorch differ from the exported ones, which may be harmless,
        attaching warns. Later calls do not check these attributes: after a change, attach again.

        Args:
            net: A live module like the exported one. It must have the same tensors (names, shapes, dtypes, strides,
                device) and layers, and train no more of them.
            otherwise: "error" raises if no exported variant serves a call; "eager" runs the module's own forward then,
                and counts it by reason in :attr:`Attachment.in_eager`.
            strict: Whether a difference that may be harmless raises :class:`InputError` instead of a warning.
            compare: The number of calls that first run both ways, on copies. It is meant for tests.

        Returns:
            The attachment. It is also a context manager: compiled code runs until the block ends.

        Raises:
            InputError: The layers, tensors or modes of ``net`` differ; now, or in a later call.
            WeightsError: A tensor of ``net`` does not fit; now, or in a later call.
            GradientError: A tensor of ``net`` requires a gradient that was not exported; now, or in a later call.
            ExecutionError: A compared call gave another result, buffer or gradient than eager; the message names it.

        Examples:
            >>> with load("net.pt2").module().attach(net, otherwise="eager") as attached:
            ...     net(torch.randn(100, 8)).sum().backward()
            >>> attached.calls
            1
        """
        return Attachment(self._aot_entry, net, otherwise, strict, compare)

    def detach(self, net: nn.Module) -> None:
        """Restore the forward of a module.

        Args:
            net: The module that :meth:`attach` was called with.

        Raises:
            InputError: Nothing is attached to it.
        """
        detach(net)

    def extra_repr(self) -> str:
        entry = self._aot_entry
        modes = sorted({v.spec.mode for v in entry.variants})
        return f"entry={entry.name!r}, {len(entry.variants)} variant(s), modes={modes}"


class _Slots:
    """The dict and key of each state tensor. This is a class because tools that walk through a module's lists and dicts
    must not enter it."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[dict[str, Any], str]]):
        self.pairs = pairs


class _Part(nn.Module):
    """A submodule of a loaded module: it holds names and tensors. Its code is compiled into the whole, so that changing
    it is an error."""

    def train(self, mode: bool = True) -> _Part:
        if mode != self.training:
            raise InputError(
                f"a submodule of a loaded module cannot be put into {'train' if mode else 'eval'} mode alone: it is compiled into the whole. "
                "Export the module with that submodule in that mode (which is kept), or call train() or eval() of the loaded module"
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("a submodule of a loaded module cannot be called: export it as its own entry")

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            not name.startswith("_")
            and name != "training"
            and not isinstance(value, torch.Tensor)
            and name not in self._slots()
        ):
            _refuse_change(name)
        super().__setattr__(name, value)

    def _slots(self) -> set[str]:
        return {*self.__dict__.get("_parameters", ()), *self.__dict__.get("_buffers", ())}

    def _hooked(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "a hook on a submodule of a loaded module would never run: register it on the loaded module, or on the module before the export"
        )

    register_forward_hook = register_forward_pre_hook = register_full_backward_hook = (
        register_full_backward_pre_hook
    ) = _hooked
    register_backward_hook = _hooked


_STANDARD = {*nn.Module().__dict__, "_aot_entry", "_aot_slots", "_aot_set_apart"}


def _refuse_change(name: str) -> None:
    raise InputError(
        f"{name!r} of a loaded module cannot be changed: its effect is compiled. Change it before the export"
    )


def _submodule(root: nn.Module, name: str) -> nn.Module:
    owner = root
    for part in name.split(".") if name else ():
        if part not in owner._modules:
            owner.add_module(part, _Part())
        owner = owner._modules[part]  # type: ignore[assignment]
    return owner


def _place(
    root: nn.Module, spec: StateSpec, by_weight: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> None:
    path, _, last = spec.name.rpartition(".")
    owner = _submodule(root, path)
    if spec.weight not in by_weight:
        tensor = tensors[spec.weight]
        by_weight[spec.weight] = nn.Parameter(tensor, requires_grad=spec.requires_grad) if spec.parameter else tensor
    if spec.parameter:
        owner.register_parameter(last, by_weight[spec.weight])  # type: ignore[arg-type]
    else:
        owner.register_buffer(last, by_weight[spec.weight], persistent=spec.persistent)

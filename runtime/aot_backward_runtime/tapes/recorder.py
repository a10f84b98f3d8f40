"""The recorder: the autograd engine calls it back to record a pass of unknown structure.

Compiled autograd's C++ walks the graph, builds a key per node, and follows its cache. On a cache miss it gets an object
from the factory given to ``set_autograd_compiler`` and calls the methods of :class:`Recorder` in the order of its walk.
PyTorch's own object traces with Dynamo and fake tensors; this one writes a :class:`~.tape.Tape` and computes nothing.
The tensors that it returns are only stand-ins for slots, so eager can still run a pass that the recorder refuses.

Nothing here may raise between ``begin_capture`` and ``end_capture``: the current node would keep the stand-ins. Errors
are stored in :attr:`Recorder.refused` and raised at the end, when the engine has restored everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import torch_api
from .interpreter import functional
from .node_order import in_order
from .symbolic_scalar import SymbolicScalar
from .tape import Derived, Op, Slot, Tape, slots

_custom_names: Counter[str] = Counter()
Order = Callable[[Sequence[str]], "list[int] | None"]
"""A function from the nodes' names in the engine's walk to eager's order of them, or None if unknown."""


class Refused(Exception):
    """Raised for a pass that the recorder cannot record; eager runs it."""


@dataclass(frozen=True)
class Recorded:
    """A recorded pass. ``arranged(order)`` returns the tape for an order of the nodes; ``order`` is that of this pass.

    ``picked``: the engine's tensors that are inputs of the tape. Unread ones are left out: the engine also lifts the
    present ``.grad`` of each leaf, so the first training step, which has none, would otherwise give another tape than
    the second.
    """

    arranged: Callable[[Sequence[int]], Tape]
    order: list[int]
    picked: list[int]


class Recorder:
    """Records one pass. ``finish(recorded)`` returns the function that the engine then calls for passes of
    this structure."""

    def __init__(self, order: Order, finish: Callable[[Recorded], Callable[..., Any]]):
        self._order, self._finish = order, finish
        self._ops: list[Op] = []
        self._nodes: list[str] = []
        self._slots: dict[int, Slot] = {}
        self._alive: list[torch.Tensor] = []
        self._values = 0
        self._counts = [0, 0]
        self._scalars: tuple[str, ...] = ()
        self._hooks = self._packed = 0
        self.decided: list[SymbolicScalar] = []  # sizes that the engine read the value of
        self.refused = ""
        self._zeros_mode = torch_api.InterceptZeros(self._zeros)

    # -- slots

    def _stand_in(self, slot: Slot, tensor: torch.Tensor) -> torch.Tensor:
        self._slots[id(tensor)] = slot
        self._alive.append(tensor)
        return tensor

    def _new(self, count: int) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        first = self._values
        self._values += count
        numbers = tuple(range(first, self._values))
        return [self._stand_in(Slot("value", n), torch.empty(0)) for n in numbers], numbers

    def _symbolic(self, kind: str, index: int, value: float) -> SymbolicScalar:
        return SymbolicScalar(Slot(kind, index), value, self.decided)

    def _operand(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            slot = self._slots.get(id(x))
            if slot is None:
                self.refused = (
                    self.refused or f"the engine does not say where a tensor of shape {tuple(x.shape)} comes from"
                )
                return None
            return slot
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = x.node
            return node.operand if isinstance(node, SymbolicScalar) else node.guard_int("", 0)
        if isinstance(x, torch.Size):
            return tuple(map(self._operand, x))
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._operand, x))
        return x

    def _emit(self, kind: str, name: str, operands: Sequence[Any], results: tuple[int, ...] = ()) -> None:
        self._ops.append(Op(kind, name, tuple(map(self._operand, operands)), results, len(self._nodes) - 1))

    def _hook(self, index: int) -> Slot:
        self._hooks = max(self._hooks, index + 1)
        return Slot("hook", index)

    # -- called by the engine, in the order of its walk

    def begin_capture(
        self,
        inputs: list[torch.Tensor],
        sizes: Sequence[int],
        scalars: list[int | float],
        origins: Any = None,
        accumulate_grad: bool = False,
        check_nans: bool = False,
    ) -> tuple[str, list[torch.Tensor], list[Any], list[Any]]:
        self._counts = [len(inputs), len(sizes)]
        self._scalars = tuple(type(s).__name__ for s in scalars)
        stand_ins = []
        for i, tensor in enumerate(inputs):
            # A 0-d tensor that was made from a Python number would come back as that number and become a constant of
            # the tape.
            alias = tensor.detach() if tensor.dim() else torch.empty((), dtype=tensor.dtype, device=tensor.device)
            if tensor.requires_grad:
                alias.requires_grad_()
            stand_ins.append(self._stand_in(Slot("input", i), alias))
        symbols = [torch.SymInt(self._symbolic("size", i, v)) for i, v in enumerate(sizes)]
        lifted = [
            (torch.SymFloat if type(v) is float else torch.SymInt)(self._symbolic("scalar", i, v))
            for i, v in enumerate(scalars)
        ]
        self._zeros_mode.open()
        return "aot-backward", stand_ins, symbols, lifted

    def set_node_origin(self, name: str, index: int, context: Any) -> None:
        self._nodes.append(name)

    def bind_function(
        self, name: str, function: Callable[..., Any], is_custom: bool = False, is_traceable: bool = True
    ) -> str:
        if is_custom:
            count = _custom_names[name]
            _custom_names[name] += 1
            name = f"CppNode{name}{count}"
        functional[name] = function
        torch_api.share_functional(name, function, is_traceable)
        return name

    def apply_functional(
        self, name: str, grads: Sequence[Any], args: Sequence[Any], metadata: Sequence[Any]
    ) -> list[torch.Tensor]:
        if name not in functional and not torch_api.adopt_functional(name, functional):
            self.refused = self.refused or f"the backward of {name} was bound by another autograd compiler"
        results, numbers = self._new(len(metadata))
        self._emit("apply", name, (list(grads), *args), numbers)
        return results

    def validate_outputs(
        self, name: str, grads: Sequence[Any], args: Sequence[Any], metadata: Sequence[Any]
    ) -> list[torch.Tensor]:
        if "validate_outputs" not in functional:
            torch_api.adopt_functional("validate_outputs", functional)
        results, numbers = self._new(len(grads))
        if numbers:
            self._emit("validate", "", (list(grads), args[0]), numbers)
            self._count_outputs()
        return results

    def _count_outputs(self) -> None:
        """Derive the number of gradients of an unbind or split from the sizes: the engine's key of such a node only has
        the first count."""
        *_, op, validation = self._ops if len(self._ops) > 1 else (None, None)
        if (
            op is None
            or validation is None
            or op.kind != "apply"
            or op.name not in ("UnbindBackward0", "SplitBackward0", "UnsafeSplitBackward0")
        ):
            return
        sizes = validation.operands[1][0][1]
        count = sizes[op.operands[2]]
        if op.name != "UnbindBackward0":
            rows = Derived(
                "neg", (Derived("floordiv", (Derived("neg", (count,)), Derived("max", (op.operands[-1], 1)))),)
            )
            count = Derived("max", (rows, 1))
        grads = list(op.operands[0])
        while grads and grads[-1] is None:
            grads.pop()
        self._ops[-2] = replace(op, operands=(Derived("pad", (tuple(grads), count)), *op.operands[1:]))

    def accumulate(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        (result,), numbers = self._new(1)
        self._emit("add", "", (old, new), numbers)
        return result

    def accumulate_grad(self, variable: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        """``rest``: (current gradient, gradient, has_post_hooks), or before torch 2.13 (gradient, has_post_hooks)."""
        if "AccumulateGrad" not in functional:
            torch_api.adopt_functional("AccumulateGrad", functional)
        self._emit("accumulate", "", (variable, rest[-2]))
        return self._new(1)[0][0] if len(rest) == 3 else None

    def unpack_hook(self, hook: int, data: int) -> torch.Tensor:
        self._packed = max(self._packed, data + 1)
        (result,), numbers = self._new(1)
        self._emit("unpack_hook", "", (self._hook(hook), Slot("packed", data)), numbers)
        return result

    def tensor_pre_hook(self, grads: list[Any], hook: int, i: int) -> list[Any]:
        if grads[i] is None:  # the hook is still called, but may not replace the None
            self._emit("tensor_pre_hook", "", (self._hook(hook), None), (-1,))
        else:
            grads[i] = self._hooked("tensor_pre_hook", self._hook(hook), grads[i])
        return grads

    def cpp_tensor_pre_hook(self, grads: list[Any], number: int, i: int) -> list[Any]:
        if grads[i] is not None:
            grads[i] = self._hooked("cpp_tensor_pre_hook", number, grads[i])
        return grads

    def _hooked(self, kind: str, hook: Any, grad: torch.Tensor) -> torch.Tensor:
        (result,), numbers = self._new(1)
        self._emit(kind, "", (hook, grad), numbers)
        return result

    def pre_hook(self, grads: Sequence[Any], hook: int) -> list[torch.Tensor]:
        results, numbers = self._new(len(grads))
        self._emit("pre_hook", "", (self._hook(hook), list(grads)), numbers)
        return results

    def post_hook(self, results: Sequence[Any], grads: Sequence[Any], hook: int) -> list[torch.Tensor]:
        changed, numbers = self._new(len(results))
        self._emit("post_hook", "", (self._hook(hook), list(results), list(grads)), numbers)
        return changed

    def post_acc_grad_hook(self, variable: torch.Tensor, hook: int) -> list[torch.Tensor]:
        self._emit("post_accumulate_hook", "", (self._hook(hook), variable))
        return [variable]

    def proxy_call_backward(
        self,
        grads: Sequence[Any],
        metadata: Sequence[Any],
        saved: Sequence[Any],
        context: int,
        real: Any,
        state: int | None = None,
        opaque: Sequence[int] = (),
    ) -> tuple[torch.Tensor | None, ...]:
        if state is not None or opaque:
            self.refused = (
                self.refused or "a torch.compile'd forward keeps hook state or opaque objects for its backward"
            )
        results, numbers = self._new(len(metadata))
        function = real._forward_cls
        name = f"{function.__module__}.{function.__qualname__}"
        self._emit("custom", name, (self._hook(context), tuple(saved), list(grads), list(metadata), ""), numbers)
        return tuple(None if m is None else r for m, r in zip(metadata, results, strict=True))

    def _zeros(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Record the zeros that the engine makes for an undefined gradient of a custom function."""
        (result,), numbers = self._new(1)
        self._emit("zeros", "", (tuple(size), dtype, device), numbers)
        return result

    def call_copy_slices_prologue(self, grads: Sequence[Any], *geometry: Any) -> list[torch.Tensor]:
        results, numbers = self._new(3)
        self._emit("copy_slices_prologue", "", (list(grads), *geometry), numbers)
        return results

    def call_copy_slices_epilogue(
        self, needed: Sequence[bool], result: torch.Tensor, grads: Sequence[Any], part: torch.Tensor
    ) -> list[torch.Tensor]:
        results, numbers = self._new(len(needed))
        self._emit("copy_slices_epilogue", "", (list(needed), result, list(grads), part), numbers)
        return results

    def end_capture(self, outputs: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        self._zeros_mode.close()
        if self.decided:
            self.refused = (
                self.refused or f"the engine branches on the size {self.decided[0].operand} of {self._nodes[-1]}"
            )
        order = self._order(self._nodes)
        if order is None:
            self.refused = (
                self.refused or "the order in which eager runs the nodes cannot be derived from the roots of this pass"
            )
        if self.refused:
            raise Refused(self.refused)
        assert order is not None
        results = tuple(_before_hooks(self._operand(o), self._ops) for o in outputs)
        used = [s.index for o in (*(op.operands for op in self._ops), results) for s in slots(o) if s.kind == "input"]
        picked = sorted(set(used))
        place = {old: new for new, old in enumerate(picked)}

        def arranged(order: Sequence[int]) -> Tape:
            """Return the tape for that order of nodes."""
            ops = in_order(self._ops, results, order, self._values)
            return Tape(
                ops=tuple(replace(op, operands=_renumbered(op.operands, place)) for op in ops),
                outputs=_renumbered(results, place),
                inputs=len(picked),
                sizes=self._counts[1],
                scalars=self._scalars,
                hooks=self._hooks,
                packed=self._packed,
                nodes=tuple(self._nodes),
            )

        self._alive.clear()
        self._slots.clear()
        return _call, self._finish(Recorded(arranged, order, picked))

    def close(self) -> None:
        self._zeros_mode.close()


def _before_hooks(output: Any, ops: Sequence[Op]) -> Any:
    """Return ``output`` before its tensor's hooks, as eager does for a tensor within the graph if the walk continues
    from it."""
    kinds = ("tensor_pre_hook", "cpp_tensor_pre_hook")
    while isinstance(output, Slot) and output.kind == "value":
        op = next(op for op in ops if output.index in op.results)
        if op.kind not in kinds or not any(o.node == op.node and o.kind not in kinds for o in ops):
            break
        output = op.operands[1]
    return output


def _renumbered(operand: Any, place: dict[int, int]) -> Any:
    if isinstance(operand, Slot):
        return Slot("input", place[operand.index]) if operand.kind == "input" else operand
    if isinstance(operand, (list, tuple)):
        return type(operand)(_renumbered(o, place) for o in operand)
    if isinstance(operand, Derived):
        return Derived(operand.operator, _renumbered(operand.operands, place))
    return operand


def _call(program: Callable[..., Any], *operands: Any) -> Any:
    return program(*operands)

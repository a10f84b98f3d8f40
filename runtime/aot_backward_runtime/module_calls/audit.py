"""Audited calls: the module's own forward beside the compiled one, from the same random state, results and gradients compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..entries.autograd_function import DifferentiableCall
from ..errors import AotBackwardError, InputError
from ..native.pytree import flatten
from .interception import Plain
from .live_module import LiveModule, memory_of, state_of

_RESULTS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 3e-2, torch.bfloat16: 6e-2}
_OTHERS = 1e-4
"""How far results may be off, relative to their norm; a package's own check (``aot-backward verify``) is closer."""
_GRADIENTS = 10
"""Times that, for gradients."""
_SMALL = 0.1
"""Of the largest gradient's norm: what is smaller may be as far off as one of that size."""

Grad = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence["torch.Tensor | None"]]
"""Gradients of outputs with respect to inputs, by eager: ``grad(outputs, inputs, incoming)``."""
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
Differs = Callable[[str], None]
"""Called with what differs. May raise."""


def is_audited(number: int) -> bool:
    """The 1st, 2nd, 4th, 8th … call."""
    return number & (number - 1) == 0


def audited_call(
    live: LiveModule, module: nn.Module, plain: Plain, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Grad, differs: Differs
) -> Any:
    """The result by compiled code where it is that of the module itself, else that of the module, after ``differs``.

    Buffers and random state are written once: as the one writes them whose result is returned. Arguments that come of other computations are given
    to eager without their history, which may lead to the same parameters; so where results differ, the module is called again."""
    live.check(args, kwargs)  # what does not fit is found before anything runs: the caller then makes the call, once
    apart: dict[int, torch.Tensor] = {}
    leaves = [_apart(v, apart) for v in pytree.tree_leaves((args, kwargs))]
    args_apart, kwargs_apart = pytree.tree_unflatten(leaves, pytree.tree_structure((args, kwargs))) if apart else (args, kwargs)
    before = _random_states()
    as_before = [(b, b.detach().clone()) for b in module.buffers()] if apart else []
    with on_copies_of_buffers(module) as buffers:  # what eager saves of them for its backward must not change any more
        expected = plain(module, *args_apart, **kwargs_apart)
        around = memory_of(_tensors((args_apart, kwargs_apart, list(state_of(module).values()))))
    after = _random_states()
    live.written_unversioned({id(b) for b, copy in buffers if copy._version == 0 and not torch.equal(b, copy)})
    _set_random_states(before)
    made: list[DifferentiableCall] = []
    try:
        result = live.call(args, kwargs, made.append)
        words = _difference(made, result, expected, buffers)
        words = words or _aliased(result, memory_of(_tensors((args, kwargs, live.current()))), expected, around)
        if not words and not all(map(torch.equal, _random_states(), after)):
            words = "it draws other random numbers, or another number of them"
    except AotBackwardError as error:  # eager could, and has
        words = f"it could not be run: {error}"
    except BaseException:
        _take_over(buffers, after)
        raise
    if words:
        if apart:
            _take_over(as_before, before)
            expected = plain(module, *args, **kwargs)
        else:
            _take_over(buffers, after)
        differs(words)
        return expected
    if made:
        made[0].audit = _Gradients(live, made[0], _leaves(made[0], expected), apart, grad, differs)
    else:
        live.proven = True
    return result


def _apart(value: Any, apart: dict[int, torch.Tensor]) -> Any:
    """``value``; of a tensor with a history one without, the same for the same, which is put into ``apart`` by the ``id`` of ``value``."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    if id(value) not in apart:
        apart[id(value)] = value.detach().requires_grad_()
    return apart[id(value)]


class _Gradients:
    """The gradients that eager gives for an audited call."""

    def __init__(
        self,
        live: LiveModule,
        call: DifferentiableCall,
        leaves: Sequence[torch.Tensor],
        apart: Mapping[int, torch.Tensor],
        grad: Grad,
        differs: Differs,
    ):
        """``leaves``: eager's results. ``apart``: what eager was given in the place of a source, by its ``id``."""
        variant = call.matched.variant
        places = [n for n, (kind, _) in enumerate(call.differentiated.forward.outputs) if kind == "result"]
        self.outputs = [leaves[places[i]] for i in variant.incoming]
        self.live, self.call, self.apart, self.grad, self.differs = live, call, apart, grad, differs

    def gradients(self, found: list[torch.Tensor | None], given: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        self.live.proven = True
        made = self._by_eager(given, needed)
        if made is None:
            return found
        totals: dict[int, torch.Tensor] = {}
        for source, ours in zip(self.call.sources, found, strict=True):
            if ours is not None:
                totals[id(source)] = totals[id(source)] + ours if id(source) in totals else ours
        # of a tensor that is given twice, such as a query that is the key, eager knows the sum: it counts in the first place
        expected = [made.pop(id(s), None) for s in self.call.sources]
        summed = [totals.pop(id(s), None) for s in self.call.sources]
        largest = max((_norm(e) for e in expected if e is not None), default=0.0)
        for name, ours, eager in zip(self.call.differentiated.wrt, summed, expected, strict=True):
            if words := _compared(ours, eager, largest, _GRADIENTS):
                self.differs(f"the gradient of {name.partition(':')[2]} {words}")
                return expected
        return found

    def instead(self, error: RuntimeError, given: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> list[torch.Tensor | None]:
        made = self._by_eager(given, needed)
        if made is None:
            raise error
        self.differs(f"its backward could not be run: {str(error).partition(': [')[0]}")
        return [made.pop(id(s), None) for s in self.call.sources]

    def _by_eager(self, given: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> dict[int, torch.Tensor | None] | None:
        """By the ``id`` of the source. None where eager cannot tell."""
        self.call.audit = None  # once: the graph of the eager call is consumed
        sources = {id(s): self.apart.get(id(s), s) for s, asked in zip(self.call.sources, needed, strict=True) if asked}
        there = [(o, g) for o, g in zip(self.outputs, given, strict=True) if g is not None and o.requires_grad]
        self.outputs = []
        # hooks would be called, and .grad be added to, twice; what has a history, such as a parameter that was computed, may lead to others of them
        if not sources or not there or any(s._backward_hooks or s.grad_fn is not None for s in sources.values()):
            return None
        outputs, incoming = zip(*there, strict=True)
        return dict(zip(sources, self.grad(outputs, list(sources.values()), incoming), strict=True))


def _leaves(call: DifferentiableCall, value: Any) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    flatten(call.matched.variant.spec.out_tree, value, out, "the result")
    return out


def _difference(made: Sequence[DifferentiableCall], result: Any, expected: Any, buffers: Pairs) -> str:
    """In words, where results or buffers are not what the module itself made."""
    ours, eager = list(_tensors(result)), list(_tensors(expected))
    if type(result) is not type(expected) or len(ours) != len(eager):
        return f"it returns a {type(expected).__name__} of {len(eager)} tensors; compiled, a {type(result).__name__} of {len(ours)}"
    if made:
        try:
            _leaves(made[0], expected)
        except InputError as error:
            return str(error)
    for i, (a, e) in enumerate(zip(ours, eager, strict=True)):
        if a.requires_grad != e.requires_grad:
            return f"result {i} {'requires a' if e.requires_grad else 'requires no'} gradient; compiled it is the other way"
        if words := _compared(a.detach(), e.detach(), 0.0, 1):
            return f"result {i} {words}"
    for buffer, copy in buffers:
        if words := _compared(buffer.detach(), copy, 0.0, 1):
            return f"a buffer of shape {tuple(copy.shape)} {words}"
    return ""


def _aliased(result: Any, given: set[int], expected: Any, around: set[int]) -> str:
    """In words, where a result shares memory with what the call was given and the other one does not: it may be written to."""
    for i, (ours, eager) in enumerate(zip(_tensors(result), _tensors(expected), strict=True)):
        if memory_of([ours]).isdisjoint(given) != memory_of([eager]).isdisjoint(around):
            return f"result {i} shares memory with an argument, a parameter or a buffer in one of both"
    return ""


def _tensors(value: Any) -> Any:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _compared(found: torch.Tensor | None, expected: torch.Tensor | None, largest: float, factor: float) -> str:
    if found is None or expected is None:
        return "" if found is expected else "is None in one of both"
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return f"is {expected.dtype} {tuple(expected.shape)}; compiled {found.dtype} {tuple(found.shape)}"
    if not (found.is_floating_point() or found.is_complex()):
        return "" if torch.equal(found, expected) else "is another one compiled"
    odd = ~torch.isfinite(expected)
    if odd.any():
        if not torch.equal(~torch.isfinite(found), odd):
            return "is not finite where compiled it is, or the other way"
        found, expected = found[~odd], expected[~odd]
    off, allowed = _norm(found - expected), factor * _RESULTS.get(found.dtype, _OTHERS) * max(_norm(expected), _SMALL * largest)
    return "" if off <= allowed else f"is off by {off:.3g} compiled; {allowed:.3g} is allowed"


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)))


@contextlib.contextmanager
def on_copies_of_buffers(module: nn.Module) -> Iterator[Pairs]:
    """Inside, ``module`` has copies of its buffers. The pairs: each buffer and its copy."""
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places = [(part._buffers, name, b) for part in module.modules() for name, b in part._buffers.items() if b is not None]
    for slots, name, buffer in places:
        slots[name] = pairs.setdefault(id(buffer), (buffer, buffer.detach().clone()))[1]
    try:
        yield list(pairs.values())
    except BaseException:  # what it wrote before it raised is written
        with torch.no_grad():
            for buffer, copy in pairs.values():
                buffer.copy_(copy)
        raise
    finally:
        for slots, name, buffer in places:
            slots[name] = buffer


def _take_over(buffers: Pairs, states: Sequence[torch.Tensor]) -> None:
    """The buffers and the random state are as eager left them."""
    with torch.no_grad():
        for buffer, copy in buffers:
            buffer.copy_(copy)
    _set_random_states(states)


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _set_random_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])

"""One call of a ``module`` entry on given tensors: match it to a variant, bind, run, and assemble the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError
from ..native.library import Binding
from ..native.plan import Runnable
from ..native.pytree import unflatten
from ..native.variant import Differentiated
from .autograd_function import DifferentiableCall, apply, differentiated
from .dispatch import Entry, MatchedCall


def call_entry(
    entry: Entry, current: Sequence[torch.Tensor], mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a call. ``current``: the entry's state. :class:`InputError`, :class:`WeightsError` and :class:`GradientError`
    are raised before anything runs."""
    matched, binding, runnable = _bound_call(entry, current, mode, args, kwargs)
    variant = matched.variant
    if torch.is_grad_enabled():
        derivative, sources = _differentiated(entry, current, matched, binding)
        if derivative is not None:
            return _assembled(
                entry,
                derivative.forward,
                matched,
                current,
                apply(DifferentiableCall(matched, derivative, binding, current), sources),
            )
    with torch.no_grad():
        runnable.increment_versions(current)
        values = runnable.call(binding, matched.flat, matched.sizes)
    if variant.spec.shared:
        variant.share(runnable, values, matched.sizes)
    return _assembled(entry, runnable, matched, current, [values[i] for i in runnable.results])


def _bound_call(
    entry: Entry, current: Sequence[torch.Tensor], mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[MatchedCall, Binding, Runnable]:
    """Return the match, binding and runnable that serve a call."""
    if torch_api.in_forward_mode():
        torch_api.refuse_duals(current)
    if torch.jit.is_tracing():
        raise InputError(
            "called during torch.jit.trace, which would record the results and not the call; trace the original module"
        )
    parameters = None
    if entry.specialised and torch.is_grad_enabled():
        parameters = frozenset(
            [target for i, target in entry.state.wrt if current[i] is not None and current[i].requires_grad]
        )
    matched = entry.match(mode, args, kwargs, parameters)
    variant = matched.variant
    binding = entry.state.refresh(current)
    runnable = variant.called
    assert runnable is not None  # module entries have one
    if runnable.writes:
        runnable.refuse_overlap(runnable.written(binding, current), matched.given, variant.spec.inputs)
    return matched, binding, runnable


_MAX_CALLS = 32  # known calls per set of addresses: bounds the bindings and sizes that they keep alive; a guess


class KnownCalls(dict[tuple[int, int], "_KnownSources"]):
    """Known calls by the identity of binding and sizes, which they keep alive. They cover one set of addresses only: a
    binding keeps its tensors alive, and a parameter's old memory (``.data = …``) should be freed."""

    def __init__(self, addresses: tuple[int, ...]):
        super().__init__()
        self.addresses = addresses


class _KnownSources:
    """The tensors that needed gradients in a call, by place. They are the same in a later call with the same binding
    and sizes, because the checks of state and arguments compare requires_grad."""

    __slots__ = ("binding", "differentiated", "inputs", "sizes", "state")

    def __init__(
        self,
        binding: Binding,
        sizes: Mapping[str, int],
        differentiated: Differentiated | None,
        state: list[int],
        inputs: list[int],
    ):
        self.binding = binding
        self.sizes = sizes
        self.differentiated = differentiated
        self.state = state
        self.inputs = inputs


def _differentiated(
    entry: Entry, current: Sequence[torch.Tensor], matched: MatchedCall, binding: Binding
) -> tuple[Differentiated | None, list[torch.Tensor]]:
    """Return how gradients are computed (None if no tensor needs one), and the tensors that need them."""
    calls = entry.known_calls
    if calls is None or calls.addresses is not binding[1]:
        calls = entry.known_calls = KnownCalls(binding[1])
    record = calls.get((id(binding), id(matched.sizes)))
    if record is None or record.binding is not binding or record.sizes is not matched.sizes:
        state, inputs = differentiated(entry, matched.variant, current, matched)
        targets = [entry.state.targets[i] for i in state] + [f"input:{i}" for i in inputs]
        derivative = matched.variant.differentiated(targets) if targets else None
        if len(calls) >= _MAX_CALLS:
            calls.clear()
        record = _KnownSources(binding, matched.sizes, derivative, state, inputs)
        places = entry.state.asked(binding)
        # No thread has changed it meanwhile
        if places is not None and state == [i for i in places if entry.state.targets[i] in matched.variant.wrt]:
            calls[id(binding), id(matched.sizes)] = record
    sources = [current[i] for i in record.state]
    if record.inputs:
        sources += [matched.given[i] for i in record.inputs]
    return record.differentiated, sources


def _assembled(
    entry: Entry,
    runnable: Runnable,
    matched: MatchedCall,
    current: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> Any:
    if matched.variant.plain_result:
        return results[0]
    values = iter(results)
    flat = []
    for kind, where in runnable.outputs:
        flat.append(
            next(values)
            if kind == "result"
            else matched.given[where]
            if kind == "input"
            else current[entry.index[where]]
        )
    return unflatten(matched.variant.spec.out_tree, flat, matched.sizes, entry.types)

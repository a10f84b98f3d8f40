"""One call of a ``module`` entry on given tensors: matched to a variant, bound, run, and its results put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError
from ..native.library import Binding
from ..native.plan import Runnable
from ..native.pytree import unflatten
from .autograd_function import DifferentiableCall, apply, differentiated
from .dispatch import Entry, MatchedCall


def call_entry(
    entry: Entry,
    current: Sequence[torch.Tensor],
    mode: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Callable[[DifferentiableCall], None] | None = None,
    least: int = 0,
) -> Any:
    """``current``: the entry's state. ``made``: called with a call whose backward is to come, before it runs. ``least``: of open sizes."""
    matched, binding, runnable = bound_call(entry, current, mode, args, kwargs, least)
    variant = matched.variant
    if torch.is_grad_enabled():
        wrt, sources = differentiated(entry, variant, current, matched)
        if wrt:
            call = DifferentiableCall(matched, variant.plans["forward"], binding, current, wrt)
            if made is not None:
                made(call)
            return _assembled(entry, call.runnable, matched, current, apply(call, sources))
    with torch.no_grad():
        runnable.increment_versions(current)
        values = runnable.call(binding, matched.flat, matched.sizes)
    if variant.spec.shared:
        variant.share(runnable, values, matched.sizes)
    return _assembled(entry, runnable, matched, current, [values[i] for i in runnable.results])


def bound_call(
    entry: Entry, current: Sequence[torch.Tensor], mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], least: int = 0
) -> tuple[MatchedCall, Binding, Runnable]:
    """What serves a call, and nothing is run; :class:`InputError` says why nothing does."""
    if torch_api.in_forward_mode():
        torch_api.refuse_duals(current)
    asked = None
    if entry.specialised and torch.is_grad_enabled():
        asked = frozenset([target for i, target in entry.state.wrt if current[i] is not None and current[i].requires_grad])
    matched = entry.match(mode, args, kwargs, asked)
    if matched.sizes and min(matched.sizes.values()) < least:
        raise InputError(f"an open size is {min(matched.sizes.values())}; recorded were sizes of {least} and more")
    variant = matched.variant
    binding = entry.state.refresh(current)
    runnable = variant.plans.get("inference") or variant.plans["forward"]
    if runnable.writes:
        runnable.refuse_overlap(runnable.written(binding, current), matched.given, variant.spec.inputs)
    return matched, binding, runnable


def _assembled(entry: Entry, runnable: Runnable, matched: MatchedCall, current: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> Any:
    made = iter(results)
    flat = []
    for kind, where in runnable.outputs:
        flat.append(next(made) if kind == "result" else matched.given[where] if kind == "input" else current[entry.index[where]])
    return unflatten(matched.variant.spec.out_tree, flat, matched.sizes, entry.types)

"""Layers of PyTorch under a trace, where one of them would lose something, stop, or make a graph that holds for less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched
from aot_backward_runtime.errors import ExportError

from . import diagnostics
from .user_code import source_location


@contextlib.contextmanager
def traceable_layers() -> Iterator[None]:
    """A context in which all of them are replaced by forms that a trace takes whole."""
    with (
        plain_checkpoints(),
        _bodies_with_results_of_their_own(),
        patched(torch_api.decompositions, _rnn_helper=_recurrent_layers(torch_api.decompositions._rnn_helper)),
        patched(torch_api.transformer, _detect_is_causal_mask=_causal_if_declared),
    ):
        yield


@contextlib.contextmanager
def plain_checkpoints() -> Iterator[None]:
    """A context in which ``checkpoint(use_reentrant=True)`` runs its function as it stands: its own backward cannot be traced, and gives the same
    gradients.

    Where no input requires a gradient, it gives none to the parameters either."""

    def apply(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        wanted = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return run(*args)

    with patched(torch.utils.checkpoint.CheckpointFunction, apply=apply):
        yield


def _recurrent_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Recurrent layers with the dropout between them, and with final states of the shape of the initial ones: torch's decomposition looks for a layer
    behind the last, and drops the dropout; in torch 2.11 and 2.12 an LSTM's states have a dimension too many."""

    def layers(
        input: torch.Tensor,
        hidden: Any,
        params: Any,
        biases: bool,
        count: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
        layer: Any,
    ) -> Any:
        if not (dropout and train):
            x, finals = original(input, hidden, params, biases, count, dropout, train, both, batch_first, layer)
            return x, _of_shape(finals, hidden)
        x = input.transpose(0, 1) if batch_first else input
        directions, finals = 2 if both else 1, []
        for i in range(count):
            own = slice(i * directions, (i + 1) * directions)
            x, final = original(x, hidden[own], params[own], biases, 1, 0.0, train, both, False, layer)
            finals += _of_shape(final, hidden[own])
            if i < count - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), finals

    return layers


def _of_shape(finals: Any, hidden: Any) -> list[Any]:
    """``finals`` with the shapes of ``hidden``: a list of tensors, or of pairs of them."""
    return [pytree.tree_map(lambda f, h: f if f.dim() == h.dim() else f.view(h.shape), f, h) for f, h in zip(finals, hidden, strict=True)]


def _causal_if_declared(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Transformer layers look into an attention mask to see whether it is causal, only to be faster: a trace has no values to look at."""
    return is_causal is True


@contextlib.contextmanager
def _bodies_with_results_of_their_own() -> Iterator[None]:
    """A context in which the body of a control-flow operator copies a result that shares memory with one of its inputs or with an earlier result.

    The operators refuse such a body. PyTorch makes one itself: the forward of a scan also returns what its backward needs, and tanh, sigmoid and exp
    save their own result for the backward. A body that cannot be differentiated is refused with the line that calls the operator: the error comes
    in the backward, where none of the user's code runs.
    """
    lines: list[str] = []
    utils = torch_api.higher_order_utils
    shares, trace = utils.has_potential_input_alias_or_mutation, utils.reenter_make_fx

    def only_mutation(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return False, shares(*args, **kwargs)[1]

    def traced(body: Callable[..., Any], *settings: Any, **options: Any) -> Callable[..., Any]:
        def with_own_results(*inputs: Any) -> Any:
            results, spec = pytree.tree_flatten(body(*inputs))
            if any(isinstance(r, torch.Tensor) and not (r.is_floating_point() or r.is_complex()) for r in results):
                lines.append(source_location.here())
            return pytree.tree_unflatten(_apart(results, inputs), spec)

        made: Callable[..., Any] = trace(with_own_results, *settings, **options)
        return made

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(utils, has_potential_input_alias_or_mutation=only_mutation))
        for operator in torch_api.control_flow_modules():
            stack.enter_context(patched(operator, reenter_make_fx=traced))
        try:
            yield
        except AssertionError as error:
            refused, where = diagnostics.refused_control_flow(error), next((line for line in lines if line), "")
            if not refused or not where:
                raise
            raise ExportError(f"{refused}; it is called {where}") from error


def _apart(results: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """``results``, with a copy of each that shares memory with an input or with an earlier one."""
    taken = {torch_api.storage_key(value) for value in inputs if isinstance(value, torch.Tensor)}
    out = []
    for result in results:
        if isinstance(result, torch.Tensor):
            if torch_api.storage_key(result) in taken:
                result = result.clone()
            taken.add(torch_api.storage_key(result))
        out.append(result)
    return out

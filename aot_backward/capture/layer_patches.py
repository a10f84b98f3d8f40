"""Layers of PyTorch under a trace, where one of them would lose something, stop, or make a graph that holds for less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched


@contextlib.contextmanager
def traceable_layers() -> Iterator[None]:
    """A context in which all of them are replaced by forms that a trace takes whole."""
    with (
        plain_checkpoints(),
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

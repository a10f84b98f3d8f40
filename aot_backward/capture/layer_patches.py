"""Layers of PyTorch under a trace, where one of them would lose something, stop, or make a graph that holds for less."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

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
    """Recurrent layers with the dropout between them: torch's decomposition looks for a layer behind the last, and drops it."""

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
            return original(input, hidden, params, biases, count, dropout, train, both, batch_first, layer)
        x = input.transpose(0, 1) if batch_first else input
        directions, finals = 2 if both else 1, []
        for i in range(count):
            own = slice(i * directions, (i + 1) * directions)
            x, final = original(x, hidden[own], params[own], biases, 1, 0.0, train, both, False, layer)
            finals += final
            if i < count - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), finals

    return layers


def _causal_if_declared(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
    """Transformer layers look into an attention mask to see whether it is causal, only to be faster: a trace has no values to look at."""
    return is_causal is True

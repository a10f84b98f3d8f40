"""PyTorch's own layers under a trace, where one would lose something or stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .. import torch_api


@contextlib.contextmanager
def dropout_between_layers() -> Iterator[None]:
    """Inside, recurrent layers are traced with the dropout between them: torch's decomposition looks for a layer behind the last, and drops it."""
    decompositions = torch_api.decompositions
    original = decompositions._rnn_helper

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

    decompositions._rnn_helper = layers
    try:
        yield
    finally:
        decompositions._rnn_helper = original


@contextlib.contextmanager
def masks_as_they_are() -> Iterator[None]:
    """Inside, transformer layers take an attention mask for one like any other; they look into it to see whether it is causal, only to be faster."""
    transformer = torch_api.transformer
    original = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original

"""Which library's kernel an operator would call, left open while a graph runs on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from aot_backward import torch_api


@contextlib.contextmanager
def undecided() -> Iterator[None]:
    """Within, a convolution asks no size which library it would run on: oneDNN and NNPACK are for batches of 16 and more, and what is called at run
    time asks again. Else the example's side of that limit would become the range of the batch."""
    mkldnn = torch_api._get_mkldnn_enabled()
    torch_api._set_mkldnn_enabled(False)
    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch_api._set_mkldnn_enabled(mkldnn)

"""Run a rewrite of :mod:`aot_backward_exporters.rewrites` on a traced graph, so that a test can call the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule


def rewritten(graph: GraphModule, *rewrites: Callable[[GraphModule, Any], None]) -> GraphModule:
    """Return ``graph`` after ``rewrites``, with the code of its new nodes; without that a call would run the old
    ones."""
    fake_mode = next(iter(graph.graph.nodes)).meta["val"].fake_mode
    for rewrite in rewrites:
        rewrite(graph, fake_mode)
    graph.graph.lint()
    graph.recompile()
    return graph

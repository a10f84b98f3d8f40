"""All rewrites of a graph, one after another."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from . import (
    axis_sums,
    bias_sums,
    few_positions,
    joined_parts,
    max_pooling,
    merged_sizes,
    row_sums,
    shared_exponential,
    short_attention,
    small_convolution,
    tanh,
    variances,
    wide_attention,
)

REWRITES = (
    small_convolution.by_products,
    few_positions.by_onednn,
    max_pooling.by_channels,
    variances.by_two_sums,
    axis_sums.by_rows,
    row_sums.by_scatter_add,
    tanh.by_exp,
    shared_exponential.by_one,
    wide_attention.in_float32,
    short_attention.by_products,
    joined_parts.by_cat,
    merged_sizes.split_merged_views,
    bias_sums.split_bias_sums,
)
"""Rewrites that create products, copies and views come before the ones that match them."""


def rewrite(module: GraphModule, fake_mode: Any) -> None:
    """Rewrite ``module`` and its subgraphs, the bodies of control flow. ``fake_mode``: the mode of its nodes'
    values."""
    for graph_pass in REWRITES:
        graph_pass(module, fake_mode)
    for _, child in module.named_children():
        if isinstance(child, GraphModule):
            rewrite(child, fake_mode)

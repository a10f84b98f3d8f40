"""Native libraries: what is compiled computes what the graph says, for any weights, and carries nothing of the machine that built it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_backward.program import Artifact, Graph
from aot_backward_exporters import aoti, compile_cache, native_build
from aot_backward_exporters.graph_key import canonical_graph
from aot_backward_runtime.elf import read_elf
from aot_backward_runtime.errors import ExportError
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

Weights = Mapping[str, torch.Tensor]
Captured = tuple[Graph, FakeTensorMode]


def capture(
    compute: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    weights: Weights,
    *,
    dynamic: bool = False,
    ties: Mapping[str, str] | None = None,
    name: str = "net.0.forward",
) -> Captured:
    """``compute(weights, *inputs)`` as a graph: dimension 0 of every input is a symbol where ``dynamic``; ``ties``: attribute -> weight key."""
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(tensor: torch.Tensor, symbolic: bool) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if symbolic and d == 0 else DimDynamic.STATIC for d in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, symbolic_context=context)

    fakes = [fake(t, False) for t in weights.values()]
    traced = make_fx(
        lambda *args: tuple(compute(dict(zip(weights, args[: len(weights)], strict=True)), *args[len(weights) :])),
        decomposition_table=select_decomp_table(),
    )(*fakes, *(fake(t, dynamic) for t in inputs))
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, (attribute, value) in zip(placeholders, weights.items(), strict=False):
        traced.register_buffer(attribute, value)
        with traced.graph.inserting_after(placeholders[-1]):
            read = traced.graph.get_attr(attribute)
        read.meta = dict(node.meta)
        node.replace_all_uses_with(read)
        traced.graph.erase_node(node)
    for node in traced.graph.find_nodes(op="get_attr"):
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    keys = {attribute: ((ties or {}).get(attribute, attribute), value) for attribute, value in weights.items()}
    return Graph(name, traced, (), (), keys, len(traced.graph.nodes)), mode


def run(artifact: Artifact, weights: Weights, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Binds ``weights``, by weight key, and calls the library."""
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(artifact.library), 1)
    runner.update_constant_buffer({name: weights[key] for name, key in artifact.constants.items()}, False, True, True)
    return runner.run(list(inputs))


def eager(graph: Graph, weights: Weights, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    module = torch.fx.GraphModule(graph.module, graph.module.graph)
    for attribute, (key, _) in graph.constants.items():
        module.register_buffer(attribute, weights[key])
    return module(*inputs)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own, but for the precompiled headers, which take 20 s to build."""
    root = tmp_path_factory.mktemp("cache")
    shared = compile_cache.cache_root() / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    (root / "shared").symlink_to(shared)
    return root


def layer(w: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """A layer norm, a tie, a bias of 3, a 0-d factor, and running statistics that are updated in place."""
    h = torch.nn.functional.layer_norm(x, (8,), w["scale"], w["shift"]) @ w["matrix"] + w["bias"]
    g = h @ w["tied"].t() * w["factor"] + torch.ones_like(w["scale"])
    w["mean"].copy_(w["mean"] * 0.9 + x.mean(0) * 0.1)
    w["steps"].copy_(w["steps"] + 1)
    return [h.relu(), g.sin().sum(), x * w["scale"]]


def weights(fill: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    shapes = {"scale": (8,), "shift": (8,), "matrix": (8, 3), "bias": (3,), "factor": (), "mean": (8,)}
    return {name: fill(shape) for name, shape in shapes.items()} | {"steps": torch.zeros((), dtype=torch.int64)}


def tied(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return values | {"tied": values["matrix"]}


LAYER_INPUT = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def captured_layer(fill: Callable[..., torch.Tensor], rows: int = 5) -> Captured:
    return capture(layer, [LAYER_INPUT[:1].repeat(rows, 1)], tied(weights(fill)), dynamic=True, ties={"tied": "matrix"})


@pytest.fixture(scope="module")
def compiled(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The layer, captured with all weights at one and again at zero."""
    out: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AOT_BACKWARD_CACHE", str(cache))
        for fill in (torch.ones, torch.zeros):
            graph, mode = captured_layer(fill)
            key = aoti._key(graph, mode, "cpu")
            folder = tmp_path_factory.mktemp(fill.__name__)
            out[fill.__name__] = graph, aoti.compile_graphs([graph], folder=folder, fake_mode=mode)[graph.name], key
    return out


def test_new_weights_reach_the_code(compiled: dict[str, Any]) -> None:
    for graph, artifact, _ in compiled.values():
        assert set(artifact.constants.values()) == {"scale", "shift", "matrix", "bias", "factor", "mean", "steps"}
        for rows in (5, 9):
            torch.manual_seed(rows)
            ours, theirs, x = weights(torch.randn), {}, torch.randn(rows, 8)
            theirs = {name: value.clone() for name, value in ours.items()}
            for mine, reference in zip(run(artifact, ours, x), eager(graph, theirs, x), strict=True):
                torch.testing.assert_close(mine, reference)
            assert ours["steps"] == 1
            for name, value in theirs.items():  # buffers are updated in the caller's tensors
                torch.testing.assert_close(ours[name], value)

"""Converts a graph captured on fake CPU tensors to CUDA tensors: device arguments, values, attention, the results'
strides."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..fx_splice import spliced, with_strides
from ..graph import Graph
from . import attention
from .devices import Device

_CPU_ONLY = ("mkldnn.", "mkl.", "aten.mkldnn_")


def retarget(graph: Graph, fake_mode: Any, device: Device, onto: torch.device = torch.device("cuda:0")) -> Graph:  # noqa: B008
    """Return ``graph``, captured on the CPU, on CUDA tensors for ``device``; attention uses GPU kernels.

    Call it within :func:`.cross_compile.crossing`."""
    module = GraphModule(graph.module, copy.deepcopy(graph.module.graph))

    def moved(value: Any) -> Any:
        return (
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=onto)
            if isinstance(value, torch.Tensor)
            else value
        )

    values: dict[Node, Any] = {}
    constants, attention_nodes = {}, []
    with fake_mode, torch.no_grad(), torch_api.enable_python_dispatcher():
        for node in list(module.graph.nodes):
            if node.op == "placeholder":
                node.meta["val"] = moved(node.meta["val"])
            elif node.op == "get_attr":
                key, tensor = graph.constants[str(node.target)]
                node.meta["val"] = moved(tensor)
                constants[str(node.target)] = (key, node.meta["val"])
            elif node.target in (attention.FORWARD, attention.BACKWARD):
                attention.replace(node, values, (device.major, device.minor))
                attention_nodes.append(node)
                continue
            elif node.op == "call_function":
                if node.kwargs.get("device") is not None:
                    node.kwargs = {**node.kwargs, "device": onto}
                if node.target is torch.ops.prims.device_put.default:
                    node.args = (node.args[0], onto, *node.args[2:])
                if str(node.target).startswith(_CPU_ONLY):
                    raise ExportError(
                        f"{graph.name}: {node.target} is a CPU-only operator, and has no counterpart on a GPU yet"
                    )
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                node.meta["val"] = node.target(*args, **kwargs)
            values[node] = node.meta.get("val")
    for node in attention_nodes:
        for old_node in (*node.users, node):
            module.graph.erase_node(old_node)
    _restore_strides(graph, module, values, fake_mode)
    for name, (_, tensor) in constants.items():
        delattr(module, name)
        module.register_buffer(name, tensor)
    module.recompile()
    return dataclasses.replace(graph, module=module, constants=constants)


def _restore_strides(graph: Graph, module: GraphModule, values: dict[Node, Any], fake_mode: Any) -> None:
    """Copy results that have other strides on a GPU: strides are part of the package's contract."""
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    for i, (before, after) in enumerate(zip(_results(graph.module), results, strict=True)):
        if not isinstance(after, Node) or (expected := before.meta["val"]).stride() == values[after].stride():
            continue
        with fake_mode:
            (results[i],), new_values = spliced(output, functools.partial(_copied, expected), [after], values)
        values |= new_values
        if values[results[i]].stride() != expected.stride():
            raise ExportError(
                f"{graph.name}: {after.target}: expected strides {list(expected.stride())}, as on the CPU, got {list(values[after].stride())} on a "
                "GPU. Make its result contiguous in the program"
            )
    output.args = (tuple(results),)


def _copied(like: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor]:
    return (with_strides(result, like),)


def _results(module: GraphModule) -> list[Any]:
    return list(next(iter(module.graph.find_nodes(op="output"))).args[0])

"""What stands in the way of a capture, in the user's terms: inputs and graphs that are refused, and torch's errors with the line and the way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError

from . import pytrees
from .shapes.narrowed import Narrowed
from .user_code import attribute_writes, source_location


@contextlib.contextmanager
def errors_of_a_trace(program: nn.Module, written: Mapping[str, str]) -> Iterator[None]:
    """A context in which an error becomes an :class:`ExportError` that names the user's line and, where it is known, what to do. ``written``: the
    attributes that the forward has assigned so far, and where."""
    try:
        yield
    except ExportError:
        raise
    except (Narrowed, torch_api.ConstraintViolationError) as error:
        raise ExportError(_violated_constraints(error, program)) from error
    except Exception as error:  # the user's own program ran in there, and may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        first = ". ".join([lines[0], *(line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:")))])  # Dynamo's
        where = source_location.of_error(error, program)
        raise ExportError(
            f"the program could not be traced: {type(error).__name__}: {first}{where and f'; {where}'}{_advice(error, program, written)}"
        ) from error


def _violated_constraints(error: Exception, program: nn.Module) -> str:
    lines = dict.fromkeys(line.strip(" -") for line in str(error).splitlines() if line.lstrip().startswith("- "))
    said = str(error) if isinstance(error, Narrowed) else " ".join(lines) or str(error)  # else torch's own words, each once
    unrolled = [n or "itself" for n, m in program.named_modules() if isinstance(m, nn.RNNBase)]
    return (
        f"the program does not allow the sizes declared in dynamic_shapes: {said}"
        f"{(unrolled and f'. A recurrent layer ({unrolled[0]}) is unrolled: its length must be static, one variant for each') or ''}"
    )


def _advice(error: Exception, program: nn.Module, written: Mapping[str, str]) -> str:
    """What to do about it, where that is known."""
    text, kind = str(error), type(error).__name__
    if kind == "DynamicOutputShapeException":
        return (
            ". PyTorch has no rule for the shape of its result, which no trace can do without: leave this part to eager, before or behind the "
            "package, or make it an operator of your own (torch.library.custom_op with register_fake and register_autograd)"
        )
    if ".numpy() is not supported" in text or "numpy" in text.lower():
        return (
            ". A trace has no numbers to hand to NumPy: write it in PyTorch, or make it an operator of your own (torch.library.custom_op with "
            "register_fake and register_autograd)"
        )
    if "data-dependent" in text or "_local_scalar_dense" in text or kind == "DataDependentOutputException":
        if source_location.passes_through(error, torch.distributions):
            return ". torch.distributions looks at the values that it is given, to raise where they are out of range: pass validate_args=False"
        return (
            ". It decides by the value of a tensor, and Python does not run where the package runs: use torch.where or torch.cond, or pass the value "
            "as a plain argument, one variant for each"
        )
    if "functional graph" in text or "fake buffer" in text:
        if written:
            name, where = next(iter(written.items()))
            return f". The forward changes the attribute {name!r}, {where}: register it as a buffer, and change that in place"
        return f". The forward changes a tensor that is no buffer, one of {attribute_writes.plain_tensors(program)}: register it as a buffer"
    if "autograd formula" in text or "fake impl" in text:
        return ". See torch.library: register_autograd and register_fake say what a trace must know of an operator"
    return ""


def refuse_assigned_buffers(program: nn.Module, written: Mapping[str, str]) -> None:
    buffers = dict(program.named_buffers(remove_duplicate=False))
    for name, where in written.items():
        if name in buffers:
            raise ExportError(
                f"the forward assigns the buffer {name!r} anew, {where}, which a package would not keep: write into it "
                f"(self.{name.rpartition('.')[2]}.copy_(…), .add_(…))"
            )


def refuse_mutations(meta: Any, parameters: Sequence[str], buffers: Sequence[str], inputs: Sequence[str]) -> None:
    """``meta``: AOTAutograd's ``fw_metadata``, whose inputs are parameters, buffers, inputs."""
    state = [*parameters, *buffers]
    for i, info in enumerate(meta.input_info):
        if not (info.mutates_data or info.mutates_metadata):
            continue
        if i >= len(state):
            raise ExportError(f"the forward changes its input {inputs[i - len(state)]!r} in place; clone it first (x = x.clone())")
        if i < len(parameters):
            raise ExportError(f"the forward changes the parameter {state[i]!r} in place; a parameter may only be changed by an optimizer")
        if info.mutates_metadata:
            raise ExportError(f"the forward changes shape or strides of the buffer {state[i]!r}; assign values to it instead")


def refuse_nodes(graph: GraphModule, program: nn.Module) -> None:
    """Operators and constants that no package can hold."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target, None), torch.Tensor) and value.requires_grad:
            name = attribute_writes.name_of(program, value)
            raise ExportError(
                f"the program uses {f'the attribute {name!r}' if name else 'a tensor'}, which requires a gradient and is no parameter: it would get "
                "none. Register it (self.x = nn.Parameter(x)), or close over the module that it belongs to"
            )
        if any(isinstance(a, torch.Generator) for a in [*node.args, *node.kwargs.values()]):
            raise ExportError.of(node.target, f"{node.target} is given a generator of its own, which a package cannot hold: leave out generator=")
        schema: Any = getattr(node.target, "_schema", None)
        own = schema is not None and node.target.namespace not in ("aten", "prims", "prim")
        if own and any(str(r.type) in ("int", "SymInt", "float", "bool") for r in schema.returns):
            raise ExportError.of(
                node.target, f"{node.target} returns a number, and compiled code takes tensors alone from an operator: return a 0-d one"
            )
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype is torch.complex32 and not isinstance(node.meta.get("desc"), torch_api.TangentAOTInput):
            what = node.target if node.op == "call_function" else "an input"
            raise ExportError.of(what, f"{what} is complex32, which a package cannot store: use complex64")


def refuse_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tensors other than plain strided ones, and leaves that are neither tensors nor constants of a package."""
    for path, value in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(value, torch.Tensor):
            name = pytree.keystr(path)
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise ExportError(f"example input {name} is a {type(value).__name__}; a package takes plain tensors")
            if value.layout is not torch.strided:
                raise ExportError(f"example input {name} has layout {value.layout}; a package takes strided tensors")
        else:
            pytrees.constant(value, pytree.keystr(path))

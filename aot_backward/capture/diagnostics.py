"""Report why a capture fails, in the user's terms: refused inputs and graphs, and torch's errors with the user's line
and a remedy."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
def errors_of_a_trace(program: nn.Module, written: Mapping[str, str], run: Callable[[], object]) -> Iterator[None]:
    """Turn errors into an :class:`ExportError` that names the user's line and, if known, a remedy. ``written``: the
    attributes that the forward has assigned so far, with their lines. ``run``: calls the program in eager."""
    try:
        yield
    except ExportError:
        raise
    except (Narrowed, torch_api.ConstraintViolationError) as error:
        raise ExportError(_violated_constraints(error, program)) from error
    except Exception as error:  # the user's program may raise anything
        if reason := refused_control_flow(error):
            where = source_location.of_error(error, program)
            raise ExportError(f"{reason}{where and f'; it is called {where}'}") from error
        if any(text in str(error) for text in _WRITES) and not written:
            raise ExportError(_changed_tensors(error, program, run)) from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # Lines that begin so are from Dynamo
        cause = ". ".join(
            [lines[0], *(line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:")))]
        )
        where = source_location.of_error(error, program)
        raise ExportError(
            f"the program could not be traced: {type(error).__name__}: {cause}{where and f'; {where}'}{_advice(error, program, written, where)}"
        ) from error


def refused_control_flow(error: Exception) -> str:
    """Return why PyTorch refuses a control-flow operator (in eager, too) with a remedy, or "" for any other error."""
    text = str(error)
    match = re.search(r"Higher Order Operator: (?:torch\.ops\.higher_order\.)?(\S+)|call_function (\w+)\(", text)
    files = [
        re.search(r"_higher_order_ops/(\w+)\.py$", frame.f_code.co_filename)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    operators = [file[1] for file in files if file and file[1] not in ("utils", "partitioner")]
    operator = (match[1] or match[2]) if match else operators[-1] if operators else "a control-flow operator"
    if "do not support aliasing" in text:
        return f"a body of {operator} returns one of its inputs, or the same tensor twice, which PyTorch refuses: return a copy (x.clone())"
    if "outs_to_grad length" in text:
        return (
            f"a body of {operator} returns a tensor of integers or booleans, and PyTorch cannot differentiate such an operator. Return it as floats "
            "(x.to(torch.float32)), or compute it from the results"
        )
    if "must be tensors for stack_output" in text:
        return f"{operator} carries a Python number, and PyTorch cannot differentiate this. Carry a 0-d tensor instead (torch.tensor(0))"
    return ""


_UNROLLED = (
    "it can be dynamic in float32 and float64 on a CPU, from torch 2.13 on, but not in packed sequences; otherwise export "
    "a variant per length"
)


def _violated_constraints(error: Exception, program: nn.Module) -> str:
    lines = dict.fromkeys(line.strip(" -") for line in str(error).splitlines() if line.lstrip().startswith("- "))
    # Each line of torch's message once
    message = str(error) if isinstance(error, Narrowed) else _plain(" ".join(lines) or str(error))
    recurrent = [n or "the module itself" for n, m in program.named_modules() if isinstance(m, nn.RNNBase)]
    return (
        f"the program does not allow the sizes declared in dynamic_shapes: {message}"
        f"{(recurrent and f'. If the length of a recurrent layer ({recurrent[0]}) is among them: {_UNROLLED}') or ''}"
    )


def _plain(message: str) -> str:
    """Return torch's message without its advice on ``mark_dynamic``, which no caller of ours uses."""
    fixed = r"You marked (\S+) as dynamic but your code specialized it to be a constant \((\d+)\)\.( If you're using mark_dynamic.*?Dim\.AUTO\.)?"
    return re.sub(
        fixed,
        r"\1 is declared to be dynamic, and the program is valid only for \2. Export a variant for each size.",
        message,
    )


_WRITES = ("functional graph", "fake buffer", "non-functional tensor")
"""Parts of torch's messages if a traced program writes to a tensor that is not an input, parameter or buffer."""


def _changed_tensors(error: Exception, program: nn.Module, run: Callable[[], object]) -> str:
    names, place = attribute_writes.changed_by(run, program, error)
    where = source_location.of_error(error, program) or place
    description = " and ".join(names) or "a tensor"
    return (
        f"the forward changes {description} in place{where and f', {where}'}: expected a buffer, got a plain tensor, which a package would not keep. "
        'Register it as a buffer (self.register_buffer("mean", …)), and change that in place'
    )


def _advice(error: Exception, program: nn.Module, written: Mapping[str, str], where: str) -> str:
    """Return a remedy, or "" if none is known."""
    text, kind = str(error), type(error).__name__
    if kind == "DynamicOutputShapeException":
        return (
            ". PyTorch has no rule for the shape of its result, and tracing needs one. Run this part in eager, before or after the package, or make "
            "it a custom operator (torch.library.custom_op with register_fake and register_autograd)"
        )
    if ".numpy() is not supported" in text or "numpy" in text.lower():
        return (
            ". Tensors have no values while they are traced, and NumPy needs them. Write it in PyTorch, or make it a custom operator "
            "(torch.library.custom_op with register_fake and register_autograd)"
        )
    modules = source_location.packages_of(error)
    if "data-dependent" in text or "_local_scalar_dense" in text or kind == "DataDependentOutputException":
        if source_location.passes_through(error, torch.distributions):
            return ". torch.distributions checks the range of its arguments' values, and a trace has no values: pass validate_args=False"
        if _SIZE_BY_VALUE.search(where):
            note = " (torch_geometric takes it as dim_size, in global pooling as size, elsewhere as batch_size)" * (
                "torch_geometric" in modules
            )
            return f". It turns tensor values into a Python number. If this is a size, pass it as an argument{note}, with one variant for each size"
        return (
            ". It reads the value of a tensor in Python, and a package runs no Python. Use torch.where or torch.cond, or pass the value as a plain "
            "argument, with one variant for each value"
        )
    if any(part in text for part in _WRITES):
        name, place = next(iter(written.items()))
        return (
            f". The forward changes the attribute {name!r}, {place}: register it as a buffer, and change that in place"
        )
    if "autograd formula" in text or "fake impl" in text:
        return ". Tracing needs the operator's register_autograd and register_fake (see torch.library)"
    return ""


_SIZE_BY_VALUE = re.compile(r":\d+: (?!(if|elif|while|assert)\b).*(\bint\(|\.item\(\)|\.tolist\(\))")
"""Matches a line such as ``count = int(index.max()) + 1``, in the form of :mod:`.source_location`."""


def refuse_assigned_buffers(program: nn.Module, written: Mapping[str, str]) -> None:
    """Refuse assignments of new tensors to buffers. ``written``: as in :func:`errors_of_a_trace`."""
    buffers = dict(program.named_buffers(remove_duplicate=False))
    for name, where in written.items():
        if name in buffers:
            raise ExportError(
                f"the forward assigns a new tensor to the buffer {name!r}, {where}, and a package would not keep it. Write into the buffer instead "
                f"(self.{name.rpartition('.')[2]}.copy_(…), .add_(…))"
            )


def refuse_mutations(meta: Any, parameters: Sequence[str], buffers: Sequence[str], inputs: Sequence[str]) -> None:
    """Refuse in-place changes that a package cannot make. ``meta``: AOTAutograd's ``fw_metadata``; its inputs are
    parameters, buffers, inputs."""
    state = [*parameters, *buffers]
    for i, info in enumerate(meta.input_info):
        if not (info.mutates_data or info.mutates_metadata):
            continue
        if i >= len(state):
            raise ExportError(
                f"the forward changes its input {inputs[i - len(state)]!r} in place; clone it first (x = x.clone())"
            )
        if i < len(parameters):
            raise ExportError(
                f"the forward changes the parameter {state[i]!r} in place; a parameter may only be changed by an optimizer"
            )
        if info.mutates_metadata:
            raise ExportError(
                f"the forward changes shape or strides of the buffer {state[i]!r}; assign values to it instead"
            )


def refuse_nodes(graph: GraphModule, program: nn.Module) -> None:
    """Refuse operators and constants that no package can hold."""
    for node in graph.graph.nodes:
        if (
            node.op == "get_attr"
            and isinstance(value := getattr(graph, node.target, None), torch.Tensor)
            and value.requires_grad
        ):
            name = attribute_writes.name_of(program, value)
            raise ExportError(
                f"the program uses {f'the attribute {name!r}' if name else 'a tensor'}, which requires a gradient but is not a parameter: it would "
                "get no gradient. Register it (self.x = nn.Parameter(x)), or close over the module that it belongs to"
            )
        if any(isinstance(a, torch.Generator) for a in [*node.args, *node.kwargs.values()]):
            raise ExportError.of(
                node.target,
                f"{node.target}: expected the default generator, got another one, which a package cannot store. Omit generator=",
            )
        schema: Any = getattr(node.target, "_schema", None)
        is_custom = schema is not None and node.target.namespace not in ("aten", "prims", "prim")
        if is_custom and any(str(r.type) in ("int", "SymInt", "float", "bool") for r in schema.returns):
            raise ExportError.of(
                node.target,
                f"{node.target} returns a number, and compiled code accepts only tensors from an operator: return a 0-d tensor",
            )
        value = node.meta.get("val")
        if (
            isinstance(value, torch.Tensor)
            and value.dtype is torch.complex32
            and not isinstance(node.meta.get("desc"), torch_api.TangentAOTInput)
        ):
            subject = node.target if node.op == "call_function" else "an input"
            raise ExportError.of(subject, f"{subject} is complex32, which a package cannot store: use complex64")


def refuse_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tensors other than plain strided ones, and leaves that are neither tensors nor constants of a package."""
    for path, value in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(value, torch.Tensor):
            name = pytree.keystr(path)
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise ExportError(f"example input {name} is a {type(value).__name__}; a package takes plain tensors")
            if value.layout is not torch.strided:
                raise ExportError(f"example input {name} has layout {value.layout}; a package takes strided tensors")
        else:
            pytrees.constant(value, pytree.keystr(path))

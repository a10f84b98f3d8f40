"""A module or a function, with example inputs, to its joint graph: forward and backward in one functional ATen graph.

The trace is ``aot_export_joint_with_descriptors`` on the module itself, so that custom backwards, hooks inside the forward, autocast and
checkpointing are seen by real autograd. Descriptors, never order or names, say which placeholder is which parameter, buffer, input or
cotangent, and which output is whose gradient. ``split.py`` makes of it the graphs that are compiled.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Ambient, Shared, Tree

from .. import torch_api
from ..process_state import without_convolution_libraries
from . import layer_patches, preserve, pytrees
from .ambient import current_ambient
from .shapes import dynamic_shapes as spellings
from .shapes import output_aliasing
from .shapes.symbolic_shapes import Sizes, expression_of, write
from .user_code import attribute_writes, hooks, source_lines, source_location

INNER = "program"  # the attribute of Wrapper below which the person's module hangs
_PREFIX = INNER + "."


@dataclass(frozen=True)
class Joint:
    """One traced program.

    ``placeholders``: node name -> ("parameter", name), ("buffer", name), ("input", I) or ("cotangent", J of the flat outputs).
    ``outputs``: per flat output its node, ("input", I), ("state", name), or None for a constant.
    ``gradients``: ("parameter", name) or ("input", I) -> node, or None where the true gradient is None.
    """

    graph: torch.fx.GraphModule
    fake_mode: Any
    sizes: Sizes
    placeholders: dict[str, tuple[str, Any]]
    outputs: tuple[Any, ...]
    output_requires_grad: tuple[bool, ...]
    forward_values: int  # how many leading outputs of the graph are the forward's
    gradients: dict[tuple[str, Any], Any]
    gradient_slots: tuple[Any, ...]  # what each of the graph's outputs after the forward's is the gradient of; None where of nothing
    cotangents: tuple[int, ...]  # the flat outputs that get an incoming gradient
    cotangent_values: tuple[torch.Tensor, ...]  # fake
    inputs: tuple[torch.Tensor, ...]  # fake, flat
    state: dict[str, torch.Tensor]  # the program's parameters and buffers, ties under each name
    input_names: tuple[str, ...]
    argument_names: tuple[str, ...]
    in_tree: Tree
    out_tree: Tree
    ambient: Ambient
    trace_inputs: Any
    hooks: Mapping[str, tuple[Callable[..., Any], ...]] = field(default_factory=dict)  # on gradients, by the parameter's first name
    shared: tuple[Shared, ...] = ()

    @property
    def has_backward(self) -> bool:
        return bool(self.cotangents)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """``cotangents``, counted among the outputs that are tensors."""
        position = {leaf: n for n, leaf in enumerate(i for i, o in enumerate(self.outputs) if o is not None)}
        return tuple(position[leaf] for leaf in self.cotangents)


class Wrapper(nn.Module):
    """The program as a function of its flat tensors; other arguments are fixed (the tracer would make symbols of integers).

    Outputs that share memory with an input or with each other get memory of their own: a graph compiled to native code cannot hand autograd
    a view of something outside it.
    """

    def __init__(self, program: nn.Module, arguments: tuple[Any, ...], copied: frozenset[int], first_only: bool):
        """``arguments``: the fake ``(args, kwargs)``."""
        super().__init__()
        self.program, self.copied, self.first_only = program, copied, first_only
        self.flat, self.spec = pytree.tree_flatten(arguments)
        self.places: dict[int, output_aliasing.Place] = {}  # where the flat outputs lay before they were copied
        self.constants: dict[int, Any] = {}  # flat outputs that are no tensors, as they were (the traced graph makes True a 1)

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(v, torch.Tensor) else v for v in self.flat], self.spec)
        flat, spec = pytree.tree_flatten(self.program(*args, **kwargs))
        self.constants = {i: v for i, v in enumerate(flat) if not isinstance(v, torch.Tensor)}
        self.places = output_aliasing.places(flat, (*tensors, *state_of(self.program).values()))
        for i, value in enumerate(flat):
            if i in self.copied:
                value = value.clone()
            if self.first_only and i and isinstance(value, torch.Tensor) and value.requires_grad:
                value = value.detach()
            flat[i] = value
        return pytree.tree_unflatten(flat, spec)


class FunctionModule(nn.Module):
    """A plain function as a module. Modules that it closes over become its submodules, so that their parameters have names."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function
        for name, value in _reached(function).items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)
            elif any(isinstance(v, nn.Module) or (isinstance(v, torch.Tensor) and v.requires_grad) for v in pytree.tree_leaves(value)):
                raise ExportError(
                    f"the function closes over {name!r}, whose tensors require gradients and would become constants; close over the module that they "
                    f"belong to, or pass them as arguments"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _reached(function: Callable[..., Any]) -> dict[str, Any]:
    if isinstance(function, type) or not callable(function):
        raise ExportError(f"{function!r} is not a function or module")
    out: dict[str, Any] = {}
    owner = getattr(function, "__self__", None)  # a bound method's object
    if isinstance(owner, nn.Module):
        out["self"] = owner
    code = inspect.unwrap(function)
    if inspect.isfunction(code) or inspect.ismethod(code):
        found = inspect.getclosurevars(code)
        loaded = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}  # getclosurevars takes attributes for globals, too
        out.update({n: v for n, v in found.globals.items() if n in loaded} | dict(found.nonlocals))
    return out


def trace(
    program: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    signature: Callable[..., Any],
    kind: str = "module",
    first_only: bool = False,
) -> Joint:
    """``program`` traced on ``args`` and ``kwargs`` (real tensors; which of them need gradients is read off them). ``kind``: of the entry.

    ``first_only``: only the first output is differentiated; the others are carried along.
    A dynamic size is first traced without assuming that it is at least 2, so that a batch of 1 is served where the program allows it.
    Raises :class:`ExportError` where the gradients could not be had rightly, naming what stands in the way.
    """
    _check_inputs(args, kwargs)
    with attribute_writes.noted(program) as written:
        try:
            with preserve.slots_kept(program), hooks.traced(program), _no_draws():
                on_parameters = hooks.of_parameters(program, kind)
                try:
                    joint = _trace_until_settled(program, args, kwargs, dynamic_shapes, signature, first_only)
                except torch_api.Unsupported:
                    # what torch.cond and its like compiled when they ran in eager before is in the way of tracing them; it is made again when needed
                    torch.compiler.reset()
                    joint = _trace_until_settled(program, args, kwargs, dynamic_shapes, signature, first_only)
        except ExportError:
            raise
        except torch_api.ConstraintViolationError as error:
            reasons = [line.strip(" -") for line in str(error).splitlines() if line.lstrip().startswith("- ")]
            reasons = [_SPECIALISED.sub(_specialised, reason) for reason in reasons]
            unrolled = [n or "itself" for n, m in program.named_modules() if isinstance(m, nn.RNNBase)]
            raise ExportError(
                f"the program does not allow the sizes declared in dynamic_shapes: {' '.join(reasons) or error}"
                f"{(unrolled and f'. A recurrent layer ({unrolled[0]}) is unrolled: its length must be static, one variant for each') or ''}"
            ) from error
        except Exception as error:  # the person's own program ran in there, and may raise anything
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            first = ". ".join([lines[0], *(line for line in lines[1:] if line.startswith(("Explanation:", "Developer debug context:")))])  # Dynamo's
            where = source_location.of_error(error, program)
            raise ExportError(
                f"the program could not be traced: {type(error).__name__}: {first}{where and f'; {where}'}{_advice(error, program, written)}"
            ) from error
        for name, where in written.items():
            if name in dict(program.named_buffers(remove_duplicate=False)):
                raise ExportError(
                    f"the forward assigns the buffer {name!r} anew, {where}, which a package would not keep: write into it "
                    f"(self.{name.rpartition('.')[2]}.copy_(…), .add_(…))"
                )
    return replace(joint, hooks=on_parameters)


_SPECIALISED = re.compile(r"You marked L\['(.+)\.size\(\)\[(\d+)\] as dynamic but your code specialized it to be a constant \((\d+)\)\..*")


def _specialised(match: re.Match[str]) -> str:
    place = f"{match[1].replace(chr(39) + ']', '', 1)}.shape[{match[2]}]"
    return (
        f"{place} is Dim.DYNAMIC, and the program, where it looks at that size, holds for {match[3]} alone (guard: {place} == {match[3]}): say "
        "Dim.AUTO or Dim.STATIC there, or export a variant for each size"
    )


@contextlib.contextmanager
def _no_draws() -> Iterator[None]:
    """Refuses a program that draws random numbers which a trace does not see; the generators are put back."""
    numpy: Any = sys.modules.get("numpy")
    before, numpys = random.getstate(), numpy and numpy.random.get_state(legacy=False)
    yield
    drew = ["random"] if random.getstate() != before else []
    if numpy and any(numpy.any(a != b) for a, b in zip(*(_leaves(s) for s in (numpys, numpy.random.get_state(legacy=False))), strict=True)):
        drew.append("numpy.random")
        numpy.random.set_state(numpys)
    random.setstate(before)
    if drew:
        raise ExportError(
            f"the forward draws numbers with Python's {drew[0]}, and a package would have the same ones at every call: draw them with torch, or "
            "outside, and pass them as a tensor"
        )


def _leaves(state: Any) -> list[Any]:
    return [*state["state"].values(), state["has_gauss"], state["gauss"]]


def _advice(error: Exception, program: nn.Module, written: dict[str, str]) -> str:
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
        return (
            ". It decides by the value of a tensor, and Python does not run where the package runs: use torch.where or torch.cond, or pass the value "
            "as a plain argument, one variant for each"
        )
    if "functional graph" in text or "fake buffer" in text:
        if written:
            name, where = next(iter(written.items()))
            return f". The forward changes the attribute {name!r}, {where}: register it as a buffer, and change that in place"
        return f". The forward changes a tensor that is no buffer, one of {attribute_writes.plain(program)}: register it as a buffer"
    if "autograd formula" in text or "fake impl" in text:
        return ". See torch.library: register_autograd and register_fake say what a trace must know of an operator"
    return ""


def _trace_until_settled(
    program: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, signature: Callable[..., Any], first_only: bool
) -> Joint:
    copied: frozenset[int] = frozenset()
    oblivious = dynamic_shapes is not None
    while True:
        try:
            with torch_api.symbolic_shapes_config.patch(backed_size_oblivious=oblivious):
                joint, views = _trace_once(program, args, kwargs, dynamic_shapes, signature, copied, first_only)
        except (torch_api.ConstraintViolationError, torch_api.GuardOnDataDependentSymNode):
            if not oblivious:
                raise
            oblivious = False  # the program treats a size of 1 otherwise: serve 2 and more
            continue
        if joint is not None:
            return joint
        if copied >= views:
            raise ExportError(f"outputs {sorted(views)} still share memory with an input after being copied")
        copied |= views  # again, with copies of the outputs that turned out to be views


def _trace_once(
    program: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    signature: Callable[..., Any],
    copied: frozenset[int],
    first_only: bool,
) -> tuple[Joint | None, frozenset[int]]:
    names, argument_names = pytrees.input_names(signature, args, kwargs)
    owner = _SignatureOwner(signature)
    labels = _labels(owner, args, kwargs, dynamic_shapes)
    fake_mode, fake_args, fake_kwargs, equalities, original, shapes = torch_api.make_fake_inputs(owner, args, kwargs, dynamic_shapes)
    wrapper = Wrapper(program, (fake_args, fake_kwargs), copied, first_only)
    inputs = tuple(v for v in wrapper.flat if isinstance(v, torch.Tensor))
    tensor_names = tuple(n for n, v in zip(names, wrapper.flat, strict=True) if isinstance(v, torch.Tensor))

    for number, dim, hint in spellings.given(dynamic_shapes, signature, args, kwargs):
        if spellings.is_hint(hint):
            # torch.export 2.13 does not look at the bounds of a hint: a comparison makes each a guard, which narrows the symbol's range
            size = inputs[number].shape[dim]
            if not ((hint.min is None or size >= hint.min) and (hint.max is None or size <= hint.max)):
                raise ExportError(f"{tensor_names[number]}.shape[{dim}] of the example is {size}, not within {hint!r}")

    def settle(graph: torch.fx.GraphModule) -> Sizes:
        # raises where the trace narrowed a declared size; may also put one symbol for another, so sizes are read off afterwards
        torch_api.produce_guards_and_solve_constraints(fake_mode, graph, shapes, equalities, original)
        fake_mode.shape_env.frozen = False  # the partitioner's and the compiler's guards are still to come
        return Sizes.of_inputs(fake_mode.shape_env, inputs, labels)

    ambient = current_ambient(_device(args, kwargs, program))
    about = Described(fake_mode, ambient, tensor_names, argument_names, _in_tree(args, kwargs))
    required = [t.requires_grad for t in inputs]
    traced, views = joint_of(wrapper, inputs, about, settle)
    for i, name in enumerate(tensor_names):
        if traced is not None and ("input", i) in traced.gradients and not required[i]:
            raise ExportError(
                f"the forward calls requires_grad_() on its input {name!r}, which changes the caller's tensor; write {name} = "
                f"{name}.detach().requires_grad_(), or export with an example that requires a gradient"
            )
    if traced is not None:
        traced = replace(traced, shared=output_aliasing.shared(wrapper.places, traced.outputs, traced.output_requires_grad, traced.sizes))
    return traced, views


@dataclass(frozen=True)
class Described:
    """What a joint graph's trace does not say itself."""

    fake_mode: Any
    ambient: Ambient
    input_names: tuple[str, ...]
    argument_names: tuple[str, ...]
    in_tree: Tree


def joint_of(
    wrapper: Wrapper, inputs: tuple[torch.Tensor, ...], about: Described, settle: Callable[[torch.fx.GraphModule], Sizes]
) -> tuple[Joint | None, frozenset[int]]:
    """The joint graph of ``wrapper`` on fake ``inputs``; or None, and the outputs that it must copy. ``settle``: the sizes, once it is traced."""
    program = wrapper.program
    with contextlib.ExitStack() as stack, torch.enable_grad(), tracing():
        with source_lines.noted(program, Wrapper.forward.__code__):
            described = torch_api.aot_export_joint_with_descriptors(
                stack, wrapper, inputs, decompositions=decompositions(), keep_inference_input_mutations=True
            )
        source_lines.spread(described._aot_graph_capture.graph_module)
        captured, state = described._aot_graph_capture, described._aot_state
        graph, meta = captured.graph_module, state.fw_metadata
        parameters = [_strip(n) for n in described.params_spec]
        buffers = [_strip(n) for n in described.buffers_spec]
        _refuse_mutations(meta, parameters, buffers, about.input_names)
        _refuse_nodes(graph, wrapper)

        aliases = torch_api.OutputType
        views = frozenset(
            i for i, o in enumerate(meta.output_info) if o.output_type not in (aliases.non_alias, aliases.unsafe_view_alias, aliases.is_input)
        ) | _repeats(graph, meta)
        if views:
            return None, views
        sizes = settle(graph)

        placeholders: dict[str, tuple[str, Any]] = {}
        for node in graph.graph.find_nodes(op="placeholder"):
            placeholders[node.name] = _placeholder(node.meta["desc"])
        output_node = next(iter(graph.graph.find_nodes(op="output")))
        results = list(pytree.tree_leaves(output_node.args[0]))
        described_results = list(output_node.meta["desc"])
        if len(results) != len(described_results):  # None leaves would shift one against the other
            results = list(pytree.tree_flatten(output_node.args[0], is_leaf=lambda v: v is None)[0])

        count = len(meta.mutated_inp_runtime_indices) + meta.num_outputs + meta.num_intermediate_bases + meta.num_outputs_rng_offset
        first = len(meta.mutated_inp_runtime_indices)
        outputs: list[Any] = []
        for i, info in enumerate(meta.output_info):
            value = results[first + i]
            if info.output_type is aliases.is_input:
                outputs.append(_returned_input(info.base_idx, parameters, buffers))
            else:
                outputs.append(value if isinstance(value, torch.fx.Node) and isinstance(value.meta["val"], torch.Tensor) else None)
        gradients: dict[tuple[str, Any], Any] = {}
        slots: list[tuple[str, Any] | None] = []
        for value, descriptor in zip(results[count:], described_results[count:], strict=True):
            target = _placeholder(descriptor.grad_of) if isinstance(descriptor, torch_api.GradAOTOutput) else None
            slots.append(target)
            if target is not None:
                gradients[target] = value if isinstance(value, torch.fx.Node) else None

        joint = Joint(
            graph=graph,
            fake_mode=about.fake_mode,
            sizes=sizes,
            placeholders=placeholders,
            outputs=tuple(outputs),
            output_requires_grad=tuple(bool(o.requires_grad) for o in meta.output_info),
            forward_values=count,
            gradients=gradients,
            gradient_slots=tuple(slots),
            cotangents=tuple(index for kind, index in placeholders.values() if kind == "cotangent"),
            cotangent_values=tuple(n.meta["val"] for n in graph.graph.find_nodes(op="placeholder") if placeholders[n.name][0] == "cotangent"),
            inputs=inputs,
            state=state_of(program),
            input_names=about.input_names,
            argument_names=about.argument_names,
            in_tree=about.in_tree,
            out_tree=_out_tree(described.out_spec, results[first : first + meta.num_outputs], outputs, wrapper.constants, sizes),
            ambient=about.ambient,
            trace_inputs=captured.updated_flat_args,
        )
    return joint, frozenset()


def _repeats(graph: torch.fx.GraphModule, meta: Any) -> frozenset[int]:
    """Outputs that are the same value as an earlier one: autograd could not tell their incoming gradients apart."""
    flat = pytree.tree_flatten(next(iter(graph.graph.find_nodes(op="output"))).args[0], is_leaf=lambda v: v is None)[0]
    first = len(meta.mutated_inp_runtime_indices)
    seen: set[Any] = set()
    out = set()
    for i, (value, info) in enumerate(zip(flat[first : first + meta.num_outputs], meta.output_info, strict=True)):
        if isinstance(value, torch.fx.Node) and info.output_type is not torch_api.OutputType.is_input:
            if value in seen:
                out.add(i)
            seen.add(value)
    return frozenset(out)


class _SignatureOwner(nn.Module):
    """What ``make_fake_inputs`` asks for: something with a ``forward`` whose signature names the arguments."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        code = inspect.unwrap(function)
        self.forward = function if hasattr(code, "__code__") else (lambda *args, **kwargs: function(*args, **kwargs))


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Libraries take their traceable paths, and recurrent layers are traced as plain operators (oneDNN's fused ones have no formula to trace)."""
    with (
        without_convolution_libraries(),
        warnings.catch_warnings(),
        torch_api._compiling_state_context(),
        _checks_as_plain_operators(),
        layer_patches.traceable_layers(),
    ):
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it, for torch.cond
        yield


@contextlib.contextmanager
def _checks_as_plain_operators() -> Iterator[None]:
    """Within, the check by which linear algebra raises for a singular matrix is a node like any other, which nothing removes.

    torch 2.13 threads it through the graph by tokens, as further inputs and outputs of it.
    """
    aten = torch.ops.aten
    check = aten._linalg_check_errors.default
    effect = torch_api._get_effect(check) if torch_api.minor() == "2.13" else None
    if effect is None:
        yield
        return
    torch_api.has_side_effect(check)
    torch_api._register_effectful_op(check, None)
    try:
        yield
    finally:
        torch_api._register_effectful_op(check, effect)


_DECOMPOSITIONS: dict[Any, Any] = {}


def decompositions() -> dict[Any, Any]:
    """Inductor's table as it is with ``fallback_random`` (without ``native_dropout``: its masks are then eager's to the bit), without the
    matrix products, which it decomposes by size: that would guard a dynamic batch into a corner (``batch <= 16``), and without the pooling
    that eager's own kernels do faster (``aoti.KERNELS``)."""
    if not _DECOMPOSITIONS:
        _ = torch_api.partition_fn  # brings in the lowerings, which some decompositions look up
        with torch_api.inductor_config.patch(fallback_random=True):
            _DECOMPOSITIONS.update(torch_api.select_decomp_table())
        aten = torch.ops.aten
        products = (aten.mm.default, aten.bmm.default, aten.addmm.default)
        pooling = (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
        for operator in (aten.native_dropout.default, *products, *pooling):
            _DECOMPOSITIONS.pop(operator, None)
        _DECOMPOSITIONS[aten._efficientzerotensor.default] = _zeros  # the gradient of sgn: native code would return it without memory
    return _DECOMPOSITIONS


def _zeros(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> torch.Tensor:
    return torch.full(size, 0, dtype=dtype, device=device)


def forward_of(program: nn.Module) -> Callable[..., Any]:
    """The function whose signature names the program's arguments."""
    return program.function if isinstance(program, FunctionModule) else program.forward


def state_of(program: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; a tied tensor under each of its names."""
    return dict(program.named_parameters(remove_duplicate=False)) | dict(program.named_buffers(remove_duplicate=False))


def _device(args: Any, kwargs: Any, program: nn.Module) -> str:
    for value in [*pytree.tree_leaves((args, kwargs)), *program.parameters()]:
        if isinstance(value, torch.Tensor):
            return value.device.type
    return "cpu"


def _strip(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _placeholder(descriptor: Any) -> tuple[str, Any]:
    if isinstance(descriptor, torch_api.ParamAOTInput):
        return "parameter", _strip(descriptor.target)
    if isinstance(descriptor, torch_api.BufferAOTInput):
        return "buffer", _strip(descriptor.target)
    if isinstance(descriptor, torch_api.PlainAOTInput):
        return "input", descriptor.idx
    if isinstance(descriptor, torch_api.TangentAOTInput) and isinstance(descriptor.output, torch_api.PlainAOTOutput):
        return "cotangent", descriptor.output.idx
    raise ExportError(f"the trace needs an input of a kind that a package does not know: {descriptor}")


def _returned_input(base: int, parameters: list[str], buffers: list[str]) -> tuple[str, Any]:
    state = [*parameters, *buffers]
    return ("state", state[base]) if base < len(state) else ("input", base - len(state))


def _refuse_mutations(meta: Any, parameters: list[str], buffers: list[str], names: tuple[str, ...]) -> None:
    state = [*parameters, *buffers]
    for i, info in enumerate(meta.input_info):
        if not (info.mutates_data or info.mutates_metadata):
            continue
        if i >= len(state):
            raise ExportError(f"the forward changes its input {names[i - len(state)]!r} in place; clone it first (x = x.clone())")
        if i < len(parameters):
            raise ExportError(f"the forward changes the parameter {state[i]!r} in place; a parameter may only be changed by an optimizer")
        if info.mutates_metadata:
            raise ExportError(f"the forward changes shape or strides of the buffer {state[i]!r}; assign values to it instead")


def _refuse_nodes(graph: torch.fx.GraphModule, wrapper: Wrapper) -> None:
    """Operators and constants that no package can hold."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(value := getattr(graph, node.target, None), torch.Tensor) and value.requires_grad:
            name = attribute_writes.name_of(wrapper.program, value)
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


def _check_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for path, value in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(value, torch.Tensor):
            name = pytree.keystr(path)
            if type(value) not in (torch.Tensor, nn.Parameter):
                raise ExportError(f"example input {name} is a {type(value).__name__}; a package takes plain tensors")
            if value.layout is not torch.strided:
                raise ExportError(f"example input {name} has layout {value.layout}; a package takes strided tensors")
        else:
            pytrees.constant(value, pytree.keystr(path))


def _in_tree(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    count = iter(range(1 << 30))

    def leaf(value: Any, path: str) -> Tree:
        return Tree("tensor", index=next(count)) if isinstance(value, torch.Tensor) else pytrees.constant(value, path)

    return pytrees.describe((args, kwargs), leaf)


def _out_tree(spec: Any, results: list[Any], outputs: list[Any], constants: dict[int, Any], sizes: Sizes) -> Tree:
    """``outputs`` lists every flat result; those that are tensors are numbered, the others written into the tree."""
    position = iter(range(1 << 30))

    def leaf(i: int, path: str) -> Tree:
        if outputs[i] is not None:
            return Tree("tensor", index=next(position))
        value = results[i]
        if isinstance(value, torch.fx.Node):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            return Tree("size", expression=write(expression_of(value), sizes.names))
        return pytrees.constant(constants[i], f"output{path}")

    return pytrees.describe(pytree.tree_unflatten(list(range(len(results))), spec), leaf)


def _labels(owner: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> dict[tuple[int, int], str]:
    """(flat tensor, dimension) -> the name of the ``torch.export.Dim`` that was given for it."""
    if dynamic_shapes is None:
        return {}
    combined = torch_api._combine_args(owner, args, kwargs)
    try:
        torch_api._process_dynamic_shapes(combined, dynamic_shapes)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"dynamic_shapes does not fit the example: {first}; give them by argument, {{'x': {{0: Dim('batch', min=1, max=64)}}}}, None for one "
            "whose sizes are fixed"
        ) from error
    said = spellings.given(dynamic_shapes, owner.forward, args, kwargs)
    return {(i, d): size.__name__ for i, d, size in said if isinstance(size, Dim) and size.__name__.isidentifier()}

"""A variant on its way in and out: its example inputs made ready for tracing, and what the manifest says of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import VariantSpec, Verdict

from ..capture import joint_graph, partition, preserve, program_module, pytrees
from ..entries import Variant


def prepared(variant: Variant, signature: Callable[..., Any], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as leaves of their own. Where the code is for a GPU (``device`` "cuda"), 0-d tensors on the CPU, which eager takes beside
    those on a GPU, go there: compiled code would read them on the host, and a captured one would never look again."""
    if not isinstance(variant.args, tuple):
        raise ExportError(f"args is a {type(variant.args).__name__}; expected a tuple of the positional arguments, args=(x,)")
    if variant.kwargs is not None and not isinstance(variant.kwargs, Mapping):
        raise ExportError(f"kwargs is a {type(variant.kwargs).__name__}; expected a dict of the arguments by name")
    kwargs = dict(variant.kwargs or {})
    try:
        inspect.signature(signature).bind(*variant.args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example arguments do not fit {inspect.signature(signature)}: {error}") from error
    return pytree.tree_map(lambda v: _leaf(v, device) if isinstance(v, torch.Tensor) else v, (variant.args, kwargs))


def _leaf(tensor: torch.Tensor, device: str) -> torch.Tensor:
    plain = tensor.detach()
    if device == "cuda" and plain.device.type == "cpu" and plain.dim() == 0 and not tensor.requires_grad:
        plain = plain.cuda()
    if plain.layout is torch.strided and any(s == 0 and n > 1 for n, s in zip(plain.shape, plain.stride(), strict=True)):
        plain = plain.contiguous()  # expanded: one number in many places is no memory to be written to
    return plain.requires_grad_(tensor.requires_grad)


def differentiated(
    option: str, asked: str | Sequence[str], program: nn.Module, signature: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[str, str]]:
    """What ``option`` names, as ("parameter", name) and ("input", name), in the order asked for."""
    if not isinstance(asked, str | Sequence) or not all(isinstance(n, str) for n in asked):
        raise ExportError(f"{option} is {asked!r}; expected names of inputs and parameters, {option}=['x', 'weight']")
    inputs, _ = pytrees.input_names(signature, args, kwargs)
    flat = dict(zip(inputs, pytree.tree_leaves((args, kwargs)), strict=True))
    floating = [n for n, v in flat.items() if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())]
    parameters = dict(program.named_parameters())
    trained = [n for n, p in parameters.items() if p.requires_grad]
    first = {id(p): n for n, p in parameters.items()}  # a tied one goes by that
    out: list[tuple[str, str]] = []
    for name in [asked] if isinstance(asked, str) else asked:
        if name in ("parameters", "inputs"):
            found = [("parameter", n) for n in trained] if name == "parameters" else [("input", n) for n in floating]
            if not found:
                raise ExportError(f"{option}={name!r}, but there is none of floating point that could get a gradient")
        else:
            found = [("input", n) for n in inputs if below(n, name)]
            if wrong := [n for _, n in found if n not in floating]:
                raise ExportError(f"{option} names the input {wrong[0]!r}, which is no floating-point or complex tensor")
            found = found or [("parameter", first[id(p)]) for n, p in program.named_parameters(remove_duplicate=False) if below(n, name)]
            if not found:
                raise ExportError(f"{option} names {name!r}, which is no input {inputs} and no parameter {list(parameters)[:20]}")
        out += [f for f in found if f not in out]
    return out


@contextlib.contextmanager
def requiring(program: nn.Module, wanted: Sequence[tuple[str, str]] | None, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Exactly what is differentiated requires a gradient inside; without ``wanted`` all keeps what it has."""
    if wanted is None:
        yield args, kwargs
        return
    names = {n for k, n in wanted if k == "parameter"}
    inputs, _ = pytrees.input_names(program_module.forward_of(program), args, kwargs)
    chosen = {n for k, n in wanted if k == "input"}
    flat, spec = pytree.tree_flatten((args, kwargs))
    flat = [v.detach().requires_grad_(n in chosen) if isinstance(v, torch.Tensor) else v for n, v in zip(inputs, flat, strict=True)]
    targets = [p for n, p in program.named_parameters(remove_duplicate=False) if n in names]
    with preserve.requiring_alone(program.parameters(), targets):
        yield pytree.tree_unflatten(flat, spec)


def required(state: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> tuple[str, ...]:
    """What requires a gradient now, as manifests name it."""
    flat = pytree.tree_leaves((args, kwargs))
    inputs = [f"input:{i}" for i, t in enumerate(v for v in flat if isinstance(v, torch.Tensor)) if t.requires_grad]
    return (*(f"parameter:{n}" for n, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad), *inputs)


def variant_spec(mode: str, joint: joint_graph.Joint, pieces: partition.Partitions) -> VariantSpec:
    sizes = joint.sizes
    tensors = [(i, o) for i, o in enumerate(joint.outputs) if o is not None]
    outputs = []
    for i, output in tensors:
        if isinstance(output, tuple):
            value = joint.inputs[output[1]] if output[0] == "input" else joint.state[output[1]]
        else:
            value = output.meta["val"]
        outputs.append(sizes.spec(f"output[{i}]", value, joint.output_requires_grad[i]))
    cotangents = [sizes.spec(f"the gradient of output[{i}]", v, False) for i, v in zip(joint.cotangents, joint.cotangent_values, strict=True)]
    return VariantSpec(
        mode=mode,
        in_tree=joint.in_tree,
        out_tree=joint.out_tree,
        inputs=tuple(sizes.spec(n, t) for n, t in zip(joint.input_names, joint.inputs, strict=True)),
        outputs=tuple(outputs),
        cotangents=tuple(cotangents),
        differentiable=joint.differentiable,
        symbols=sizes.symbols,
        guards=sizes.guards(),
        ambient=joint.ambient,
        verdict=Verdict("not run"),
        forward=pieces.forward,
        backward=pieces.backward,
        inference=pieces.inference,
        gradient=pieces.gradient,
        step=pieces.step,
        accumulate=pieces.accumulate,
        argument_names=joint.argument_names,
        shared=joint.shared,
    )


def below(name: str, asked: str) -> bool:
    """Whether the leaf ``name`` is the argument ``asked`` or lies in it."""
    return name == asked or (name.startswith(asked) and name[len(asked)] in "[.")

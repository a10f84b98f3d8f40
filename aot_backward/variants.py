"""A variant on its way in and out: its example inputs made ready for tracing, and what the manifest says of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.manifest import VariantSpec, Verdict

from .capture import joint as joints
from .capture import split, trees
from .entries import Variant


def prepared(variant: Variant, signature: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as leaves of their own, with ``requires_grad`` as asked for."""
    if not isinstance(variant.args, tuple):
        raise ExportError(f"args is a {type(variant.args).__name__}; expected a tuple of the positional arguments, args=(x,)")
    kwargs = dict(variant.kwargs or {})
    try:
        inspect.signature(signature).bind(*variant.args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example arguments do not fit {inspect.signature(signature)}: {error}") from error
    names, _ = trees.input_names(signature, variant.args, kwargs)
    flat, spec = pytree.tree_flatten((variant.args, kwargs))
    if variant.requires_grad is not None:
        for name in variant.requires_grad:
            if not any(below(n, name) for n in names):
                raise ExportError(f"requires_grad names {name!r}, which is no input; the inputs are {names}")
    for i, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            needed = value.requires_grad if variant.requires_grad is None else any(below(names[i], n) for n in variant.requires_grad)
            if needed and not (value.is_floating_point() or value.is_complex()):
                raise ExportError(f"input {names[i]!r} has dtype {value.dtype}; only floating point and complex tensors get gradients")
            flat[i] = value.detach().requires_grad_(needed)
    return pytree.tree_unflatten(flat, spec)


@contextlib.contextmanager
def requiring(program: nn.Module, wanted: Sequence[tuple[str, str]] | None, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Exactly what is differentiated requires a gradient inside; a ``module`` entry keeps what it has."""
    if wanted is None:
        yield args, kwargs
        return
    names = {n for k, n in wanted if k == "parameter"}
    inputs, _ = trees.input_names(joints.forward_of(program), args, kwargs)
    chosen = {n for k, n in wanted if k == "input"}
    flat, spec = pytree.tree_flatten((args, kwargs))
    flat = [v.detach().requires_grad_(n in chosen) if isinstance(v, torch.Tensor) else v for n, v in zip(inputs, flat, strict=True)]
    before = [(p, p.requires_grad) for p in program.parameters()]
    wanted_tensors = {id(p) for n, p in program.named_parameters(remove_duplicate=False) if n in names}
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted_tensors)
        yield pytree.tree_unflatten(flat, spec)
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


def variant_spec(mode: str, joint: joints.Joint, pieces: split.Pieces) -> VariantSpec:
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
    )


def below(name: str, asked: str) -> bool:
    """Whether the leaf ``name`` is the argument ``asked`` or lies in it."""
    return name == asked or (name.startswith(asked) and name[len(asked)] in "[.")

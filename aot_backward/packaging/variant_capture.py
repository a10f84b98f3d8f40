"""Capture one variant: prepare its example inputs, find the differentiated tensors by name, and trace the program."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError

from ..capture import preserve, program_module, pytrees
from ..capture.joint_graph import Joint
from ..capture.shapes import dynamic_shapes
from ..capture.trace import trace_program
from ..capture.user_code import source_location
from ..checks.declared_sizes import Unserved
from ..checks.example_sizes import Example
from ..entries import Variant
from .contents import Contents

Names = list[tuple[str, str]]
"""Pairs ("parameter", name) and ("input", name)."""


@contextlib.contextmanager
def captured_variant(
    contents: Contents,
    name: str,
    place: tuple[int, int],
    variant: Variant,
    program: nn.Module,
    *,
    module: nn.Module,
    mode: str,
    kind: str,
    signature: Callable[..., Any],
    names: Callable[[Example], Names | None],
) -> Iterator[tuple[Example, Names | None, Joint]]:
    """Yield the example inputs of a variant, the differentiated names and the joint graph. Inside, ``module`` is in
    ``mode``, only the differentiated tensors require a gradient, and errors name the caller's line.

    ``name`` and ``kind`` are the entry's. ``place``: the variant's number, and the number of variants. ``names``
    returns the differentiated names for the example; None means all tensors that require a gradient."""
    number, total = place
    stage = f"capture {name}"
    contents.progress(stage, number, total)
    example = _prepare_example(variant, signature, mode, contents.device)
    shapes = dynamic_shapes.normalized(variant.dynamic_shapes, signature, variant.args, variant.kwargs)
    targets = names(example)
    with (
        preserve.in_mode(module, mode),
        _requiring_gradients_of(targets, program, example) as example,
        source_location.errors_located(program, example.args, example.kwargs),
    ):
        declared_shapes = dynamic_shapes.declared(shapes, signature, example.args, example.kwargs)
        joint = trace_program(
            program,
            example.args,
            example.kwargs,
            shapes,
            signature=signature,
            kind=kind,
            first_only=kind != "module",
        )
        for fixed in dynamic_shapes.left_fixed(declared_shapes, joint.input_names, joint.inputs):
            contents.progress(f"{stage}: Dim.AUTO became static, {fixed}", number, total)
        yield example, targets, joint
    contents.progress(stage, number + 1, total)


_MOST_FURTHER = 8
"""How many variants :func:`add_further_variants` adds to an entry at most. Each costs an export, and with several sizes
their number multiplies."""


def add_further_variants(
    contents: Contents,
    name: str,
    variants: MutableSequence[Variant],
    number: int,
    given: int,
    unserved: Sequence[Unserved],
    signature: Callable[..., Any],
) -> None:
    """Append to ``variants`` one for each of the sizes that ``variants[number]`` does not serve, with that size fixed,
    unless it is among them.

    ``given``: how many of ``variants`` are the caller's. Raise :class:`ExportError` if there would be too many."""
    variant = variants[number]
    for one in unserved:
        shapes = dynamic_shapes.normalized(variant.dynamic_shapes, signature, variant.args, variant.kwargs) or {}
        fixed = dynamic_shapes.with_fixed(shapes, one.dim)
        new = dataclasses.replace(variant, args=one.example.args, kwargs=one.example.kwargs, dynamic_shapes=fixed)
        if any(_covers(other, new) for other in variants[given:]):
            continue
        if len(variants) - given == _MOST_FURTHER:
            raise ExportError(
                f"{name}: expected at most {_MOST_FURTHER} sizes that need code of their own, got more, such as {one.dim}={one.size}. Declare ranges "
                "without them, and export variants for those that you need"
            )
        variants.append(new)
        contents.progress(f"capture {name}: another variant for {one.dim}={one.size}", number + 1, len(variants))


def _covers(variant: Variant, new: Variant) -> bool:
    shapes = [[t.shape for t in Example(v.args, v.kwargs or {}, "").tensors] for v in (variant, new)]
    return shapes[0] == shapes[1] and variant.dynamic_shapes == new.dynamic_shapes


def _prepare_example(variant: Variant, signature: Callable[..., Any], mode: str, device: str) -> Example:
    """Return the example inputs as new leaves, in ``mode``. If the code is for a GPU (``device`` "cuda"), move 0-d CPU
    tensors there, which eager accepts with GPU tensors: compiled code would read them on the host, and a captured graph
    would never read them again."""
    if not isinstance(variant.args, tuple):
        raise ExportError(
            f"args is a {type(variant.args).__name__}; expected a tuple of the positional arguments, args=(x,)"
        )
    if variant.kwargs is not None and not isinstance(variant.kwargs, Mapping):
        raise ExportError(f"kwargs is a {type(variant.kwargs).__name__}; expected a dict of the arguments by name")
    kwargs = dict(variant.kwargs or {})
    try:
        inspect.signature(signature).bind(*variant.args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example arguments do not fit {inspect.signature(signature)}: {error}") from error
    example = Example(variant.args, kwargs, mode)
    return example.with_tensors([_leaf(t, device) for t in example.tensors])


def _leaf(tensor: torch.Tensor, device: str) -> torch.Tensor:
    plain = tensor.detach()
    if device == "cuda" and plain.device.type == "cpu" and plain.dim() == 0 and not tensor.requires_grad:
        plain = plain.cuda()
    if plain.layout is torch.strided and any(
        s == 0 and n > 1 for n, s in zip(plain.shape, plain.stride(), strict=True)
    ):
        plain = plain.contiguous()  # an expanded tensor repeats one element, so it cannot be written to
    return plain.requires_grad_(tensor.requires_grad)


def resolve_names(
    option: str, names: str | Sequence[str], program: nn.Module, signature: Callable[..., Any], example: Example
) -> Names:
    """Resolve the names in ``option`` ("wrt", "requires_grad") to ("parameter", name) and ("input", name), in the order
    asked for."""
    if not isinstance(names, str | Sequence) or not all(isinstance(n, str) for n in names):
        raise ExportError(f"{option} is {names!r}; expected names of inputs and parameters, {option}=['x', 'weight']")
    inputs, _ = pytrees.input_names(signature, example.args, example.kwargs)
    flat = dict(zip(inputs, pytree.tree_leaves((example.args, example.kwargs)), strict=True))
    floating = [n for n, v in flat.items() if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())]
    parameters = dict(program.named_parameters())
    trained_names = [n for n, p in parameters.items() if p.requires_grad]
    first = {id(p): n for n, p in parameters.items()}  # a tied parameter goes by its first name
    out: Names = []
    for name in [names] if isinstance(names, str) else names:
        if name in ("parameters", "inputs"):
            matches = (
                [("parameter", n) for n in trained_names] if name == "parameters" else [("input", n) for n in floating]
            )
            if not matches:
                expected = (
                    "parameter that requires a gradient" if name == "parameters" else "floating-point or complex input"
                )
                raise ExportError(f"{option}={name!r}: expected at least one {expected}, got none")
        else:
            matches = [("input", n) for n in inputs if _lies_in(n, name)]
            if unsupported := [n for _, n in matches if n not in floating]:
                raise ExportError(
                    f"{option} names the input {unsupported[0]!r}, which is not a floating-point or complex tensor"
                )
            matches = matches or [
                ("parameter", first[id(p)])
                for n, p in program.named_parameters(remove_duplicate=False)
                if _lies_in(n, name)
            ]
            if not matches:
                groups = [
                    (kind, ", ".join(map(repr, n)))
                    for kind, n in (("inputs", inputs), ("parameters", list(parameters)[:20]))
                    if n
                ]
                description = " and ".join(f"the {kind} {n}" for kind, n in groups) or "neither inputs nor parameters"
                raise ExportError(
                    f"{option} names {name!r}, which is neither an input nor a parameter; the program has {description}"
                )
        out += [f for f in matches if f not in out]
    return out


@contextlib.contextmanager
def _requiring_gradients_of(names: Names | None, program: nn.Module, example: Example) -> Iterator[Example]:
    """Yield the example while exactly the tensors in ``names`` require a gradient. None changes nothing."""
    if names is None:
        yield example
        return
    parameters, input_names = ({n for k, n in names if k == kind} for kind in ("parameter", "input"))
    inputs, _ = pytrees.input_names(program_module.forward_of(program), example.args, example.kwargs)
    leaves = zip(inputs, pytree.tree_leaves((example.args, example.kwargs)), strict=True)
    tensors = [v.detach().requires_grad_(n in input_names) for n, v in leaves if isinstance(v, torch.Tensor)]
    targets = [p for n, p in program.named_parameters(remove_duplicate=False) if n in parameters]
    with preserve.requiring_alone(program.parameters(), targets):
        yield example.with_tensors(tensors)


def requiring_gradients(state: Mapping[str, torch.Tensor], example: Example) -> tuple[str, ...]:
    """Return the tensors that require a gradient now, named as in manifests."""
    inputs = [f"input:{i}" for i, t in enumerate(example.tensors) if t.requires_grad]
    return (*(f"parameter:{n}" for n, t in state.items() if isinstance(t, nn.Parameter) and t.requires_grad), *inputs)


def _lies_in(name: str, argument: str) -> bool:
    """Return whether the leaf ``name`` is ``argument`` or part of it."""
    return name == argument or (name.startswith(argument) and name[len(argument)] in "[.")

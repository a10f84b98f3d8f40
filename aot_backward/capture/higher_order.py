"""Trace the gradients of a program as another program, which can be differentiated again.

Saved tensors are detached, so a partitioned backward cannot be differentiated again. Instead the function from (inputs,
incoming gradients) to gradients is traced with ``create_graph=True`` and partitioned like any other program. Run on
inputs that autograd tracks, it returns the same gradients and saves the tensors that their own backward needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters.process_state import sizes_of_one_open
from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Tree

from . import fx_graph, preserve
from .joint_graph import Joint
from .program_module import FlatProgram, inner_name
from .trace import Described, joint_of

aten = torch.ops.aten


class _Gradients(nn.Module):
    """Maps a program's flat inputs, followed by its incoming gradients, to the gradients of ``joint``. A tied
    parameter's is under its first name."""

    def __init__(
        self, program: nn.Module, joint: Joint, arguments: Any, weights: Mapping[str, tuple[str, torch.Tensor]]
    ):
        super().__init__()
        self.program = program
        self.flat, self.spec = pytree.tree_flatten(arguments)
        self.outputs = joint.cotangents
        self.parts: dict[tuple[str, Any], list[Any]] = {}
        first_targets: dict[str, tuple[str, Any]] = {}
        for target in joint.gradients:
            kind, where = target
            first_target = first_targets.setdefault(weights[where][0], target) if kind == "parameter" else target
            self.parts.setdefault(first_target, []).append(where)
        self.training = program.training

    @property
    def innermost(self) -> nn.Module:
        """The caller's program. As an attribute it would be registered as a submodule again, under a second name."""
        return self.program.innermost if isinstance(self.program, _Gradients) else self.program

    def own_name(self, name: str) -> str:
        """Return the name in the caller's program of a parameter or buffer of this module."""
        name = inner_name(name)
        return self.program.own_name(name) if isinstance(self.program, _Gradients) else name

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor | None]:
        rest = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(rest) if isinstance(v, torch.Tensor) else v for v in self.flat], self.spec
        )
        cotangents = list(rest)
        leaves = pytree.tree_leaves(self.program(*args, **kwargs))
        state = state_of(self.innermost)
        targets: list[torch.Tensor] = []
        counts = []
        for (kind, _), names in self.parts.items():
            unique_tensors = {id(t): t for t in (state[n] if kind == "parameter" else tensors[n] for n in names)}
            targets += unique_tensors.values()
            counts.append(len(unique_tensors))
        gradients = iter(
            torch.autograd.grad(
                [leaves[i] for i in self.outputs], targets, cotangents, create_graph=True, allow_unused=True
            )
        )
        out: list[torch.Tensor | None] = []
        for count in counts:
            parts = [g for g in (next(gradients) for _ in range(count)) if g is not None]
            out.append(sum(parts[1:], start=parts[0]) if parts else None)
        return out


@dataclass(frozen=True)
class Differentiated:
    """The traced gradients of a program. ``gives``: the target of each output. ``random``: whether random numbers are
    drawn. ``program``, ``arguments``: the gradients as a program, which can be differentiated in turn."""

    joint: Joint
    gives: tuple[str, ...]
    random: bool
    program: nn.Module
    arguments: Any


def trace(
    program: nn.Module, arguments: Any, joint: Joint, weights: Mapping[str, tuple[str, torch.Tensor]]
) -> Differentiated:
    """Return the joint graph of the gradients of ``joint``, with its sizes and the same names; raise
    :class:`ExportError` if eager has no derivative of that order either. ``arguments``: the example ``(args, kwargs)``.
    ``weights``: state name -> (weight key, tensor)."""
    module = _Gradients(program, joint, arguments, weights)
    with joint.fake_mode:
        cotangents = [v.detach().clone().requires_grad_() for v in joint.cotangent_values]
    inputs = (*joint.inputs, *cotangents)
    names = (*joint.input_names, *(f"the gradient of output[{i}]" for i in joint.cotangents))
    in_tree = Tree(
        "tuple",
        children=(Tree("tuple", children=tuple(Tree("tensor", index=i) for i in range(len(inputs)))), Tree("dict")),
    )
    replacements = dict(joint.sizes.shape_env.replacements)
    facts = Described(joint.fake_mode, joint.ambient, names, (), in_tree)
    copies: frozenset[int] = frozenset()
    while True:
        try:
            with preserve.slots_kept(program), sizes_of_one_open():
                grad_joint, aliases = joint_of(
                    FlatProgram(module, (inputs, {}), copies, False), inputs, facts, lambda _, __: joint.sizes
                )
        except ExportError:
            raise
        except Exception as error:  # the user's program runs here and may raise anything
            raise ExportError(_undifferentiable(error)) from error
        if grad_joint is not None:
            # An output that is an incoming gradient itself
            aliases = frozenset(i for i, o in enumerate(grad_joint.outputs) if isinstance(o, tuple))
            if not aliases:
                break
        if copies >= aliases:
            raise ExportError(
                f"order=2: the gradients of {[list(module.parts)[i] for i in sorted(aliases)]} still share memory after being copied"
            )
        copies |= aliases
    if joint.sizes.shape_env.replacements != replacements:
        labels = [
            s.label
            for s, symbol in zip(joint.sizes.symbols, joint.sizes.names, strict=True)
            if symbol in joint.sizes.shape_env.replacements
        ]
        raise ExportError(
            f"order=2: expected a second derivative for every size of {', '.join(labels)}, declared dynamic, got one that is valid for one size only "
            "(PyTorch's second derivative of BatchNorm in training mode is such a case). Make it static"
        )
    random = any(
        torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in grad_joint.graph.graph.nodes
    )
    own_name = module.own_name
    _drop_buffer_updates(grad_joint, own_name)
    targets = tuple(
        f"{kind}:{where}" for (kind, where), o in zip(module.parts, grad_joint.outputs, strict=True) if o is not None
    )
    return Differentiated(_renamed(grad_joint, own_name), targets, random, module, (inputs, {}))


def _undifferentiable(error: Exception) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "attention" in text:
        return f"order=2: {text}: call the attention within torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which has a second derivative"
    return f"order=2: the gradients could not be differentiated: {type(error).__name__}: {text}"


def _drop_buffer_updates(joint: Joint, own: Callable[[str], str]) -> None:
    """Remove buffer updates, which the first forward has already made. Raise if a gradient reads such a buffer: a
    second run would read another value."""
    graph, written_buffers = joint.graph, set()
    for node in graph.graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = node.args
        if target.op == "placeholder":
            written_buffers.add(target)
            node.replace_all_uses_with(value)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    results = fx_graph.results_of(graph)[joint.forward_values - len(joint.outputs) :]
    seen, todo = set(), [r for r in results if isinstance(r, torch.fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    for node in written_buffers & seen:
        raise ExportError(
            f"order=2: the gradients depend on the buffer {own(joint.placeholders[node.name][1])!r}, which the forward changes: "
            "export with order=1, or in a mode that does not change it"
        )


def _renamed(joint: Joint, own: Callable[[str], str]) -> Joint:
    """Return ``joint`` with the parameter and buffer names of the program itself."""

    def renamed(target: Any) -> Any:
        return (target[0], own(target[1])) if target is not None and isinstance(target[1], str) else target

    return dataclasses.replace(
        joint,
        placeholders={n: renamed(t) for n, t in joint.placeholders.items()},
        outputs=tuple(renamed(o) if isinstance(o, tuple) else o for o in joint.outputs),
        gradients={renamed(t): g for t, g in joint.gradients.items()},
        gradient_slots=tuple(renamed(t) for t in joint.gradient_slots),
        state={own(n): t for n, t in joint.state.items()},
    )

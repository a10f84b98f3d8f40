"""Capture and compile a ``module``, ``function`` or ``grad`` entry, and prepare its check."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aot_backward_exporters import torch_api
from aot_backward_exporters.graph import Graph
from aot_backward_exporters.sixteen_bits import computes_in_16_bits
from aot_backward_runtime.entries.layers import layers_of
from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, StateSpec, SymbolSpec, VariantSpec, Verdict
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.pytree import describe

from ..capture import higher_order, partition, program_module
from ..capture.joint_graph import Joint
from ..capture.user_code import source_location
from ..checks import eager_check, speed
from ..checks.declared_sizes import unserved_sizes
from ..checks.example_sizes import Example, sizes_to_check
from ..checks.named_results import Wrt
from ..checks.stored_results import Stored
from ..entries import Function, Grad, Module, Variant
from . import tuning
from .contents import Check, Contents
from .variant_capture import Names, add_further_variants, captured_variant, requiring_gradients, resolve_names
from .variant_spec import variant_spec

Weights = Mapping[str, tuple[str, torch.Tensor]]
"""The weight's key in the package and the tensor, by the program's own name."""


def add_program(contents: Contents, name: str, entry: Module | Function | Grad) -> tuple[EntrySpec, Check]:
    """Return the manifest's description of ``entry`` and its check. Graphs, weights and libraries go to
    ``contents``."""
    fn = entry.module if isinstance(entry, Module) else entry.fn
    program = fn if isinstance(fn, nn.Module) else program_module.FunctionModule(fn)
    signature = program.forward if isinstance(fn, nn.Module) else fn
    state = state_of(program)
    weights = {n: (contents.weight_key(name, n, t), t.detach()) for n, t in state.items()}
    persistent = set(program.state_dict(keep_vars=True))
    layers = layers_of(program) if program is fn and isinstance(entry, Module) else ()
    pending = list(entry.variants)  # grows if code for some sizes does not serve others
    variants, examples, cases = list[VariantSpec](), list[Example](), list[eager_check.Case]()
    wrt: Wrt = ()

    def entry_of(*variants: VariantSpec) -> EntrySpec:
        spec = EntrySpec(
            kind="function" if isinstance(entry, Function) else "module",
            state=tuple(
                StateSpec(n, weights[n][0], isinstance(t, nn.Parameter), t.requires_grad, n in persistent)
                for n, t in state.items()
            ),
            variants=variants,
            modules=tuple(n for n, _ in program.named_modules(remove_duplicate=False) if n),
            training=program.training,
            layers=layers,
        )
        return _grad_entry(spec, entry, wrt) if isinstance(entry, Grad) else spec

    for i, variant in enumerate(pending):
        mode = (variant.mode or ("train" if program.training else "eval")) if isinstance(fn, nn.Module) else ""
        with captured_variant(
            contents,
            name,
            (i, len(pending)),
            variant,
            program,
            module=program,
            mode=mode,
            kind="grad" if isinstance(entry, Grad) else "module",
            signature=signature,
            names=functools.partial(_names, entry, variant, program, signature),
        ) as (example, targets, joint):
            prefix = f"{name}.{i}"
            submodules = tuple(
                n
                for n, m in program.named_modules(remove_duplicate=False)
                if n and mode and m.training != (mode == "train")
            )
            if not isinstance(entry, Grad):
                candidates = _module_candidates(
                    contents, prefix, entry, program, state, example, joint, weights, submodules
                )
            else:
                wrt = tuple(_by_number(targets or [], joint, weights))
                candidates = [_grad_candidate(name, prefix, entry, example, joint, weights, wrt, submodules)]
            reduced_precision = any(computes_in_16_bits(graph.module) for graph in candidates[0].graphs)
            check_case = eager_check.Case(program, wrt if isinstance(entry, Grad) else None, reduced_precision)
            label = f"{name} variant {i}" if len(pending) > 1 else name
            subject = tuning.Subject(name, i, label, speed.ProgramTimed(name, program, check_case.wrt), example)
            case = tuning.Case(subject, entry_of, functools.partial(eager_check.is_right, name, check_case, example))
            choice = tuning.choose(contents, case, candidates, functools.partial(_compile, contents, prefix, joint))
            variants.append(choice.spec())
            unserved = unserved_sizes(variants[-1], joint.sizes, program, example)
            add_further_variants(contents, name, pending, i, len(entry.variants), unserved, signature)
            examples.append(example)
            cases.append(check_case)

    def check(
        load: Callable[[], Package], i: int, spec: VariantSpec, stored: Stored, zero: SymbolSpec | None
    ) -> Verdict:
        with source_location.errors_located(program, examples[i].args, examples[i].kwargs):
            return eager_check.check(load, name, i, spec, cases[i], sizes_to_check(spec, examples[i], zero), stored)

    return entry_of(*variants), check


def _names(
    entry: Module | Function | Grad,
    variant: Variant,
    program: nn.Module,
    signature: Callable[..., Any],
    example: Example,
) -> Names | None:
    """Return the differentiated names; None for all tensors that require a gradient."""
    if isinstance(entry, Grad):
        by_default = "parameters" if entry.fn is program else "inputs"
        return resolve_names("wrt", entry.wrt if entry.wrt is not None else by_default, program, signature, example)
    if isinstance(entry, Function):
        return []
    if variant.requires_grad is not None:
        return resolve_names("requires_grad", variant.requires_grad, program, signature, example)
    return None


def _grad_entry(spec: EntrySpec, entry: Grad, wrt: Wrt) -> EntrySpec:
    names = [key if kind == "parameter" else spec.variants[0].inputs[key].name for kind, key in wrt]
    return dataclasses.replace(
        spec,
        kind="grad",
        wrt=tuple(f"{kind}:{key}" for kind, key in wrt),
        names=tuple(names),
        single=isinstance(entry.wrt, str) and len(names) == 1,
        has_aux=entry.has_aux,
    )


def _grad_candidate(
    entry_name: str,
    prefix: str,
    entry: Grad,
    example: Example,
    joint: Joint,
    weights: Weights,
    wrt: Wrt,
    submodules: tuple[str, ...],
) -> tuning.Candidate:
    if not entry.has_aux and joint.out_tree.kind != "tensor":
        raise ExportError(
            f"{entry_name}: expected a loss, got {describe(joint.out_tree)}. If the loss comes first, say has_aux=True"
        )
    partitions = partition.split_grad(joint, prefix, weights, wrt)
    return tuning.Candidate(
        "whole",
        partitions.graphs,
        lambda: dataclasses.replace(variant_spec(example.mode, joint, partitions), set_apart=submodules),
    )


def _module_candidates(
    contents: Contents,
    prefix: str,
    entry: Module | Function,
    program: nn.Module,
    state: Mapping[str, torch.Tensor],
    example: Example,
    joint: Joint,
    weights: Weights,
    submodules: tuple[str, ...],
) -> list[tuning.Candidate]:
    """Return one candidate per partitioner: the forward, the backward and its derivatives up to ``entry.order``, split
    into graphs."""
    higher = _higher_orders(
        entry.order if isinstance(entry, Module) else 1, program, (example.args, example.kwargs), joint, weights
    )
    unreached = () if joint.differentiable else requiring_gradients(state, example)

    def candidate(partitioner: str) -> tuning.Candidate:
        partitions = partition.split_module(
            joint, prefix, weights, forward_only=example.mode == "eval", partitioner=partitioner
        )
        partitions_of_higher = [
            partition.split_module(
                grad.joint, f"{prefix}.order{order}", weights, forward_only=False, partitioner=partitioner
            )
            for order, grad in enumerate(higher, start=2)
        ]

        def spec() -> VariantSpec:
            double: VariantSpec | None = None
            for grad, own_partitions in reversed(list(zip(higher, partitions_of_higher, strict=True))):
                double = dataclasses.replace(
                    variant_spec(example.mode, grad.joint, own_partitions),
                    gives=grad.gives,
                    random=grad.random,
                    double=double,
                )
            return dataclasses.replace(
                variant_spec(example.mode, joint, partitions), double=double, unreached=unreached, set_apart=submodules
            )

        return tuning.Candidate(
            partitioner, [graph for part in (partitions, *partitions_of_higher) for graph in part.graphs], spec
        )

    return tuning.partitioned(candidate, example, contents.device, contents.tune)


def _higher_orders(
    order: int, program: nn.Module, arguments: Any, joint: Joint, weights: Weights
) -> list[higher_order.Differentiated]:
    """Return the gradients as separate programs, as long as they can be differentiated again, at most ``order - 1``."""
    out: list[higher_order.Differentiated] = []
    while len(out) < order - 1 and joint.has_backward:
        out.append(higher_order.trace(program, arguments, joint, weights))
        program, arguments, joint = out[-1].program, out[-1].arguments, out[-1].joint
    return out


def _compile(contents: Contents, prefix: str, joint: Joint, graphs: Sequence[Graph]) -> None:
    before = _known_sizes(joint)
    contents.compile(graphs, joint)
    if (after := _known_sizes(joint)) != before:
        fixed = [
            s.label
            for s, symbol in zip(joint.sizes.symbols, joint.sizes.names, strict=True)
            if symbol in after.keys() - before.keys()
        ]
        raise ExportError(
            f"{prefix}: the compiler fixed {' and '.join(fixed) or 'a size'}, which is declared dynamic; make it static, or report the model"
        )


def _known_sizes(joint: Joint) -> dict[Any, Any]:
    """Return the known values of input sizes. Sizes that come from data are the compiler's own."""
    replacements = joint.sizes.shape_env.replacements
    return {symbol: value for symbol, value in replacements.items() if not torch_api.free_unbacked_symbols(symbol)}


def _by_number(targets: Names, joint: Joint, weights: Weights) -> Iterator[tuple[str, Any]]:
    """Yield ``targets`` as the joint graph names it: inputs by number, a tied parameter by its first name."""
    first: dict[str, str] = {}
    for name, (key, _) in weights.items():
        first.setdefault(key, name)
    for kind, name in targets:
        yield (kind, first[weights[name][0]]) if kind == "parameter" else (kind, joint.input_names.index(name))

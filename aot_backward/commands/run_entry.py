"""``call_entry``, used by ``aot-backward run``: call a package's entry once on named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from aot_backward_runtime import Package
from aot_backward_runtime.entries.module import LoadedModule
from aot_backward_runtime.errors import AotBackwardError, InputError
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.native.pytree import flatten, unflatten

GRADIENT = "gradient of "
_ELSEWHERE = {
    "step": "is a training step, and every call changes its state: `aot-backward train` runs steps and saves the state",
    "replay": "holds recorded backward passes, and only the recorded script can call them: `aot-backward replay` runs it",
}


def call_entry(
    package: Package, name: str | None, mode: str | None, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Call an entry on ``tensors`` and return the results by name. Inputs have the manifest's names: ``x``,
    ``batch['ids']``.

    A module or a function returns ``output[0]`` and so on. If ``tensors`` holds an incoming gradient, such as
    ``gradient of output[0]``, a module also returns ``gradient of NAME`` for each parameter and input that gets one. A
    gradient function returns ``value``, ``aux[0]`` and so on, and ``gradient of NAME``. None gradients are omitted.
    ``tensors`` are moved to the package's device.

    ``name``: None chooses the only entry. ``mode``: "train" or "eval". The default is the module's mode at export, or
    the entry's only mode.
    """
    name = name if name is not None else _sole(package)
    if name not in package.entries:
        raise AotBackwardError(f"the package has no entry {name!r}; it has: {', '.join(package.entries)}")
    spec = package.manifest.entries[name]
    if spec.kind in _ELSEWHERE:
        raise AotBackwardError(f"entry {name!r} {_ELSEWHERE[spec.kind]}")
    modes = {v.mode for v in spec.variants}
    mode = "" if modes == {""} else mode or ("train" if spec.training and "train" in modes else sorted(modes)[0])
    device_tensors = {n: t.to(package.device) for n, t in tensors.items()}
    incoming = {n.removeprefix(GRADIENT): t for n, t in device_tensors.items() if n.startswith(GRADIENT)}
    inputs = {n: t for n, t in device_tensors.items() if not n.startswith(GRADIENT)}
    variants = [v for v in spec.variants if v.mode == mode]
    if not variants:
        raise InputError(f"entry {name!r} was not exported in mode {mode!r}; it has {', '.join(sorted(modes))}")
    matches = [v for v in variants if {s.name for s in v.inputs} == inputs.keys()]
    if not matches:
        expected, actual = (
            ", ".join(map(repr, names)) for names in ([s.name for s in variants[0].inputs], sorted(inputs))
        )
        raise InputError(
            f"entry {name!r} takes {f'the tensors {expected}' if expected else 'no tensors'}; the file holds {actual or 'no arguments'}"
        )
    if spec.kind != "module" and incoming:
        result = "a loss and its gradients" if spec.kind == "grad" else "outputs without gradients"
        raise InputError(
            f"entry {name!r} computes {result}, and takes no incoming ones; the file holds {GRADIENT}{sorted(incoming)[0]}"
        )
    errors = []
    for variant in matches:  # several take the same tensors if they differ in constants
        flat_inputs = [inputs[s.name].requires_grad_(s.requires_grad and bool(incoming)) for s in variant.inputs]
        args, kwargs = unflatten(variant.in_tree, flat_inputs, {}, {})
        try:
            if spec.kind == "grad":
                return _gradient(package, name, mode, args, kwargs)
            if spec.kind == "function":
                return _outputs(package.function(name).train(mode == "train")(*args, **kwargs))
            return _module(package.module(name).train(mode == "train"), variant, args, kwargs, incoming)
        except InputError as error:
            errors.append(error)
    raise errors[0]


def _gradient(
    package: Package, name: str, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    spec = package.manifest.entries[name]
    grad = package.grad(name)
    if mode:
        grad.train(mode == "train")
    value, grads = grad(*args, **kwargs)
    loss, *aux = _leaves(value)
    gradients = {spec.names[0]: grads} if spec.single else grads
    return {
        "value": loss,
        **{f"aux[{i}]": t for i, t in enumerate(aux)},
        **{GRADIENT + n: g for n, g in gradients.items() if g is not None},
    }


def _module(
    module: LoadedModule,
    variant: VariantSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    incoming: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    with torch.set_grad_enabled(bool(incoming)):
        outputs = _outputs(module(*args, **kwargs))
    for name in incoming:
        if name not in outputs or not outputs[name].requires_grad:
            names = [n for n, t in outputs.items() if t.requires_grad]
            raise AotBackwardError(
                f"{GRADIENT}{name} was given, but no output of that name gets a gradient; outputs with a gradient: {', '.join(names) or 'none'}"
            )
    results = {n: t.detach() for n, t in outputs.items()}
    if incoming:
        inputs: list[torch.Tensor] = []
        flatten(variant.in_tree, (args, kwargs), inputs, "arguments")
        sources: dict[str, torch.Tensor] = {n: p for n, p in module.named_parameters() if p.requires_grad}
        sources |= {s.name: t for s, t in zip(variant.inputs, inputs, strict=True) if t.requires_grad}
        gradients = torch.autograd.grad(
            [outputs[n] for n in incoming], list(sources.values()), list(incoming.values()), allow_unused=True
        )
        results |= {GRADIENT + n: g for n, g in zip(sources, gradients, strict=True) if g is not None}
    return results


def _outputs(value: Any) -> dict[str, torch.Tensor]:
    return {f"output[{i}]": t for i, t in enumerate(_leaves(value))}


def _leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, in the manifest's order."""
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _sole(package: Package) -> str:
    if len(package.entries) != 1:
        raise AotBackwardError(
            f"the package has {len(package.entries)} entries: choose one with --entry: {', '.join(package.entries)}"
        )
    return next(iter(package.entries))

"""Compute all results of an entry by name (outputs, gradients and buffers), for the loaded entry and for eager."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters.process_state import without_crashes
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.loader import Package

from ..capture import layer_patches, preserve
from .example_sizes import SEED, Example

Take = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Called with a gradient's name, its target and the gradient, when backward has computed it; returns its replacement in
the results."""

Named = dict[str, torch.Tensor | None]
"""Results by name: "output[0]", "gradient of weight", "second-order gradient of weight", "buffer running_mean"."""

Wrt = tuple[tuple[str, Any], ...]
"""Targets of a ``grad`` entry, in order: ("parameter", its name) or ("input", its number among the tensors of the
call)."""


def has_inference_code(spec: VariantSpec) -> bool:
    """Return whether a module's variant has separate code for calls under ``no_grad``."""
    return spec.inference is not None and spec.forward is not None


class Overwritten(ExportError):
    """Compiled code wrote to an input or parameter that it must only read."""


def results_of_entry(
    package: Package,
    entry: str,
    spec: VariantSpec,
    example: Example,
    cotangents: Sequence[torch.Tensor],
    *,
    inference: bool = False,
) -> Named:
    """Return the results of a loaded ``module`` or ``grad`` entry, and restore its buffers. ``inference``: only outputs
    and buffers, of a module under ``no_grad``, which may run other code. Raise :class:`Overwritten` if a parameter or
    an input has changed."""
    out: Named = {}
    example = _fresh_leaves(example)
    tensors = {described.name: t for described, t in zip(spec.inputs, example.tensors, strict=True)}
    tensors |= {f"incoming gradient {i}": c for i, c in enumerate(cotangents)}
    torch.manual_seed(SEED)
    if package.manifest.entries[entry].kind == "grad":
        grad = package.grad(entry)
        if example.mode:
            grad.train(example.mode == "train")
        tensors |= {n: t for n, t in grad.parameters.items() if t.requires_grad}
        with preserve.values_kept(t for t in grad.parameters.values() if not t.requires_grad), _only_read(tensors):
            value, gradients = grad(*example.args, **example.kwargs)
            _add_outputs(out, value)
            names = package.manifest.entries[entry].names
            gradients = {names[0]: gradients} if package.manifest.entries[entry].single else gradients
            out.update({f"gradient of {n}": g for n, g in gradients.items()})
            del gradients
            return _copied(out)
    if package.manifest.entries[entry].kind == "function":
        function = package.function(entry).train(example.mode == "train")
        buffers = {
            s.name: function.parameters[s.name] for s in package.manifest.entries[entry].state if not s.parameter
        }
        with (
            preserve.values_kept(buffers.values()),
            _only_read(tensors | {n: t for n, t in function.parameters.items() if n not in buffers}),
        ):
            _add_outputs(out, function(*example.args, **example.kwargs))
            out.update({f"buffer {n}": b for n, b in buffers.items()})
            return _copied(out)
    module = package.module(entry).train(example.mode == "train")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets = differentiated(spec, parameters, example)
    with (
        preserve.values_kept(module.buffers()),
        preserve.requiring_alone(parameters.values(), targets.values()),
        _only_read(tensors | parameters),
        torch.set_grad_enabled(not inference),
    ):
        outputs = _add_outputs(out, module(*example.args, **example.kwargs))
        if not inference:
            _add_gradients(out, spec, outputs, targets, cotangents)
        out.update({f"buffer {n}": b for n, b in module.named_buffers()})
        return _copied(out)


@contextlib.contextmanager
def _only_read(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Raise :class:`Overwritten` on exit if any of ``tensors`` has changed, and name them."""
    before = {name: _hash(t) for name, t in tensors.items()}
    yield
    if changed := [name for name, t in tensors.items() if _hash(t) != before[name]]:
        raise Overwritten(
            f"the compiled code writes to {', '.join(changed)}, which it should only read; report this as a bug"
        )


def _hash(tensor: torch.Tensor) -> int:
    """Return a hash of every bit, without a copy."""
    value = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    bits = value.view(_BITS[value.itemsize])
    return int(torch.hash_tensor(bits).view(torch.int64)) if bits.numel() else 0


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def results_of_eager(
    program: nn.Module,
    example: Example,
    wrt: Wrt | None,
    spec: VariantSpec,
    cotangents: Sequence[torch.Tensor],
    *,
    accumulated: bool = False,
    take: Take | None = None,
    root: int = 0,
) -> Named:
    """Return the same names from eager, and restore ``program``'s buffers. ``wrt``: of a ``grad`` entry; ``root``:
    which output it differentiates. ``accumulated``: only return the ``.grad`` that ``backward()`` leaves on the
    parameters. ``take``: called with each gradient, except for entries that have gradients of gradients."""
    out: Named = {}
    taking = None if take is None else _GradientSink(take)
    example = _fresh_leaves(example)
    parameters = dict(program.named_parameters(remove_duplicate=False))
    if wrt is not None:
        inputs = example.tensors
        targets = {
            (spec.inputs[w].name if k == "input" else w): (inputs[w] if k == "input" else parameters[w]) for k, w in wrt
        }
    else:
        targets = differentiated(spec, parameters, example)
    torch.manual_seed(SEED)
    # The cache keeps casts of weights while the caller's autocast lasts, even if the weights change
    torch.clear_autocast_cache()
    with (
        preserve.in_mode(program, example.mode),
        preserve.slots_kept(program),
        preserve.values_kept(program.buffers()),
        preserve.requiring_alone(parameters.values(), targets.values()),
        layer_patches.plain_checkpoints(),
        without_crashes(),
        torch.enable_grad(),
    ):
        outputs = _add_outputs(out, program(*example.args, **example.kwargs))
        if accumulated:
            roots = outputs[:1] if wrt is not None else [outputs[i] for i in spec.differentiable]
            incoming = None if wrt is not None else _cast(cotangents, roots)
            return _accumulated(roots, incoming, parameters, targets)
        if wrt is not None:
            out.update(_gradients(outputs[root : root + 1], targets, None, taking))
        else:
            _add_gradients(out, spec, outputs, targets, cotangents, taking)
            out.update({f"buffer {n}": b for n, b in program.named_buffers()})
        return _copied(out, taking)


def differentiated(
    spec: VariantSpec, parameters: Mapping[str, torch.Tensor], example: Example
) -> dict[str, torch.Tensor]:
    """Return the tensors that a ``module`` variant has gradients for, by name."""
    out, inputs = {}, example.tensors
    for gradient in spec.backward.gradients if spec.backward else ():
        kind, _, key = gradient.of.partition(":")
        if kind == "parameter":
            out[key] = parameters[key]
        else:
            out[spec.inputs[int(key)].name] = inputs[int(key)]
    return out


def _add_outputs(out: Named, value: Any) -> list[torch.Tensor]:
    """Add the output's tensors by number, and return them. A dict is in the order of its keys, as both sides return
    it."""
    flat = tensors_of(value)
    out.update({f"output[{i}]": v for i, v in enumerate(flat)})
    return flat


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a program's return value, in order."""
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def _add_gradients(
    out: Named,
    spec: VariantSpec,
    outputs: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    taking: _GradientSink | None = None,
) -> None:
    """Add the gradients of a ``module`` variant, then gradients of these, also with respect to the incoming gradients,
    up to its order."""
    if not targets or not spec.differentiable:
        return
    roots = [outputs[i] for i in spec.differentiable]
    cotangents = _cast(cotangents, roots)
    sources, prefix, order = dict(targets), "", len(spec.orders)
    if order == 1:
        out.update(_gradients(roots, sources, cotangents, taking))
        return
    for level in range(1, order + 1):
        last = level == order
        if not last:
            cotangents = [c.detach().clone().requires_grad_() for c in cotangents]
        gradients = torch.autograd.grad(
            roots, list(sources.values()), list(cotangents), allow_unused=True, create_graph=not last
        )
        out.update({f"{prefix}gradient of {n}": g for n, g in zip(sources, gradients, strict=True)})
        if last:
            return
        sources |= {f"incoming {prefix}gradient {i}": c for i, c in enumerate(cotangents)}
        roots = [g for g in gradients if g is not None]
        generator = torch.Generator().manual_seed(SEED + level)
        draws = [
            torch.randn(g.shape, generator=generator, dtype=torch.complex64 if g.is_complex() else torch.float32)
            for g in roots
        ]
        cotangents = [c.to(g) for c, g in zip(draws, roots, strict=True)]
        prefix = ("second-order ", "third-order ", "fourth-order ")[level - 1]


class _GradientSink:
    """Passes each gradient to ``take`` when backward has computed it. Autograd gets a single expanded number instead,
    so that memory can be freed."""

    def __init__(self, take: Take):
        self.taken: dict[int, torch.Tensor] = {}  # by the identity of the target
        self._take = take

    @contextlib.contextmanager
    def hooked(self, targets: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Hook each target inside, and leave no trace: float32 and float64 tensors are swapped under a parameter, and
        one of them would lack the hooks that are registered on the other."""
        with contextlib.ExitStack() as stack:
            for name, target in {id(t): (n, t) for n, t in targets.items()}.values():
                if not target._backward_hooks:
                    stack.callback(setattr, target, "_backward_hooks", target._backward_hooks)
                stack.callback(
                    target.register_hook(functools.partial(self._hook, f"gradient of {name}", target)).remove
                )
            yield

    def _hook(self, name: str, target: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        if id(target) in self.taken:
            raise RuntimeError(f"the {name} is computed twice")  # the program calls backward within its own backward
        self.taken[id(target)] = result = self._take(name, target, gradient)
        return gradient if result is gradient else gradient.new_zeros(()).expand_as(gradient)


def _gradients(
    roots: Sequence[torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    cotangents: Sequence[torch.Tensor] | None,
    taking: _GradientSink | None,
) -> Named:
    """Call ``torch.autograd.grad``; return results by "gradient of NAME"."""
    with taking.hooked(targets) if taking is not None else contextlib.nullcontext():
        gradients = torch.autograd.grad(
            roots, list(targets.values()), None if cotangents is None else list(cotangents), allow_unused=True
        )
    replacements = {} if taking is None else taking.taken
    return {
        f"gradient of {n}": replacements.get(id(t), g) for (n, t), g in zip(targets.items(), gradients, strict=True)
    }


def _cast(cotangents: Sequence[torch.Tensor], roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return incoming gradients in the dtypes of their outputs, which differ in float64."""
    return [c.to(o.dtype) for c, o in zip(cotangents, roots, strict=True)]


def _accumulated(
    roots: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor] | None,
    parameters: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
) -> Named:
    """Return ``.grad`` of the ``targets`` in ``parameters`` after a caller's ``backward()`` of ``roots``, by "gradient
    of NAME". It passes no ``inputs=``, so that eager's kernels run as in training. The parameters' own ``.grad`` are
    restored."""
    parameter_ids = {id(p) for p in parameters.values()}
    leaves = {n: t for n, t in targets.items() if id(t) in parameter_ids}
    if not leaves or not roots:
        return {}
    before = [(p, p.grad) for p in parameters.values()]
    try:
        for p, _ in before:
            p.grad = None
        torch.autograd.backward(roots, cotangents)
        return {f"gradient of {n}": p.grad for n, p in leaves.items()}
    finally:
        for p, grad in before:
            p.grad = grad


def _fresh_leaves(example: Example) -> Example:
    return example.with_tensors([t.detach().clone().requires_grad_(t.requires_grad) for t in example.tensors])


def _copied(results: Named, taking: _GradientSink | None = None) -> Named:
    """Replace the tensors in ``results`` by copies, one after the other. Tensors from ``take`` are not shared and
    stay."""
    taken_ids = set() if taking is None else {id(t) for t in taking.taken.values()}
    for name, value in results.items():
        if value is not None and id(value) not in taken_ids:
            results[name] = value.detach().clone()
    return results

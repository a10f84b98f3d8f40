"""What a compiled ``module`` or ``grad`` entry costs beside eager: forward and backward of one call, on the example's tensors, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.loader import Package

from ..capture import layer_patches, preserve
from . import stopwatch
from .example_sizes import Example, Sized
from .named_results import Wrt, differentiated, tensors_of

EAGER = "eager"


def measure(
    packages: Mapping[str, Package],
    entry: str,
    number: int,
    program: nn.Module,
    wrt: Wrt | None,
    sized: Sized,
    cotangents: Sequence[torch.Tensor],
    seconds: float,
) -> dict[str, float]:
    """Microseconds of one call of eager (:data:`EAGER`) and of the entry as each of ``packages`` holds it. Buffers and gradients are put back.

    ``wrt``: of a ``grad`` entry, as in :func:`.named_results.results_of_eager`."""
    with contextlib.ExitStack() as stack:
        spec = next(iter(packages.values())).manifest.entries[entry].variants[number]
        calls = {EAGER: stack.enter_context(_eager(program, wrt, spec, sized.example, cotangents))}
        for name, package in packages.items():
            spec = package.manifest.entries[entry].variants[number]
            calls[name] = stack.enter_context(_compiled(package, entry, spec, sized.example, cotangents))
        return stopwatch.microseconds(calls, seconds)


@contextlib.contextmanager
def _eager(program: nn.Module, wrt: Wrt | None, spec: VariantSpec, example: Example, cotangents: Sequence[torch.Tensor]) -> Iterator[stopwatch.Call]:
    parameters = dict(program.named_parameters(remove_duplicate=False))
    if wrt is None:
        targets = list(differentiated(spec, parameters, example).values())
    else:
        targets = [example.tensors[where] if kind == "input" else parameters[where] for kind, where in wrt]
    with (
        preserve.in_mode(program, example.mode),
        preserve.slots_kept(program),
        preserve.values_kept(program.buffers()),
        preserve.requiring_alone(parameters.values(), targets),
        layer_patches.plain_checkpoints(),
        torch.enable_grad(),
    ):
        if wrt is not None:
            yield lambda: torch.autograd.grad(tensors_of(program(*example.args, **example.kwargs))[0], targets, allow_unused=True)
        else:
            yield _forward_and_backward(program, spec, example, targets, cotangents)


@contextlib.contextmanager
def _compiled(package: Package, entry: str, spec: VariantSpec, example: Example, cotangents: Sequence[torch.Tensor]) -> Iterator[stopwatch.Call]:
    if package.manifest.entries[entry].kind == "grad":
        grad = package.grad(entry)
        if example.mode:
            grad.train(example.mode == "train")
        with preserve.values_kept(t for t in grad.parameters.values() if not t.requires_grad):
            yield lambda: grad(*example.args, **example.kwargs)
        return
    module = package.module(entry).train(example.mode == "train")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    targets = list(differentiated(spec, parameters, example).values())
    with preserve.values_kept(module.buffers()), preserve.requiring_alone(parameters.values(), targets), torch.enable_grad():
        yield _forward_and_backward(module, spec, example, targets, cotangents)


def _forward_and_backward(
    module: nn.Module, spec: VariantSpec, example: Example, targets: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor]
) -> Callable[[], object]:
    if not targets or not spec.differentiable:
        return lambda: module(*example.args, **example.kwargs)

    def call() -> object:
        outputs = tensors_of(module(*example.args, **example.kwargs))
        return torch.autograd.grad([outputs[i] for i in spec.differentiable], targets, cotangents, allow_unused=True)

    return call

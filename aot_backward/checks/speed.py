"""Time a compiled entry and eager, on the example's tensors and in one process: forward and backward of a ``module`` or
``grad`` entry, the whole step of a ``step`` entry. Eager uses the user's own module, loss and optimizer.

Buffers, gradients, parameters and the optimizer's state are restored.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from aot_backward_exporters.process_state import without_crashes
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.loader import Package

from ..capture import layer_patches, preserve
from . import step_check, stopwatch
from .example_sizes import Example, Sized, cotangents_at
from .named_results import Wrt, differentiated, tensors_of
from .stopwatch import Call

EAGER = "eager"


class Timed(Protocol):
    """A pair of calls to time. Each method returns a context that allows any number of calls inside."""

    def eager(self, spec: VariantSpec, sized: Sized) -> AbstractContextManager[Call]: ...

    def compiled(self, package: Package, spec: VariantSpec, sized: Sized) -> AbstractContextManager[Call]: ...


def measure(
    packages: Mapping[str, Package], timed: Timed, spec: VariantSpec, sized: Sized, seconds: float
) -> dict[str, float]:
    """Return microseconds of one call of eager (:data:`EAGER`) and of each of ``packages``. Output that the program
    prints is discarded."""
    device = next(iter(packages.values())).device
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        calls = {EAGER: stack.enter_context(timed.eager(spec, sized))}
        with without_crashes() as avoided:
            calls[EAGER]()
        if avoided:
            stack.enter_context(without_crashes())
        calls |= {name: stack.enter_context(timed.compiled(package, spec, sized)) for name, package in packages.items()}
        if device.type == "cuda":
            return stopwatch.microseconds(calls, seconds, lambda: torch.cuda.synchronize(device))
        return stopwatch.microseconds(calls, seconds)


class ProgramTimed:
    """A ``module`` entry, or a ``grad`` entry with ``wrt`` as in :func:`.named_results.results_of_eager`."""

    def __init__(self, entry: str, program: nn.Module, wrt: Wrt | None):
        self._entry, self._program, self._wrt = entry, program, wrt

    @contextlib.contextmanager
    def eager(self, spec: VariantSpec, sized: Sized) -> Iterator[Call]:
        program, example = self._program, sized.example
        parameters = dict(program.named_parameters(remove_duplicate=False))
        if self._wrt is None:
            targets = list(differentiated(spec, parameters, example).values())
        else:
            targets = [example.tensors[key] if kind == "input" else parameters[key] for kind, key in self._wrt]
        with (
            preserve.in_mode(program, example.mode),
            preserve.slots_kept(program),
            preserve.attributes_kept(program),
            preserve.values_kept(program.buffers()),
            preserve.requiring_alone(parameters.values(), targets),
            layer_patches.plain_checkpoints(),
            torch.enable_grad(),
        ):
            if self._wrt is None:
                yield _forward_and_backward(program, spec, example, targets, cotangents_at(spec, sized.values))
            else:
                yield lambda: torch.autograd.grad(
                    tensors_of(program(*example.args, **example.kwargs))[0], targets, allow_unused=True
                )

    @contextlib.contextmanager
    def compiled(self, package: Package, spec: VariantSpec, sized: Sized) -> Iterator[Call]:
        example = sized.example
        if self._wrt is not None:
            grad = package.grad(self._entry)
            if example.mode:
                grad.train(example.mode == "train")
            yield lambda: grad(*example.args, **example.kwargs)
            return
        if package.entries[self._entry] == "function":
            function = package.function(self._entry).train(example.mode == "train")
            yield lambda: function(*example.args, **example.kwargs)
            return
        module = package.module(self._entry).train(example.mode == "train")
        parameters = dict(module.named_parameters(remove_duplicate=False))
        targets = list(differentiated(spec, parameters, example).values())
        with preserve.requiring_alone(parameters.values(), targets), torch.enable_grad():
            yield _forward_and_backward(module, spec, example, targets, cotangents_at(spec, sized.values))


class StepTimed:
    """A ``step`` entry."""

    def __init__(self, entry: str, case: step_check.Case):
        self._entry, self._case = entry, case

    @contextlib.contextmanager
    def eager(self, spec: VariantSpec, sized: Sized) -> Iterator[Call]:
        case, example = self._case, sized.example
        program, optimizer, settings = case.program, case.optimizer, case.settings
        parameters = [p for p in program.module.parameters() if case.names.get(id(p)) in case.trained]

        averages = [p.detach().clone() for p in parameters] if settings.ema is not None else []
        average = get_ema_multi_avg_fn(settings.ema or 0.0)
        scaler = torch.amp.GradScaler(
            parameters[0].device.type, settings.loss_scale or 1.0, enabled=settings.loss_scale is not None
        )

        def call() -> None:
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(pytree.tree_leaves(program(*example.args, **example.kwargs))[0]).backward()
            scaler.unscale_(optimizer)
            if settings.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
            if settings.clip_value is not None:
                torch.nn.utils.clip_grad_value_(parameters, settings.clip_value)
            scaler.step(optimizer)
            scaler.update()
            if settings.ema is not None:
                average(averages, parameters, None)

        with step_check.everything_kept(case, example), preserve.attributes_kept(program), torch.enable_grad():
            yield call

    @contextlib.contextmanager
    def compiled(self, package: Package, spec: VariantSpec, sized: Sized) -> Iterator[Call]:
        example = sized.example
        step = package.step(self._entry).train(example.mode == "train")
        yield lambda: step(*example.args, **example.kwargs)


def _forward_and_backward(
    module: nn.Module,
    spec: VariantSpec,
    example: Example,
    targets: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
) -> Callable[[], object]:
    if not targets or not spec.differentiable:
        return lambda: module(*example.args, **example.kwargs)

    def call() -> object:
        outputs = tensors_of(module(*example.args, **example.kwargs))
        return torch.autograd.grad([outputs[i] for i in spec.differentiable], targets, cotangents, allow_unused=True)

    return call

"""The ``autograd.Function`` of a loaded module: forward and backward are native code in one autograd node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import torch_api
from ..errors import GradientError
from ..native.captured_graph import PooledOutputs
from ..native.library import Binding
from ..native.variant import Differentiated, Variant
from .dispatch import Entry, MatchedCall

_NO_SECOND_DERIVATIVE = (
    "the package has no derivatives of this order: export the module with order=2 for second derivatives, or export the gradients themselves as a "
    "program (export_grad of a function that calls torch.autograd.grad(..., create_graph=True)), or use eager"
)


class DifferentiableCall:
    """One forward call, kept for its backward."""

    __slots__ = (
        "__weakref__",
        "binding",
        "consumed",
        "current",
        "differentiated",
        "matched",
        "memory",
        "pooled",
        "random",
        "shared",
        "sources",
    )

    def __init__(
        self, matched: MatchedCall, differentiated: Differentiated, binding: Binding, current: Sequence[torch.Tensor]
    ):
        """``current``: the entry's state."""
        self.matched, self.differentiated, self.binding, self.current = matched, differentiated, binding, current
        self.shared = False  # whether hooks hold the saved tensors
        self.consumed = False  # whether a backward may have overwritten them
        self.pooled: PooledOutputs | None = None  # the saved tensors, if they stay in a memory pool
        # The generators' states before the forward, if a second derivative draws the same numbers
        self.random: Sequence[torch.Tensor] = ()

    sources: Sequence[torch.Tensor]
    memory: Sequence[tuple[int, int, torch.Size]]
    """For each saved input: its index among the saved tensors, address and shape. Empty if hooks may return copies."""


RECORDED_MODULE = "aot_backward_runtime.module"
"""The module name of the two functions below. A recorded backward pass is identified by the names of its custom
functions, so a renamed function or another value here would make passes recorded through a loaded module unfindable."""


class _Native(torch.autograd.Function):
    """One node of the autograd graph for the whole compiled program. Its tensor arguments are the tensors that need
    gradients."""

    __module__ = RECORDED_MODULE

    @staticmethod
    def forward(ctx: Any, call: DifferentiableCall, *sources: torch.Tensor) -> tuple[torch.Tensor, ...]:
        derivative, flat, current, sizes = call.differentiated, call.matched.flat, call.current, call.matched.sizes
        forward, double = derivative.forward, derivative.double
        ctx.set_materialize_grads(False)
        if double is not None and double.spec.random:
            call.random = _generator_states(double)
        forward.increment_versions(current)
        hooked = torch_api.saved_tensors_hooks(False) is not None  # they may return copies, and keep the originals
        if forward.pools_outputs:
            results, call.pooled = forward.call_forward(call.binding, flat, sizes, call, hooked)
            outputs = results if call.pooled is None else call.pooled.with_copies(forward.results)
        else:
            outputs = results = forward.call(call.binding, flat, sizes)
        if derivative.variant.spec.shared:
            derivative.variant.share(forward, outputs, sizes, derivative.detached)
        lists = results, flat, current
        saved = [lists[where][i] for where, i in derivative.kept]
        if double is None:
            call.current = ()  # do not keep the parameters alive in addition to autograd's references
        if call.pooled is not None:
            saved += [outputs[i] for i in forward.kept_results if outputs[i] is not results[i]]
        if double is not None:  # second derivatives need the sources with their history, which only autograd has
            saved += sources
        ctx.save_for_backward(*saved)
        call.sources = sources
        call.shared = hooked and bool(derivative.backward.consumes)
        call.memory = () if hooked else [(i, saved[i].data_ptr(), saved[i].shape) for i in forward.saved_inputs]
        ctx.call = call
        if derivative.detached:
            ctx.mark_non_differentiable(*[outputs[i] for i in derivative.detached_results])
        return tuple([outputs[i] for i in forward.results])

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        grad_outputs = [incoming[i] for i in call.differentiated.variant.incoming]
        saved = ctx.saved_tensors
        if call.consumed:
            raise GradientError(
                "an earlier backward of this graph failed, and may have overwritten its saved tensors: run the forward again"
            )
        for i, address, shape in call.memory:
            if saved[i].data_ptr() != address or saved[i].shape != shape:
                raise GradientError(
                    "the memory of an input was replaced (.data = …) between forward and backward; pass a copy to the forward instead"
                )
        needs_grad = ctx.needs_input_grad[1:]
        for gradient in grad_outputs:
            if gradient is not None and torch_api.is_mapped(gradient):
                return (None, *_one_by_one(call, saved, grad_outputs, needs_grad, gradient))
        return (None, *_pulled_back(call, saved, grad_outputs, needs_grad))


def _one_by_one(
    call: DifferentiableCall,
    saved: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    needs_grad: Sequence[bool],
    like: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Run the backward for each gradient of a batch (``is_grads_batched=True``, ``vmap`` over ``torch.autograd.grad``).
    ``like``: a mapped one."""
    batches = {i: torch_api.unmapped(g) for i, g in enumerate(grad_outputs) if g is not None and torch_api.is_mapped(g)}
    count = len(next(iter(batches.values())))
    runs = []
    for n in range(count):
        row = [batches[i][n] if i in batches else g for i, g in enumerate(grad_outputs)]
        gradients = _pulled_back(call, saved, row, needs_grad, last=n == count - 1)
        if call.differentiated.forward.pools_outputs:  # the next run overwrites them
            gradients = [None if g is None else g.clone() for g in gradients]
        runs.append(gradients)
    return [None if rows[0] is None else torch_api.mapped(torch.stack(rows), like) for rows in zip(*runs, strict=True)]


def _pulled_back(
    call: DifferentiableCall,
    saved: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    needs_grad: Sequence[bool],
    last: bool = True,
) -> Sequence[torch.Tensor | None]:
    """Return the gradients, differentiable in their turn if autograd records. ``last``: whether no other run needs the
    saved tensors."""
    derivative = call.differentiated
    if not torch.is_grad_enabled():
        return _gradients(call, saved, grad_outputs, needs_grad, last)
    if derivative.double is not None:
        return _differentiable_gradients(call, saved[len(saved) - len(call.sources) :], grad_outputs, needs_grad)
    with torch.no_grad():
        gradients = _gradients(call, saved, grad_outputs, needs_grad, last)
    defined_grads = [g for g in gradients if g is not None]
    guarded_grads = iter(_Refusing.apply(defined_grads, *call.sources, *(t for t in grad_outputs if t is not None)))
    return [None if g is None else next(guarded_grads) for g in gradients]


def _gradients(
    call: DifferentiableCall,
    saved: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    needs_grad: Sequence[bool],
    last: bool,
) -> list[torch.Tensor | None]:
    """Return the compiled backward's gradients, if ``needs_grad``. ``grad_outputs``: the incoming gradients. ``last``:
    as for :func:`_pulled_back`."""
    derivative, matched = call.differentiated, call.matched
    cotangents = derivative.variant.fit_cotangents(grad_outputs, matched.sizes)
    places = derivative.places if cotangents is grad_outputs else derivative.reached(grad_outputs)
    if derivative.backward.consumes:
        if call.shared or not last or torch_api.keeps_graph():
            saved = derivative.backward.unconsumed(saved)
        else:
            call.consumed = True
    if derivative.forward.pools_outputs:
        results = _pooled_backward(call, saved, cotangents, last)
    else:
        results = derivative.backward.call(call.binding, matched.flat, matched.sizes, saved, cotangents)
    return [
        None if place is None or not need else results[place] for place, need in zip(places, needs_grad, strict=True)
    ]


_apply = super(torch.autograd.Function, _Native).apply
"""``_Native.apply`` without its search for wrapped tensors left by a torch.func transform: a matched call has none."""


def apply(call: DifferentiableCall, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the results of a forward with a native backward. ``sources``: the tensors that need gradients, as
    :func:`differentiated` orders them."""
    outside = _Native.apply if torch_api.in_functorch() else _apply  # _Native.apply refuses tensors inside a transform
    return outside(call, *sources)


def _pooled_backward(
    call: DifferentiableCall, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], last: bool
) -> list[torch.Tensor]:
    """Run the backward of a forward whose library pools outputs. If it did, read inputs from the forward's static
    inputs: they still have the same values, as autograd has checked."""
    inputs, sizes, pooled, derivative = call.matched.flat, call.matched.sizes, call.pooled, call.differentiated
    if pooled is None:
        return derivative.backward.call_backward(call.binding, inputs, sizes, saved, cotangents, None)
    inputs = [pooled.input(i, t) for i, t in enumerate(inputs)]
    static_saved = [
        pooled.input(w, t) if kind == "input" else t
        for (kind, w), t in zip(derivative.forward.saved, saved, strict=False)
    ]
    results = derivative.backward.call_backward(call.binding, inputs, sizes, static_saved, cotangents, pooled)
    if last and not torch_api.keeps_graph():
        pooled.release()
    return results


def _differentiable_gradients(
    call: DifferentiableCall,
    sources: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None],
    needs_grad: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Compute the gradients by the program that can be differentiated again (``VariantSpec.double``). ``sources``: the
    forward's, with their autograd history."""
    derivative = call.differentiated
    variant, double = derivative.variant, derivative.double
    assert double is not None
    inputs: list[torch.Tensor] = list(call.matched.flat)
    parameters = []
    for target, source in zip(derivative.wrt, sources, strict=True):
        kind, _, where = target.partition(":")
        if kind == "input":
            inputs[int(where)] = source
        else:
            parameters.append((target, source))
    tensors = [*inputs, *variant.materialized(grad_outputs, call.matched.sizes)]
    flat, sizes, _ = double.contract.fit(tensors)
    targets = [(f"input:{i}", t) for i, t in enumerate(tensors) if t.requires_grad] + parameters
    matched = MatchedCall(double, tensors, flat, sizes)
    second_derivative = double.differentiated([t for t, _ in targets])
    double_call = DifferentiableCall(matched, second_derivative, call.binding, call.current)
    with _generators_at(call.random, double):
        results = apply(double_call, [source for _, source in targets])
    gradients = dict(zip(double.spec.gives, results, strict=True))
    return [
        gradients.get(t) if need and place is not None else None
        for t, place, need in zip(derivative.wrt, derivative.reached(grad_outputs), needs_grad, strict=True)
    ]


def _generator_states(variant: Variant) -> list[torch.Tensor]:
    return [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(variant.device)] if variant.device.type == "cuda" else []),
    ]


@contextlib.contextmanager
def _generators_at(states: Sequence[torch.Tensor], variant: Variant) -> Iterator[None]:
    """Draw random numbers from ``states``, if any, inside the context; restore the generators' own states
    afterwards."""
    if not states:
        yield
        return
    with torch.random.fork_rng(devices=[variant.device] if variant.device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], variant.device)
        yield


class _Refusing(torch.autograd.Function):
    """The same gradients, followed by a node that raises when they are differentiated again."""

    __module__ = RECORDED_MODULE

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *history: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> Any:
        raise GradientError(_NO_SECOND_DERIVATIVE)


def differentiated(
    entry: Entry, variant: Variant, current: Sequence[torch.Tensor], matched: MatchedCall
) -> tuple[list[int], list[int]]:
    """Return the places of the tensors that need gradients in this call, in the state and among the inputs. Raise
    :class:`GradientError` if the package lacks the gradient of one."""
    wrt, covered = variant.wrt, variant.covered
    state, inputs = [], []
    for i, target in entry.state.wrt:
        if current[i].requires_grad:
            if target in wrt:
                state.append(i)
            elif target not in covered:
                name = entry.state.names[i]
                raise GradientError(
                    f"{name} requires a gradient, and was frozen when the package was exported: freeze it again, or export it unfrozen "
                    f"(a Variant with requires_grad=[…, {name!r}])"
                )
    for i, tensor in enumerate(matched.given):
        if tensor.requires_grad:
            target = f"input:{i}"
            if target in wrt:
                inputs.append(i)
            elif target not in covered:
                name = variant.spec.inputs[i].name
                raise GradientError(
                    f"input {name} requires a gradient, and did not when the package was exported: pass {name}.detach(), or export a Variant "
                    f"with requires_grad=[…, {name!r}]"
                )
    return state, inputs

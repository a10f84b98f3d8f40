"""Hooks on the gradients of a training step (``step.parameters[name].register_hook``): they run between the backward
and the update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .. import torch_api
from ..entries.bound_parameter import StepParameter, apply_hooks
from .state import TrainingState


def refuse_hooks_that_never_run(parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    """Make hook registration raise on each of ``parameters`` without an entry in ``gradients``, which native code
    leaves in memory."""
    served = {id(parameters[n]) for n in gradients}
    for name, parameter in parameters.items():
        if id(parameter) not in served and isinstance(parameter, StepParameter):
            parameter._no_hook = (
                f"a hook on {name} would never run: its parameter gets no gradient from this step, because the optimizer does not train it"
                if gradients
                else f"a hook on {name} would never run: this step makes gradients and update in one native call. Export it with accumulate=True, "
                "which keeps them apart; or register the hook before the export, which traces it"
            )


def add_through_hooks(
    state: TrainingState,
    call: Iterator[list[torch.Tensor]],
    hooked: Mapping[str, torch.Tensor],
    results: list[list[torch.Tensor]],
    ran: list[Any],
) -> None:
    """Run ``call``, which accumulates gradients, with the hooks of ``hooked`` (parameters by name) applied to this
    call's gradients.

    The call's results are appended to ``results``. ``ran`` gets an element once the sums are in the accumulated
    gradients. If a hook raises or an interrupt comes before that, the gradients accumulated earlier are restored.
    """
    slots = list(state.gradients.values())
    backup = [s.detach().clone() for s in slots] if state.accumulated else None
    try:
        state.numbers.set_accumulating(False)  # each hook gets this call's gradient, as in eager
        results.extend(call)
        # Eager's hooks get gradients of the scaled loss
        scale = state.scaler.get_scale() if state.scaler is not None else 1.0
        new_gradients = dict(
            zip(hooked, apply_hooks(list(hooked.values()), [state.gradients[n] * scale for n in hooked]), strict=True)
        )
        sums = [new_gradients[n] / scale if n in new_gradients else s.clone() for n, s in state.gradients.items()]
        if backup is not None:
            torch_api.foreach_add_(sums, backup)
        ran.extend(map(torch_api.foreach_copy_, (slots,), (sums,)))
    finally:
        if not ran:
            if backup is not None:
                torch_api.foreach_copy_(slots, backup)
            state.set_accumulated(state.accumulated)

"""``python -m tests.tools.benchmarks.unchecked MODEL EXPORTED PACKAGE STEPS``: the steps of ``unmodified.py``, by
native code without guards.

The native code comes from the exported module and the recorded optimizer steps. A replay that leaves the loss and
``backward()`` to the script cannot be faster. The module's call keeps PyTorch's part: an ``autograd.Function`` that
takes the parameters and saves the tensors that its backward reads. It checks nothing: no arguments, no parameters, no
gradients, no state, no hooks, no modes. Its output has the same form as that of ``unmodified.py``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from aot_backward_runtime import load
from aot_backward_runtime.entries.module import LoadedModule
from aot_backward_runtime.native.variant import Differentiated
from aot_backward_runtime.optimizer_steps.compiled_clipping import CompiledClipping
from aot_backward_runtime.optimizer_steps.compiled_update import name_of
from aot_backward_runtime.passes.session import Replaying

from . import unmodified

_WARM = 3  # eager steps; they make the optimizer's state


class _Unchecked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, made: _Made, sizes: dict[str, int], x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        forward = made.of.forward
        lists = made.forward(forward._operands((x,), sizes, (), ())), (x,), made.state
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[lists[where][i] for where, i in made.saved])
        ctx.made, ctx.sizes = made, sizes
        return tuple([lists[0][i] for i in forward.results])

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
        made = ctx.made
        results = made.backward(made.of.backward._operands((), ctx.sizes, ctx.saved_tensors, incoming))
        return (None, None, None, *[results[place] for place in made.of.places])


_apply = super(torch.autograd.Function, _Unchecked).apply


class _Made:
    """A loaded module that calls its native code directly."""

    def __init__(self, module: LoadedModule, x: torch.Tensor):
        entry, self.state = module._aot_entry, module._aot_current()
        matched = entry.match("train", (x,), {})
        self.variant, binding = matched.variant, entry.state.refresh(self.state)
        self.of: Differentiated = self.variant.differentiated([target for _, target in entry.state.wrt])
        libraries = [plan.library for plan in (self.of.forward, self.of.backward)]
        for library in libraries:
            assert library is not None
            library.bind(binding)
        self.forward, self.backward = (library.raw_run for library in libraries if library is not None)
        self.saved = self.of.kept[: len(self.of.forward.saved)]
        self.parameters = [self.state[i] for i, _ in entry.state.wrt]
        self.sizes: dict[torch.Size, dict[str, int]] = {}

    def __call__(self, x: torch.Tensor) -> Any:
        sizes = self.sizes.get(x.shape)
        if sizes is None:
            sizes = self.sizes[x.shape] = self.variant.contract.solve([x])
        results = _apply(self, sizes, x, *self.parameters)
        return results[0] if len(results) == 1 else results


def main(name: str, exported: str, package: str, steps: int) -> None:
    module: Any = load(exported).module().train()
    session = Replaying(load(package))
    torch.manual_seed(0)
    make, batch, rows, loss_of = unmodified.MODELS[name]
    module.load_state_dict(make().state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    parameters = list(module.parameters())
    net: Any = module
    clip: Any = None
    update: Any = None
    limit = written = numbers = None
    times, losses, after_ten = [], [], 0.0
    for step in range(steps):
        given = batch(rows if step % 10 else rows // 2)
        start = time.perf_counter()
        loss = loss_of(net, *given)
        for p in parameters:
            p.grad = None
        loss.backward()
        gradients: Sequence[Any] = [p.grad for p in parameters]
        if clip is None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        else:
            clip.library.raw_run([*gradients, limit])
            update.code.library.raw_run([*gradients, *written, numbers])
        if step % 10:
            times.append(time.perf_counter() - start)
        if step < 50:
            losses.append(loss.item())
        if step == 9:
            after_ten = sum(p.double().sum().item() for p in parameters)
        if step == _WARM - 1:
            net = _Made(module, given[0])
            clip = next(
                c for codes in session.steps.table._codes.values() for c in codes if isinstance(c, CompiledClipping)
            )
            clip.bind(gradients)
            limit = clip._vector(1.0, False)
            update = session.steps.table._bind(name_of(type(optimizer)), optimizer)
            written, numbers = update._written.tensors, update._vector
    count = sum(p.numel() for p in parameters)
    print(
        json.dumps(
            {
                "seconds": statistics.median(times[len(times) // 2 :]),
                "losses": losses,
                "parameters": count,
                "after_ten": after_ten,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))

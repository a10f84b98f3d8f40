"""Run and count a script's optimizer steps and clippings during a replay or recording: by compiled code if it fits,
else in eager."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import InputError
from ..loader import Package
from ..optimizer_steps.compiled_clipping import CompiledClipping, Kind
from ..optimizer_steps.compiled_table import CompiledTable, Met
from ..optimizer_steps.compiled_update import CompiledUpdate, name_of
from ..optimizer_steps.interception import Eager
from .recorded_times import is_served
from .replay_report import Report


class StepObserver(Protocol):
    """An observer of steps and clippings before eager runs them, to compile them later."""

    def observe(self, optimizer: torch.optim.Optimizer) -> None: ...

    def observe_clipping(self, kind: Kind, gradients: list[torch.Tensor], limit: float) -> None: ...


class ServedSteps:
    """An interceptor (``optimizer_steps/interception.py``). With an ``observer``, calls that run in eager go to it and
    are not counted in ``report``."""

    def __init__(
        self, package: Package | None, entry: str | None, report: Report, observer: StepObserver | None = None
    ):
        updates = package.recorded_updates(entry) if package is not None else ()
        clippings = package.recorded_clippings(entry) if package is not None else ()
        served = [CompiledUpdate(spec, library) for spec, library in updates if is_served(spec.speed)]
        served_clippings = [CompiledClipping(spec, library) for spec, library in clippings if is_served(spec.speed)]
        self.table = CompiledTable([*((c.spec.optimizer, c) for c in served), *((c.kind, c) for c in served_clippings)])
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, Met] = weakref.WeakKeyDictionary()
        self._clippings: dict[tuple[Kind, int], Met] = {}  # by the number of gradients, too
        self._report, self._observer = report, observer

    def __bool__(self) -> bool:
        """Return whether there is anything to intercept."""
        return bool(self.table) or self._observer is not None

    def optimizer_step(self, optimizer: torch.optim.Optimizer, eager: Eager, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:  # eager does this first, too
            with torch.enable_grad():
                loss = closure()
        try:
            met = self._optimizers.get(optimizer)
            if met is None:
                met = self._optimizers[optimizer] = Met(name_of(type(optimizer)))
            self.table.run(met, optimizer)
        except InputError as error:
            if self._observer is not None:
                self._observer.observe(optimizer)
            else:
                self._report.eager_steps.note(str(error))
        else:
            self._report.steps += 1
            return loss
        eager(optimizer)
        return loss

    def clip_gradients(
        self, kind: Kind, gradients: list[torch.Tensor], limit: float, keep_nonfinite: bool, eager: Callable[[], Any]
    ) -> Any:
        try:
            met = self._clippings.get((kind, len(gradients)))
            if met is None:
                met = self._clippings[kind, len(gradients)] = Met(kind)
            clipping, result = self.table.run(met, gradients, limit, keep_nonfinite)
        except InputError as error:
            if self._observer is not None:
                self._observer.observe_clipping(kind, gradients, limit)
            else:
                self._report.eager_clippings.note(str(error))
            return eager()
        self._report.clippings += 1
        if keep_nonfinite and not math.isfinite(result):
            return eager()  # raises; the gradients are unchanged
        return result if clipping.spec.norm_type else None

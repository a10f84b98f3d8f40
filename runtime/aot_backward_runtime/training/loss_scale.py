"""The factor that scales a step's loss, so that small gradients in float16 do not vanish: the rule of
``torch.amp.GradScaler``."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from .param_groups import Numbers

KEY = "loss_scale"
_MAX_FLOAT = sys.float_info.max  # also the limit for Python's integers


class LossScale:
    """The factor that a compiled step scales its loss by. It unscales its gradients before it uses them.

    It follows the rule of ``torch.amp.GradScaler``.

    Attributes:
        backoff_factor: The scale is multiplied by it after a skipped update. You may set it to a positive number; 0.5
            at first.
        growth_factor: The scale is multiplied by it after ``growth_interval`` updates in a row. You may set it to a
            positive number; 2 at first.
        growth_interval: The number of these updates. You may set it to a positive int; 2000 at first.

    Examples:
        >>> step = load("scaled.pt2").step()
        >>> step.scaler.get_scale()
        1024.0
    """

    def __init__(self, numbers: Numbers, initial: float):
        self._numbers = numbers
        self._now: tuple[float, int, object] = (initial, 0, None)
        """The scale, the updates since it changed, and the call that made the last of them."""
        self._written = initial
        self.growth_factor, self.backoff_factor, self.growth_interval = 2.0, 0.5, 2000

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            kinds = (int,) if name == "growth_interval" else (int, float)
            if (
                name not in ("growth_factor", "backoff_factor", "growth_interval")
                or type(value) not in kinds
                or not 0 < value <= _MAX_FLOAT
            ):
                raise StateError(
                    f"the loss scale's {name} is set to {value!r:.60}; growth_factor, backoff_factor and growth_interval are positive"
                )
        super().__setattr__(name, value)

    def get_scale(self) -> float:
        """Return the present scale."""
        return self._now[0]

    def set_scale(self, scale: float) -> None:
        """Set the scale; it is rounded to float32.

        Args:
            scale: A positive number within float32's range.

        Raises:
            StateError: The number is not positive and finite in float32.
        """
        try:
            rounded = _float32(scale)
        except (OverflowError, RuntimeError, TypeError, ValueError):
            rounded = math.nan
        if isinstance(scale, str) or not (rounded > 0 and math.isfinite(rounded)):
            raise StateError(f"the loss scale is {scale!r:.60}; expected a positive, finite number")
        self._now = (rounded, *self._now[1:])
        self.write()

    def update(self, finite: bool, call: object = None) -> None:
        """Adjust the scale after an update that was made, or skipped because a gradient was not finite. A repeated
        ``call`` changes nothing."""
        scale, tracker, last = self._now
        if call is None or last is not call:
            if not finite:
                scale, tracker = max(_float32(scale * self.backoff_factor), torch.finfo(torch.float32).tiny), 0
            elif tracker + 1 == self.growth_interval:
                grown, tracker = _float32(scale * self.growth_factor), 0
                scale = grown if math.isfinite(grown) else scale
            else:
                tracker += 1
            self._now = (scale, tracker, call)
        self.write()

    def write(self, again: bool = False) -> None:
        """Write the scale for native code, if it has changed or ``again`` is set."""
        if again or self._written != self._now[0]:
            self._numbers.set(-1, KEY, -1, self._now[0])
            self._written = self._now[0]

    def state_dict(self) -> dict[str, Any]:
        """Return a dict that ``torch.amp.GradScaler.load_state_dict`` reads."""
        return {
            "scale": self._now[0],
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._now[1],
        }

    def check(self, state: Any) -> None:
        """Raise :class:`StateError` if ``state`` is not a valid :meth:`state_dict`."""
        expected = self.state_dict()
        if not isinstance(state, Mapping) or state.keys() != expected.keys():
            raise StateError(
                f"the state of the loss scale is {state!r:.120}; expected {sorted(expected)}, as torch.amp.GradScaler has it"
            )
        for key, value in state.items():
            is_int = key in ("growth_interval", "_growth_tracker")
            if (
                type(value) not in ((int,) if is_int else (int, float))
                or not 0 <= value <= _MAX_FLOAT
                or (key != "_growth_tracker" and not value)
            ):
                raise StateError(f"the loss scale's {key} is {value!r:.60}; expected a positive number")
        if not 0 < _float32(state["scale"]) < math.inf:
            raise StateError(f"the loss scale is {state['scale']!r}; expected a positive, finite number")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class, or of a ``torch.amp.GradScaler``.

        Args:
            state: A result of ``state_dict()``.

        Raises:
            StateError: The state does not fit; nothing was changed.
        """
        self.check(state)
        self.set_scale(state["scale"])
        self.growth_factor, self.backoff_factor = state["growth_factor"], state["backoff_factor"]
        self.growth_interval, self._now = state["growth_interval"], (self._now[0], state["_growth_tracker"], None)


def _float32(value: float) -> float:
    """Round to float32, as ``GradScaler`` does."""
    return float(torch.tensor(float(value), dtype=torch.float32))

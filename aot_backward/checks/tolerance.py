"""Tolerances of compiled results. Every bound has one form, with a the result and t its reference:

    ‖a − t‖ ≤ absolute + relative·max(‖t‖, floor)

| comparison of                                | relative                       | floor  | absolute                    |
|----------------------------------------------|--------------------------------|--------|-----------------------------|
| a result with eager in float64               | 32·eps                         | 0.1·G  | 4·‖e − t‖ + 8·s             |
| a result with eager                          | r                              | 1e-3·G | 0                           |
| a graph's result with eager's operators      | r, of the coarsest dtype in it | 1e-2·G | 0                           |
| a training step's loss with eager in float64 | 16·eps, at least 1e-5          | 1e-3   | 4·‖e − t‖                   |
| a training step's loss with eager            | 16·eps, at least 2e-4          | 1e-3   | 0                           |
| a change by a step with eager in float64     | 16·eps                         | 0      | 4·‖e − t‖ + 2·eps·‖p‖ + 8·s |
| a change by a step with eager                | r                              | 0      | 4·eps·‖p‖ + 8·s             |

e is eager's result, eps that of its dtype, r its :data:`RELATIVE`, G the largest norm among the gradients (for a graph:
among its results), p the tensor after the step, which is stored with a rounding error of eps·‖p‖, and s the distance by
which t itself moves if its inputs are perturbed. So a result may be four times as far from float64 as eager. An
ill-conditioned program (BatchNorm over two rows) is not measured by eager's luck. A gradient that is truly zero (a bias
before BatchNorm) is not compared noise with noise. For a single number, which may be a sum of terms that cancel, s is
computed differently (``eager_check.py``). If a program computes in 16 bits somewhere (``reduced_precision``), a change,
and a result or loss compared with eager, have at least bfloat16's r; compared with float64, a result has at least 4e-3,
and a loss 1e-2. Norms skip elements that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 3e-2, torch.bfloat16: 6e-2}
RELATIVE |= {torch.complex64: 2e-4, torch.complex128: 1e-9, torch.complex32: 3e-2}
"""‖a − e‖ / ‖e‖ allowed if the reference is eager itself: both are rounded, each in its own order. The values are
guesses; docs/checks.md documents them."""
_OF_16_BITS = 4e-3
"""Allowed of a float32 result that is computed in bfloat16 somewhere: half of bfloat16's eps. Eager may be right by
chance: a GPT-2's loss under autocast, 8.3, was 2e-4 from float64's in eager, and 2e-3 in compiled code."""

_PIECE = 1 << 20  # elements in double precision at a time: bounds the memory of a comparison; a guess

Results = TypeVar("Results")


@dataclass(frozen=True)
class Reference(Generic[Results]):
    """The reference of a comparison: eager's results in float64 (``float64``), or eager's own. ``moved``: s of the
    table above for each result. ``eager_errors``: ‖e − t‖ of results that have replaced eager's own."""

    results: Results
    moved: Mapping[str, float]
    float64: bool
    eager_errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """``absolute`` + ``relative`` · max(‖t‖, ``floor``). ``eager_error`` of the constructors is ‖e − t‖ if t is
    float64's, and None if t is eager itself. ``reduced_precision``: the program computes in 16 bits somewhere, whatever
    the dtype of its results."""

    relative: float
    floor: float = 0.0
    absolute: float = 0.0

    def allowed(self, norm: float) -> float:
        """Return how far off a tensor of that norm may be."""
        return self.absolute + self.relative * max(norm, self.floor)

    @classmethod
    def of_result(
        cls,
        dtype: torch.dtype,
        largest: float,
        eager_error: float | None,
        moved: float = 0.0,
        *,
        reduced_precision: bool = False,
    ) -> Tolerance:
        """Return the tolerance of an output, a gradient or a buffer. ``largest``: the norm of the largest gradient."""
        if eager_error is None:
            return cls(max(RELATIVE[dtype], RELATIVE[torch.bfloat16] if reduced_precision else 0.0), 1e-3 * largest)
        relative = max(32 * torch.finfo(dtype).eps, _OF_16_BITS if reduced_precision else 0.0)
        return cls(relative, 0.1 * largest, 4 * eager_error + 8 * moved)

    @classmethod
    def of_graph_result(cls, dtype: torch.dtype, largest: float, coarsest: float) -> Tolerance:
        """Return the tolerance of a graph's result, compared with eager's operators. ``coarsest``: the largest
        :data:`RELATIVE` of its dtypes."""
        return cls(max(RELATIVE[dtype], coarsest), 1e-2 * largest)

    @classmethod
    def of_loss(cls, dtype: torch.dtype, eager_error: float | None, *, reduced_precision: bool) -> Tolerance:
        """Return the tolerance of the loss of one of several training steps."""
        least = RELATIVE[torch.bfloat16] if eager_error is None else 1e-2
        relative = max(
            16 * torch.finfo(dtype).eps, 2e-4 if eager_error is None else 1e-5, least if reduced_precision else 0.0
        )
        return cls(relative, 1e-3, 4 * (eager_error or 0.0))

    @classmethod
    def of_change(
        cls, dtype: torch.dtype, stored: float, eager_error: float | None, moved: float, *, reduced_precision: bool
    ) -> Tolerance:
        """Return the tolerance of the change that training steps make to a tensor with norm ``stored`` afterwards."""
        eps = torch.finfo(dtype).eps
        relative = max(
            RELATIVE[dtype] if eager_error is None else 16 * eps, RELATIVE[torch.bfloat16] if reduced_precision else 0.0
        )
        return cls(
            relative, 0.0, 4 * (eager_error or 0.0) + (4 if eager_error is None else 2) * eps * stored + 8 * moved
        )


@dataclass(frozen=True)
class Comparison:
    """The error of one result, and its tolerance."""

    name: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """``error`` / ``allowed``: the result is wrong if it is above 1, or NaN."""
        if self.allowed:
            return self.error / self.allowed
        return 0.0 if self.error == 0 else math.inf

    @property
    def wrong(self) -> bool:
        return not self.ratio <= 1


def compare(
    name: str, actual: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance, like: torch.Tensor | None = None
) -> Comparison:
    """Compare two floating-point tensors over the elements that are finite in ``like`` (eager's result; by default
    ``reference``)."""
    like = reference if like is None else like
    return Comparison(name, distance(actual, reference, like), tolerance.allowed(norm(reference, like)))


def compare_graph_result(
    name: str, actual: torch.Tensor, expected: torch.Tensor, largest: float, coarsest: float
) -> Comparison:
    """Compare a graph's result with eager's operators' (:meth:`Tolerance.of_graph_result`); integers and booleans must
    be equal."""
    if not is_inexact(expected):
        return Comparison(name, distance(actual, expected), 0.0)
    return compare(name, actual, expected, Tolerance.of_graph_result(expected.dtype, largest, coarsest))


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether the dtype is floating-point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def norm(tensor: torch.Tensor, like: torch.Tensor | None = None) -> float:
    """Return ‖tensor‖ in double precision over the elements finite in ``like`` (default ``tensor``): one Inf would
    allow all errors."""
    return math.hypot(
        *(_norm(_widened(t), torch.isfinite(same)) for t, same in pieces(tensor, tensor if like is None else like))
    )


def distance(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor | None = None) -> float:
    """Return ‖a − b‖ in double precision over the elements that are finite in ``like`` (default ``b``), or inf if other
    elements of ``a`` are finite. For integers and booleans, return how many differ."""
    like = b if like is None else like
    if not is_inexact(like):
        return float((a != like).sum())
    if not finite_alike(a, like):
        return math.inf
    return math.hypot(*(_norm(_widened(x) - _widened(y), torch.isfinite(same)) for x, y, same in pieces(a, b, like)))


def distance_of_finite(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return ‖a − b‖ in double precision over the elements that are finite in both."""
    return math.hypot(*(norm(_widened(x) - _widened(y)) for x, y in pieces(a, b)))


def finite_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the same elements of both are finite."""
    return all(torch.equal(torch.isfinite(x), torch.isfinite(y)) for x, y in pieces(a, b))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite."""
    return all(bool(torch.isfinite(t).all()) for (t,) in pieces(tensor))


def is_nan_throughout(tensor: torch.Tensor) -> bool:
    """Return whether it has elements, all of them NaN. With such a result no other result counts as wrong: nothing was
    compared."""
    return is_inexact(tensor) and tensor.numel() > 0 and all(bool(torch.isnan(t).all()) for (t,) in pieces(tensor))


def _norm(wide: torch.Tensor, mask: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.where(mask, wide, 0)))


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of one shape, cut alike along their longest dimension: in double precision a large one would take
    twice its memory repeatedly."""
    shape = tensors[0].shape
    if tensors[0].numel() <= _PIECE or any(t.shape != shape for t in tensors):
        yield tensors
        return
    length = max(shape)
    rows = max(1, _PIECE * length // tensors[0].numel())
    yield from zip(*(t.split(rows, dim=shape.index(length)) for t in tensors), strict=True)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

"""Store results in a package for ``verify``: small ones whole, large ones as a sketch, which always takes 8 KB.

It is an AMS sketch (Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments"). Each element
gets a random sign that depends only on its place, and is added to one of :data:`SUMS` sums. The sketch is linear, so
the norm of the difference of two sketches estimates ‖a − e‖: exactly if one element is off, within a tenth if many are.
Integers and booleans must be equal, and have a SHA-256 instead.

The keys behind ``ENTRY/N/``:

| key               | result                                            | value                                        |
|-------------------|---------------------------------------------------|----------------------------------------------|
| ``expected/NAME`` | up to :data:`MAX_WHOLE_BYTES`, or with NaN or Inf | the result, whole                            |
| ``sketch/NAME``   | larger, floating-point or complex numbers         | float64, ``(SUMS,)``                         |
| ``digest/NAME``   | larger, integers or booleans                      | uint8, ``(32,)``: SHA-256 of row-major bytes |
| ``allowed/NAME``  | each of these                                     | float64, ``()``: largest allowed difference  |
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping

import torch

from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.native.tensor_bytes import tensor_chunks

from .example_sizes import SEED
from .tolerance import Comparison, distance, is_finite, is_inexact

Stored = dict[str, torch.Tensor]
"""Stored inputs and results of a package, by key."""

MAX_WHOLE_BYTES = 1 << 16
"""Larger results are not stored whole (docs/format.md, section 2). With whole results the package of a GPT-2 with 124
million parameters took 2.0 times its weights, with sketches 1.004 times."""

SUMS = 1021
"""A prime, so that neighbours in a column are added to different sums for any number of columns. docs/format.md
(section 2) fixes it."""

MARGIN = 1.5
"""Factor on the tolerance for sketches. The error of an estimate hardly ever exceeds it. docs/format.md (section 2)
fixes it."""


_BLOCK = SUMS << 8  # elements that are added at once, 2 MB in float64; docs/format.md does not depend on it
_KEPT_BLOCKS = 64
"""Blocks whose signs are kept, 17 MB at most. A sketch takes 1.6 ns an element with kept signs, 7 with drawn ones. The
export of a step with Adam sketches 26 times as many elements as it has parameters."""
_kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the block's number, as from _drawn()


def is_large(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.itemsize > MAX_WHOLE_BYTES


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the float64 sketch, of shape ``(SUMS,)``, on the CPU."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().reshape(-1)
    sums = torch.zeros(SUMS, dtype=torch.float64)
    for piece, signs in zip(flat.split(_BLOCK), _signs(), strict=False):
        signed = piece.to("cpu", torch.float64, copy=True).mul_(signs[: len(piece)])
        rows = len(piece) // SUMS * SUMS
        sums += signed[:rows].view(-1, SUMS).sum(0)
        sums[: len(piece) - rows] += signed[rows:]
    return sums


def sketch_of_finite(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the sketch, or None if a sum is Inf or NaN: an element is, or the sum overflows."""
    sums = sketch(tensor)
    return sums if is_finite(sums) else None


def _signs() -> Iterator[torch.Tensor]:
    """Yield the signs of each block of elements, as int8."""
    state = torch.Generator().manual_seed(SEED).get_state()
    for number in itertools.count():
        drawn = _kept.get(number) or _drawn(state)
        if number < _KEPT_BLOCKS:
            _kept[number] = drawn
        signs, state = drawn
        yield signs


def _drawn(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next block's signs, and the generator's state after them."""
    generator = torch.Generator().set_state(state)
    signs = torch.randint(0, 2, (_BLOCK,), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
    return signs, generator.get_state()


def sketched_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Estimate ‖a − b‖ from their sketches."""
    return float(torch.linalg.vector_norm(a - b))


def store(stored: Stored, prefix: str, name: str, result: torch.Tensor, allowed: float) -> None:
    """Add ``result`` to ``stored``, under ``prefix/…/name``, and ``allowed``, the largest norm of a later result's
    difference."""
    if is_large(result) and is_inexact(result) and (sums := sketch_of_finite(result)) is not None:
        store_sketch(stored, prefix, name, sums, allowed)
        return
    if is_large(result) and not is_inexact(result):
        stored[f"{prefix}/digest/{name}"] = _digest(result)
    else:
        stored[f"{prefix}/expected/{name}"] = result.contiguous()
    stored[f"{prefix}/allowed/{name}"] = torch.tensor(allowed, dtype=torch.float64)


def store_sketch(stored: Stored, prefix: str, name: str, sums: torch.Tensor, allowed: float) -> None:
    """Do as :func:`store`, given ``sums``, the :func:`sketch` of the result."""
    stored[f"{prefix}/sketch/{name}"] = sums
    stored[f"{prefix}/allowed/{name}"] = torch.tensor(allowed, dtype=torch.float64)


def names_of(stored: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the results in ``stored``, which holds an example's keys without their prefix."""
    return {
        name
        for kind, _, name in (key.partition("/") for key in stored)
        if kind in ("expected", "sketch", "digest", "allowed")
    }


def is_whole(stored: Mapping[str, torch.Tensor], name: str) -> bool:
    return f"expected/{name}" in stored


def compare_stored(
    name: str, result: torch.Tensor, stored: Mapping[str, torch.Tensor], *, as_stored: bool = False
) -> Comparison:
    """Compare ``result`` (``as_stored``: or its sketch, if a sketch is stored) with the stored one. Raise
    :class:`Differs` if dtype or shape differ, and :class:`PackageError` if ``stored`` lacks its tolerance or holds an
    invalid sketch."""
    allowed = stored.get(f"allowed/{name}")
    if (
        allowed is None
        or allowed.shape != ()
        or allowed.dtype is not torch.float64
        or not 0 <= float(allowed) < math.inf
    ):
        raise PackageError(
            f"the package has no valid tolerance for {name}: 'allowed/{name}' is missing, or is not a finite float64 number from 0 on"
        )
    if (expected := stored.get(f"expected/{name}")) is not None:
        expected = as_dtype(str(result.dtype).removeprefix("torch."), expected)
        if result.shape != expected.shape or result.dtype != expected.dtype:
            raise Differs(
                f"{name} is {result.dtype} {tuple(result.shape)}, the stored result is {expected.dtype} {tuple(expected.shape)}"
            )
        return Comparison(name, distance(result, expected), float(allowed))
    if (digest := stored.get(f"digest/{name}")) is not None:
        if digest.shape != (32,) or digest.dtype is not torch.uint8:
            raise PackageError(f"'digest/{name}' is {digest.dtype} {tuple(digest.shape)}; expected uint8 (32,)")
        return Comparison(name, 0.0 if torch.equal(_digest(result), digest) else math.inf, 0.0)
    if (sums := stored.get(f"sketch/{name}")) is None:
        raise PackageError(f"the package has a tolerance for {name}, but no result: 'expected/{name}' is missing")
    if sums.shape != (SUMS,) or sums.dtype is not torch.float64:
        raise PackageError(f"'sketch/{name}' is {sums.dtype} {tuple(sums.shape)}; expected float64 {(SUMS,)}")
    if not is_inexact(result):
        raise Differs(f"{name} is {result.dtype}, the stored sketch is of a floating-point tensor")
    error = sketched_distance(result if as_stored and result.shape == sums.shape else sketch(result), sums)
    return Comparison(name, error, MARGIN * float(allowed))


class Differs(Exception):
    """A result cannot be compared with the stored one, for the reason given."""


def as_dtype(dtype: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a stored tensor in its original dtype (complex128 is stored as pairs), as a copy, because packages are
    mapped."""
    return (
        torch.view_as_complex(tensor).clone() if dtype == "complex128" and not tensor.is_complex() else tensor.clone()
    )


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    digest = hashlib.sha256()
    for chunk in tensor_chunks(tensor.detach()):
        digest.update(chunk)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)

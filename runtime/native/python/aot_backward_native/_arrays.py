"""Arrays of arguments that C does not take: lists and numbers, other byte orders, negative strides, arrays with neither
protocol. By NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._extension import Tensor, tensor
from .errors import InputError

if TYPE_CHECKING:
    import numpy

Specs = list[list[tuple[str, str]]]
"""For each variant, name and dtype of each argument."""
_KNOWN = {
    "bool",
    "complex64",
    "complex128",
    *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)),
} - {"float8"}
_KINDS = "biufc"
"""NumPy's kinds of booleans, integers, floating-point and complex numbers. A kind is converted to a later one; booleans
come from booleans only."""


class Door:
    """Makes arrays for one function.

    Attributes:
        cast: Whether arrays of another dtype are converted. Python's own numbers always are.
        only: The variant that may run; -1: any.
    """

    def __init__(self, specs: dict[int, Specs]):
        """``specs``: for each part (``aotb_part``)."""
        self._specs = specs
        self.cast, self.only = False, -1

    def __call__(self, value: Any, part: int, number: int) -> Any:
        """Return an array that C takes, for argument ``number``.

        Raises:
            InputError: NumPy is not installed, or it makes no array of numbers of ``value``.
        """
        variants = self._specs[part] if self.only < 0 else self._specs[part][self.only : self.only + 1]
        wanted = [v[number] for v in variants if number < len(v)]
        if not wanted:
            raise InputError(f"{number + 1} arguments: expected {max(map(len, variants))}.")
        name, dtypes = wanted[0][0], [dtype for _, dtype in wanted]
        try:
            import numpy
        except ImportError:
            raise InputError(
                f"{name}: expected an array (buffer protocol or DLPack), got {_words(value)}. To pass lists and other arrays, install NumPy."
            ) from None
        try:
            array = numpy.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{name}: expected an array of {dtypes[0]}, got {_words(value)}: {error}.") from error
        if array.dtype.kind not in _KINDS:
            raise InputError(
                f"{name}: expected {dtypes[0]}, got {_words(value)} of dtype {array.dtype.name}. Pass an array of numbers."
            )
        bare = isinstance(value, (list, tuple, bool, int, float, complex))
        dtype = array.dtype.name if array.dtype.name in dtypes else dtypes[0]
        if array.dtype.name != dtype and (bare or self.cast) and (_converts(array, dtype) or (bare and not array.size)):
            if dtype == "bfloat16":
                return _bfloat16(numpy, array)
            _check_range(numpy, name, array, dtype)
            return array.astype(dtype)
        if array.dtype.name not in _KNOWN:
            raise InputError(
                f"{name}: expected {dtype}, got {array.dtype.name}. Convert it, or let the function do it: cast=True."
            )
        return numpy.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _words(value: Any) -> str:
    return type(value).__name__


def _converts(array: numpy.ndarray[Any, Any], dtype: str) -> bool:
    """Return if C would convert the array. If not, C names both dtypes."""
    kind = {"bo": "b", "in": "i", "ui": "u", "fl": "f", "bf": "f", "co": "c"}[dtype[:2]]
    given = array.dtype.kind
    return kind != "b" and (_KINDS.index(given) <= _KINDS.index(kind) or (given, kind) == ("u", "i"))


def _check_range(numpy: Any, name: str, array: numpy.ndarray[Any, Any], dtype: str) -> None:
    if array.size == 0 or array.dtype.kind not in "iu" or dtype[:2] not in ("in", "ui"):
        return
    limits = numpy.iinfo(dtype)
    for value in (int(array.min()), int(array.max())):
        if not limits.min <= value <= limits.max:
            raise InputError(f"{name}: expected numbers that fit {dtype}, got {value}.")


def _bfloat16(numpy: Any, array: numpy.ndarray[Any, Any]) -> Tensor:
    """Return the numbers rounded to even."""
    bits = numpy.array(array, dtype="float32", order="C").view("uint32")
    rounded = numpy.where(numpy.isnan(bits.view("float32")), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return tensor("bfloat16", array.shape, rounded.astype("uint16").tobytes())

"""Whether the clippings of gradients of a ``replay`` entry agree with themselves and with their libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import PackageError
from ..format.dtypes import is_floating
from ..format.manifest import ClippingSpec, EntrySpec, LibrarySpec
from .tensor_checks import check_tensor
from .variant_checks import check_speed, check_status

NORM, VALUE = "clip_grad_norm_", "clip_grad_value_"
"""The functions of ``torch.nn.utils``."""


def check_clippings(entry: EntrySpec, libraries: Mapping[str, LibrarySpec]) -> None:
    """:class:`PackageError` names what is wrong; that every library is there was checked before."""
    if entry.clippings and entry.kind != "replay":
        raise PackageError(f"an entry of kind {entry.kind!r} clips no gradients of a script, but {len(entry.clippings)} clippings are listed")
    for number, clipping in enumerate(entry.clippings):
        try:
            _check_clipping(clipping, libraries[clipping.library])
        except PackageError as error:
            raise PackageError(f"clipping {number}: {error}") from error


def operand_names(gradients: int) -> list[str]:
    """What a library for so many gradients calls what it takes, in order."""
    return [*(f"gradient {i}" for i in range(gradients)), "numbers"]


def result_name(function: str, norm_type: str) -> str:
    """What its library calls its result, which says what the code computes."""
    return f"norm of order {norm_type}" if function == NORM else "nothing, clipped by value"


def _check_clipping(clipping: ClippingSpec, library: LibrarySpec) -> None:
    check_status(clipping.verdict)
    check_speed(clipping.speed, "compiled")
    if clipping.function not in (NORM, VALUE):
        raise PackageError(f"it is of {clipping.function[:80]!r}; expected {NORM} or {VALUE}")
    if not _is_norm_type(clipping.norm_type) if clipping.function == NORM else clipping.norm_type != "":
        raise PackageError(f"its norm_type is {clipping.norm_type[:40]!r}, which {clipping.function} does not have")
    *gradients, numbers = library.inputs or (None,)
    if numbers is None or not gradients or [s.name for s in library.inputs] != operand_names(len(gradients)):
        raise PackageError(f"its library {clipping.library} does not take gradients and numbers")
    if [s.name for s in library.outputs] != [result_name(clipping.function, clipping.norm_type)]:
        raise PackageError(f"its library {clipping.library} was compiled for another function or norm_type than it lists")
    for spec in (*library.inputs, *library.outputs):
        check_tensor(spec, set())
        if not is_floating(spec.dtype) or spec.device != "cpu":
            raise PackageError(f"{spec.name} is {spec.dtype} on {spec.device}; expected numbers of floating point on the CPU")
    if (numbers.dtype, numbers.shape, library.outputs[0].shape) != ("float64", (2,), ()):
        raise PackageError(
            f"it takes {numbers.dtype} of shape {numbers.shape}, and gives shape {library.outputs[0].shape}; expected float64, (2,), ()"
        )
    if library.constants:
        raise PackageError(f"its library {clipping.library} has {len(library.constants)} constants, and nothing to bind them to")


def _is_norm_type(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return repr(value) == text and not math.isnan(value)

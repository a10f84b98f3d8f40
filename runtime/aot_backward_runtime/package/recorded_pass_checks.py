"""Whether the recorded passes of a manifest agree with themselves and with the libraries that they call.

That a pass also computes what its tape does is checked when it is bound, in the process that has the tape (``tapes/tape_checks.py``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import PackageError
from ..format.manifest import EntrySpec, LibrarySpec, PassSpec, Segment, StructureSpec, TensorSpec
from .tensor_checks import check_sizes, check_symbols, check_symbols_of
from .variant_checks import check_speed, check_status

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_MADE = re.compile(r"tensor [0-9]+|(the gradient )?%v[0-9]+")  # what a recorded pass calls its tensors and its values


def check_structures(entry: EntrySpec, libraries: Mapping[str, LibrarySpec]) -> None:
    """:class:`PackageError` names what is wrong with the recorded passes of ``entry``; that every library is there was checked before."""
    if entry.kind != "replay":
        if entry.structures:
            raise PackageError(f"an entry of kind {entry.kind!r} has no recorded passes, but {len(entry.structures)} structures are listed")
        return
    if entry.variants or entry.state:
        raise PackageError("an entry of kind 'replay' has structures, and neither variants nor state of its own")
    seen = set()
    for number, structure in enumerate(entry.structures):
        if not _FINGERPRINT.fullmatch(structure.fingerprint):
            raise PackageError(f"structure {number}: {structure.fingerprint[:80]!r} is no fingerprint, which is 64 hexadecimal digits")
        if structure.fingerprint in seen:
            raise PackageError(f"the fingerprint {structure.fingerprint} occurs twice")
        seen.add(structure.fingerprint)
        if structure.seconds < 0:
            raise PackageError(f"structure {structure.fingerprint[:12]}: it takes {structure.seconds} seconds")
        for n, spec in enumerate(structure.variants):
            try:
                _check_variant(structure, spec, libraries)
            except PackageError as error:
                raise PackageError(f"structure {structure.fingerprint[:12]}, variant {n}: {error}") from error


def _check_variant(structure: StructureSpec, spec: PassSpec, libraries: Mapping[str, LibrarySpec]) -> None:
    check_status(spec.verdict)
    check_speed(spec.speed, "compiled")
    names = check_symbols_of(spec.symbols, [t.shape for t in spec.inputs], spec.sizes)
    for tensor in spec.inputs:
        check_sizes(tensor, names)
    for i, size in enumerate(spec.sizes):  # any number: among them are the index of a class to ignore, and dimensions from the end
        check_symbols(f"size {i}", size, names)
    for guard in spec.guards:
        check_symbols("a guard", guard, names)
    if sum(len(s.ops) for s in spec.segments) != structure.operations:  # counted first: what the manifest states may be any number
        raise PackageError(f"its steps run {sum(len(s.ops) for s in spec.segments)} operations; the structure has {structure.operations}")
    ops = {n for s in spec.segments for n in s.ops}
    if len(ops) != structure.operations or not all(0 <= n < structure.operations for n in ops):
        raise PackageError(f"its steps do not run each of the operations 0 to {structure.operations - 1} once")
    made: dict[int, TensorSpec] = {}
    for number, segment in enumerate(spec.segments):
        try:
            if segment.library:
                _check_call(segment, libraries[segment.library], spec, names, made)
            else:
                _check_single(segment)
        except PackageError as error:
            raise PackageError(f"step {number}: {error}") from error


def _check_call(segment: Segment, library: LibrarySpec, spec: PassSpec, names: set[str], made: dict[int, TensorSpec]) -> None:
    """``made``: what earlier graphs gave, to which this one's results are added."""
    if not segment.ops:
        raise PackageError(f"{segment.library} stands for no operation")
    if len(segment.operands) != len(library.inputs) or len(segment.results) != len(library.outputs):
        raise PackageError(
            f"{segment.library} takes {len(library.inputs)} tensors and gives {len(library.outputs)}; "
            f"listed are {len(segment.operands)} operands and {len(segment.results)} results"
        )
    for operand, wanted in zip(segment.operands, library.inputs, strict=True):
        kind, where = parse_operand(operand)
        check_sizes(wanted, names)
        if kind == "size":
            check_symbols(operand, where, names)
            if len(wanted.shape) != 2 or wanted.shape[1] != 0 or str(wanted.shape[0]) != where:
                raise PackageError(f"{operand} is passed where {segment.library} takes a tensor of shape {wanted.shape}")
            continue
        if kind == "input" and where >= len(spec.inputs):
            raise PackageError(f"the operand {operand} does not exist: the pass has {len(spec.inputs)} tensors")
        if _MADE.fullmatch(wanted.name) and wanted.name != (f"tensor {where}" if kind == "input" else f"the gradient %v{where}"):
            raise PackageError(f"{operand} is passed where {segment.library} takes {wanted.name}")
        given = spec.inputs[where] if kind == "input" else made.get(where)
        if given is not None and _looks(given) != _looks(wanted):
            raise PackageError(f"{operand} is {_words(given)}; {segment.library} was compiled for {_words(wanted)}")
    numbers = (*segment.results, *segment.undefined)
    if len(set(numbers)) != len(numbers) or any(n < 0 or n in made for n in numbers):
        raise PackageError(f"{segment.library} gives a value twice, or one of a negative number: {numbers[:20]}")
    for number, output in zip(segment.results, library.outputs, strict=True):
        check_sizes(output, names)
        if _MADE.fullmatch(output.name) and output.name != f"%v{number}":
            raise PackageError(f"{segment.library} gives {output.name} as %v{number}")
        made[number] = output


def _check_single(segment: Segment) -> None:
    if len(segment.ops) != 1 or segment.results or segment.undefined or segment.operands not in ((), ("fresh",)):
        raise PackageError("a step without a compiled graph runs one operation as it stands, and lists neither results nor operands")


def parse_operand(text: str) -> tuple[str, Any]:
    """``input:3`` -> ("input", 3), ``value:3`` likewise, ``size:E`` -> ("size", "E")."""
    kind, _, rest = text.partition(":")
    if kind == "size" and rest:
        return kind, rest
    if kind not in ("input", "value") or not re.fullmatch(r"[0-9]{1,9}", rest):
        raise PackageError(f"{text[:80]!r} is no operand: input:I, value:I or size:E")
    return kind, int(rest)


def _looks(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.dtype, spec.device, spec.shape, spec.stride


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape} with strides {spec.stride} on {spec.device}"

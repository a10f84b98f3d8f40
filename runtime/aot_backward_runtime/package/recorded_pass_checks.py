"""What must hold of a package's recorded passes before native code runs for one: :func:`check_structures` by the manifest alone, when it is
read; :func:`check_against` by the tape of this process, when a structure is bound."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from keyword import iskeyword
from typing import Any

from ..errors import PackageError
from ..format.expressions import symbols_of
from ..format.manifest import EntrySpec, LibrarySpec, PassSpec, Segment, Size, StructureSpec, SymbolSpec, TensorSpec
from ..passes.tape import CALLS_OUT, Op, Slot, Tape, slots

_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_STATUS = re.compile(r"verified|not run(: .*)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MADE = re.compile(r"tensor [0-9]+|(the gradient )?%v[0-9]+")  # what a recorded pass calls its tensors and its values
_FUNCTIONS = ("max", "min")  # of expressions


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


def check_against(spec: PassSpec, tape: Tape) -> None:
    """:class:`PackageError` where the steps of ``spec`` do not compute what ``tape`` does: each operation once, each value before it is read,
    none that calls Python or writes a leaf hidden in a compiled graph."""
    if sorted(n for s in spec.segments for n in s.ops) != list(range(len(tape.ops))):
        raise PackageError("a recorded pass does not run each operation of its tape once")
    walk = _Walk()
    for number, segment in enumerate(spec.segments):
        try:
            walk.step(segment, [tape.ops[n] for n in segment.ops])
        except PackageError as error:
            raise PackageError(f"a recorded pass, step {number}: {error}") from error
    walk.read(tape.outputs)
    for op, grad in walk.fresh:
        if walk.reads[grad] != 1:
            raise PackageError(f"a recorded pass: operation {op} cannot hand over its gradient: {walk.reads[grad] - 1} others read it")


def _check_variant(structure: StructureSpec, spec: PassSpec, libraries: Mapping[str, LibrarySpec]) -> None:
    if not _STATUS.fullmatch(spec.verdict.status):
        raise PackageError(f"the verdict {spec.verdict.status[:80]!r} is neither 'verified' nor 'not run: reason'")
    names = check_symbols_of(spec.symbols, [t.shape for t in spec.inputs], spec.sizes)
    for tensor in spec.inputs:
        check_looks(tensor, names)
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
        kind, where = _operand(operand)
        check_looks(wanted, names)
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
        check_looks(output, names)
        if _MADE.fullmatch(output.name) and output.name != f"%v{number}":
            raise PackageError(f"{segment.library} gives {output.name} as %v{number}")
        made[number] = output


def _check_single(segment: Segment) -> None:
    if len(segment.ops) != 1 or segment.results or segment.undefined or segment.operands not in ((), ("fresh",)):
        raise PackageError("a step without a compiled graph runs one operation as it stands, and lists neither results nor operands")


class _Walk:
    """Along the steps of a pass: which values are known, which came out of compiled graphs, how often each is read, and which become the memory
    of a leaf's gradient."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.native: set[int] = set()
        self.reads: Counter[int] = Counter()
        self.fresh: list[tuple[Op, int]] = []

    def step(self, segment: Segment, ops: Sequence[Op]) -> None:
        inside = set[int]()
        for op in ops:
            plain = op.kind == "custom" and op.operands[4]  # its code is in the fingerprint (function_code.py)
            if segment.library and ((op.kind in CALLS_OUT and not plain) or op.kind == "accumulate"):
                raise PackageError(f"{segment.library} stands for operation {op}, which no graph can hold")
            self.read(op.operands, inside)
            inside.update(r for r in op.results if r >= 0)
        if not segment.library:
            if segment.operands:
                self._hand_over(ops[0])
            self.known |= inside
            return
        for kind, where in map(_operand, segment.operands):
            if kind == "value" and where not in self.known:
                raise PackageError(f"value:{where} is passed to {segment.library}, and no earlier step gives it")
        given = {*segment.results, *segment.undefined}
        if not given <= inside:
            raise PackageError(f"{segment.library} gives %v{min(given - inside)}, which is no result of its operations")
        self.native.update(segment.results)
        self.known |= given

    def read(self, operands: Any, inside: Set[int] = frozenset()) -> None:
        for slot in slots(operands):
            if slot.kind == "value":
                if slot.index not in self.known and slot.index not in inside:
                    raise PackageError(f"%v{slot.index} is read, and no earlier step gives it")
                self.reads[slot.index] += 1

    def _hand_over(self, op: Op) -> None:
        grad = op.operands[1] if op.kind == "accumulate" else None
        if not isinstance(grad, Slot) or grad.kind != "value" or grad.index not in self.native:
            raise PackageError(f"operation {op} cannot hand over its gradient: no compiled graph made it")
        self.fresh.append((op, grad.index))


def _operand(text: str) -> tuple[str, Any]:
    """``input:3`` -> ("input", 3), ``value:3`` likewise, ``size:E`` -> ("size", "E")."""
    kind, _, rest = text.partition(":")
    if kind == "size" and rest:
        return kind, rest
    if kind not in ("input", "value") or not re.fullmatch(r"[0-9]{1,9}", rest):
        raise PackageError(f"{text[:80]!r} is no operand: input:I, value:I or size:E")
    return kind, int(rest)


def check_symbols_of(symbols: Sequence[SymbolSpec], shapes: Sequence[Sequence[Size]], sizes: Sequence[Size] | None = None) -> set[str]:
    """The symbols' names, each of which is read from a dimension of a tensor that there is, or, with ``sizes``, from one of those."""
    names: set[str] = set()
    for symbol in symbols:
        if not _NAME.fullmatch(symbol.name) or iskeyword(symbol.name) or symbol.name in _FUNCTIONS or symbol.name in names:
            raise PackageError(f"{symbol.name[:80]!r} is not a name for a symbol, or occurs twice")
        if not (0 if sizes is None else -1) <= symbol.input < len(shapes):
            raise PackageError(f"symbol {symbol.name} is read from input {symbol.input}; there are {len(shapes)}")
        places = len(sizes or ()) if symbol.input < 0 else len(shapes[symbol.input])
        if not 0 <= symbol.dim < places:
            where = "the sizes" if symbol.input < 0 else f"the dimensions of input {symbol.input}"
            raise PackageError(f"symbol {symbol.name} is read from number {symbol.dim} of {where}; there are {places}")
        if symbol.scale < 1:
            raise PackageError(f"symbol {symbol.name} has scale {symbol.scale}")
        names.add(symbol.name)
    return names


def check_looks(spec: TensorSpec, names: set[str]) -> None:
    if len(spec.shape) != len(spec.stride):
        raise PackageError(f"{spec.name} has {len(spec.shape)} sizes and {len(spec.stride)} strides")
    for size in (*spec.shape, *spec.stride):
        if isinstance(size, int) and size < 0:
            raise PackageError(f"{spec.name} has the size or stride {size}")
        check_symbols(spec.name, size, names)


def check_symbols(what: str, size: Size, names: set[str]) -> None:
    unknown = symbols_of(size) - names
    if unknown:
        raise PackageError(f"{what}: the expression {str(size)[:80]!r} needs the unknown symbol {min(unknown)!r}")


def _looks(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.dtype, spec.device, spec.shape, spec.stride


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {spec.shape} with strides {spec.stride} on {spec.device}"

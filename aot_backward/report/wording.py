"""Describe a package's requirements on its inputs: ``batch: 2 and more, a multiple of 4``,
``x: float32, batch × 3 × 32 × 32, contiguous``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence

from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.expressions import evaluate, symbols_of
from aot_backward_runtime.format.manifest import Ambient, Size, Speed, SymbolSpec, TensorSpec, Verdict

from .markup import clean

_COMPARED = {
    ast.Eq: "equals", ast.NotEq: "is not", ast.Lt: "is less than", ast.LtE: "is at most", ast.Gt: "is more than", ast.GtE: "is at least",
}  # fmt: skip
_JOINED = {ast.Add: "+", ast.Sub: "−", ast.Mult: "×", ast.Mod: "mod"}


def size_in_words(count: int) -> str:
    """Return ``41.7 kB``."""
    if count < 1000:
        return f"{count} B"
    power = next((p for p in (1, 2, 3) if count < 999.95 * 1000**p), 4)
    return f"{count / 1000**power:,.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def counted(number: int, noun: str) -> str:
    """Return ``3 nodes`` or ``1 node``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Words:
    """Descriptions of one variant's sizes and guards, with the author's names for its dynamic dimensions."""

    def __init__(self, inputs: Sequence[TensorSpec], symbols: Sequence[SymbolSpec], guards: Sequence[str] = ()):
        self.inputs, self.symbols, self.guards = inputs, symbols, guards
        self.labels = {s.name: clean(s.label) for s in symbols}
        self._probes = [{s.name: 5 + 2 * (k + j) for j, s in enumerate(symbols)} for k in range(2)]

    def place(self, symbol: SymbolSpec) -> str:
        """Return the dimension that a symbol's value is read from."""
        if symbol.input < 0:
            return f"size {symbol.dim} of the pass"
        if symbol.input >= len(self.inputs):
            raise PackageError(f"the symbol {symbol.name!r} is read from input {symbol.input}, of {len(self.inputs)}")
        return f"dimension {symbol.dim} of {self.inputs[symbol.input].name}"

    def size(self, size: Size, inside: bool = False) -> str:
        """Return a size. ``inside``: as one of several factors."""
        return str(size) if isinstance(size, int) else self._sentence(size, inside)

    def shape(self, shape: Sequence[Size]) -> str:
        """Return ``batch × 3 × 32``, or ``scalar`` without dimensions."""
        return " × ".join(self.size(s, len(shape) > 1) for s in shape) or "scalar"

    def tensor(self, spec: TensorSpec) -> str:
        """Return all requirements on a tensor except its name: ``float32, batch × 3, contiguous``."""
        device = "" if spec.device == "cpu" else f", on {spec.device}"
        if not spec.shape:
            return f"{spec.dtype} scalar{device}"
        return f"{spec.dtype}, {self.shape(spec.shape)}, {self.layout(spec)}{device}"

    def layout(self, spec: TensorSpec) -> str:
        """Return the memory format: contiguous, channels last, or the strides."""
        dims = range(len(spec.shape))
        if len(spec.stride) != len(spec.shape):
            raise PackageError(f"{spec.name} has {len(spec.shape)} dimensions and {len(spec.stride)} strides")
        if self._is_dense(spec, tuple(reversed(dims))):
            return "contiguous"
        if len(dims) in (4, 5) and self._is_dense(spec, (1, *reversed(dims[2:]), 0)):
            return "channels last"
        return f"strides ({', '.join(map(self.size, spec.stride))})"

    def _is_dense(self, spec: TensorSpec, order: Sequence[int]) -> bool:
        """Return whether its dimensions follow each other in memory without gaps in ``order``, the innermost first;
        probed at two sizes."""
        for values in self._probes:
            step = 1
            for d in order:
                n = evaluate(spec.shape[d], values)
                if n != 1 and evaluate(spec.stride[d], values) != step:
                    return False
                step *= n
        return True

    def ranges(self) -> list[tuple[str, str, str]]:
        """Return label, allowed sizes and place of each dynamic dimension:
        ``("batch", "2 to 64, a multiple of 4", …)``."""
        out = []
        for s in self.symbols:
            bounds = _between(s.minimum, s.maximum)
            bounds += "".join(f", a multiple of {k}" for name, k in map(_multiple, self.guards) if name == s.name)
            place = self.place(s)
            if (s.scale, s.offset) != (1, 0):
                scaled = s.label if s.scale == 1 else f"{s.scale} × {s.label}"
                top = None if s.maximum is None else s.scale * s.maximum + s.offset
                offset = f" {'+' if s.offset > 0 else '−'} {abs(s.offset)}" if s.offset else ""
                place += f" is {scaled}{offset}: {_between(s.scale * s.minimum + s.offset, top)}"
            out.append((s.label, bounds, place))
        return out

    def conditions(self) -> list[str]:
        """Return the guards that :meth:`ranges` does not include."""
        return [self._sentence(g) for g in self.guards if not _multiple(g)[0]]

    def _sentence(self, expression: str, inside: bool = False) -> str:
        symbols_of(expression)  # raises PackageError if the format does not allow the expression
        try:
            return self._words(ast.parse(expression, mode="eval").body, inside)
        except RecursionError:
            return expression

    def _words(self, node: ast.AST, inside: bool = False) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Name):
            return self.labels.get(node.id, node.id)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv):
            return f"⌊{self._words(node.left, True)} ÷ {self._words(node.right, True)}⌋"
        if isinstance(node, ast.BinOp):
            text = f"{self._words(node.left, True)} {_JOINED[type(node.op)]} {self._words(node.right, True)}"
            return f"({text})" if inside else text
        if isinstance(node, ast.UnaryOp):
            return (
                f"−{self._words(node.operand, True)}"
                if isinstance(node.op, ast.USub)
                else f"not ({self._words(node.operand)})"
            )
        if isinstance(node, ast.Call):
            adjective = "larger" if isinstance(node.func, ast.Name) and node.func.id == "max" else "smaller"
            text = " and ".join(self._words(a, True) for a in node.args)
            return (
                f"the {adjective} of {text}"
                if len(node.args) == 2
                else f"the {adjective.replace('er', 'est')} of {text}"
            )
        if isinstance(node, ast.BoolOp):
            text = (" and " if isinstance(node.op, ast.And) else " or ").join(self._words(v, True) for v in node.values)
            return f"({text})" if inside else text
        if isinstance(node, ast.Compare):
            out, left = [], node.left
            for op, right in zip(node.ops, node.comparators, strict=True):
                out.append(self._compared(left, op, right))
                left = right
            return ", and ".join(out)
        raise PackageError(f"a size holds {type(node).__name__}, which the format does not allow")

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        zero = isinstance(right, ast.Constant) and right.value == 0
        if (
            zero
            and isinstance(left, ast.BinOp)
            and isinstance(left.op, ast.Mod)
            and isinstance(op, (ast.Eq, ast.NotEq))
        ):
            negated = "" if isinstance(op, ast.Eq) else "not "
            return f"{self._words(left.left)} is {negated}a multiple of {self._words(left.right)}"
        return f"{self._words(left)} {_COMPARED[type(op)]} {self._words(right)}"


def _between(low: int, high: int | None) -> str:
    return f"{low:,} and more" if high is None else f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _multiple(guard: str) -> tuple[str, int]:
    """Return symbol and number if ``guard`` requires the symbol to be a multiple of the number; otherwise an empty
    symbol."""
    match = re.fullmatch(r"\(*([A-Za-z_]\w*) ?% ?([0-9]{1,18})\)* ?== ?0\)?", guard)
    return (match[1], int(match[2])) if match else ("", 0)


def ambient_in_words(ambient: Ambient) -> list[str]:
    """Return the global state that the code requires, if it differs from PyTorch's default."""
    out = [f"under autocast {ambient.autocast}"] if ambient.autocast else []
    out += ["with deterministic algorithms"] if ambient.deterministic else []
    return out + (
        [f"with float32 matrix products of {ambient.matmul_precision} precision"]
        if ambient.matmul_precision != "highest"
        else []
    )


def verdict_in_words(verdict: Verdict) -> str:
    """Return ``verified: gradient of x is the worst, at 8 % of its tolerance; run at batch=8, batch=9``."""
    worst = f": {verdict.worst} is the worst, at {verdict.error:.1%} of its tolerance" if verdict.worst else ""
    sizes = f"; run at {', '.join(verdict.sizes)}" if verdict.sizes else ""
    return f"{verdict.status}{worst}{sizes}"


def standalone_in_words(verdicts: Mapping[str, str]) -> str:
    """Return whether an entry runs without PyTorch. ``verdicts``: ``EntrySpec.standalone`` by target."""
    words = {target: _standalone(verdict) for target, verdict in verdicts.items()}
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return "; ".join(f"{target}: {verdict}" for target, verdict in words.items())


def _standalone(verdict: str) -> str:
    if verdict == "verified":
        return "yes, with the stored results"
    return f"no: it {verdict}" if verdict else "not tried when it was exported"


def pass_speed_in_words(speed: Speed) -> Iterator[str]:
    """Yield ``at s0=16: eager 345.8 µs, compiled 290.1 µs`` for each timed size; then the processor and target."""
    for number, label in enumerate(speed.sizes):
        yield f"{f'at {label}: ' if label else ''}{', '.join(f'{timing.name} {timing.microseconds[number]:,.1f} µs' for timing in speed.timings)}"
    if speed.chosen != "compiled":
        yield "replay runs it in eager"
    yield _measured_on(speed)


def speed_in_words(speed: Speed) -> Iterator[str]:
    """Yield ``at batch=16: eager 345.8 µs, default 290.1 µs (shipped, 0.84 of eager's time)`` for each timed size; its
    slow parts if it was slower; then the processor and target."""
    for number, (label, ratio) in enumerate(zip(speed.sizes, speed.ratios, strict=True)):
        parts = []
        for timing in speed.timings:
            shipped = (
                f"{'shipped, ' if len(speed.timings) > 2 else ''}{ratio:.2f} of eager's time"
                if timing.name == speed.chosen
                else ""
            )
            parts.append(f"{timing.name} {timing.microseconds[number]:,.1f} µs{shipped and f' ({shipped})'}")
        yield f"{f'at {label}: ' if label else ''}{', '.join(parts)}"
    if speed.slow:
        yield f"slow parts: {'; '.join(speed.slow)}"
    yield _measured_on(speed)


def _measured_on(speed: Speed) -> str:
    busy = f", while {counted(speed.others, 'other thread')} ran" if speed.others else ""
    return f"on {speed.processor}, {counted(speed.threads, 'thread')}{busy}; code for {speed.target or 'cpu'} by torch {speed.torch}"

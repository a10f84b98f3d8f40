"""Outputs that share memory: a tensor and views of it, or one tensor twice.

Native code returns each in its own memory, because autograd must tell their incoming gradients apart. The trace notes
their memory layout in eager, and the runtime makes one a view of the other again. These stay copies: views of inputs,
parameters and buffers, views of another dtype, conjugates, and disjoint views, such as chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Shared

from .symbolic_shapes import Sizes, expression_of, write

# The largest memory that is checked element by element, with a byte for each: bounds it to 16 MiB; a guess
_MAX_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Place:
    """The memory layout of a traced tensor. ``memory``: its storage, and the dtype that it is read as."""

    memory: tuple[int, torch.dtype]
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any


def places(values: Sequence[Any], outside: Iterable[torch.Tensor]) -> dict[int, Place]:
    """Return the place of each tensor among ``values``, by index, except those that share a storage with one of
    ``outside``."""
    outside_keys = {torch_api.storage_key(t) for t in outside if t.layout is torch.strided}
    layouts = {}
    for i, value in enumerate(values):
        if (
            not isinstance(value, torch.Tensor)
            or value.layout is not torch.strided
            or value.is_conj()
            or value.is_neg()
        ):
            continue
        key = torch_api.storage_key(value)
        if key not in outside_keys:
            layouts[i] = Place((key, value.dtype), tuple(value.shape), value.stride(), value.storage_offset())
    return layouts


def shared(
    found: Mapping[int, Place], outputs: Sequence[Any], requires_grad: Sequence[bool], sizes: Sizes
) -> tuple[Shared, ...]:
    """Return which outputs become views of which; raise :class:`ExportError` if two overlap and neither contains the
    other."""
    number = {leaf: n for n, leaf in enumerate(i for i, o in enumerate(outputs) if o is not None)}
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, place in found.items():
        if isinstance(outputs[i], torch.fx.Node):
            groups.setdefault(place.memory, []).append(i)
    out = []
    for group in groups.values():
        # A differentiated output cannot be a view of one that is not
        remaining = sorted(group, key=lambda i: (not requires_grad[i], i))
        while len(remaining) > 1:
            base = next(
                (
                    i
                    for i in remaining
                    if _dense(found[i]) and any(_covers(found[i], found[j]) for j in remaining if j != i)
                ),
                None,
            )
            if base is None:
                _refuse_overlaps({i: found[i] for i in remaining})
                break
            views = [
                j
                for j in remaining
                if j != base and _covers(found[base], found[j]) and requires_grad[base] >= requires_grad[j]
            ]
            if not views:
                break
            for j in views:
                offset, *stride = (_written(s, sizes) for s in (found[j].offset - found[base].offset, *found[j].stride))
                compiled_stride = outputs[j].meta["val"].stride()
                same_stride = [_written(s, sizes) for s in compiled_stride] == stride
                out.append(Shared(number[j], number[base], offset, () if same_stride else tuple(stride)))
            remaining = [i for i in remaining if i != base and i not in views]
    return tuple(out)


def _written(size: Any, sizes: Sizes) -> Any:
    expression = expression_of(size)
    return int(expression) if expression.is_Integer else write(expression, sizes.names)


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _span(place: Place) -> tuple[int, int]:
    start = _hint(place.offset)
    if any(_hint(n) == 0 for n in place.shape):
        return start, start
    return start, start + sum((_hint(n) - 1) * _hint(s) for n, s in zip(place.shape, place.stride, strict=True)) + 1


def _dense(place: Place) -> bool:
    """Return whether it fills its span without gaps or overlaps."""
    expected = 1
    for n, s in sorted(
        ((_hint(n), _hint(s)) for n, s in zip(place.shape, place.stride, strict=True) if _hint(n) != 1),
        key=lambda pair: pair[1],
    ):
        if s != expected:
            return False
        expected *= n
    return True


def _covers(place: Place, other: Place) -> bool:
    (start, end), (first, last) = _span(place), _span(other)
    return start <= first and last <= end


def _refuse_overlaps(found: Mapping[int, Place]) -> None:
    spans = {i: _span(p) for i, p in found.items()}
    for i, place in found.items():
        for j, other in found.items():
            if i < j and spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1] and _meet(place, other):
                raise ExportError(
                    f"output[{i}] and output[{j}] share a part of their memory, which a package cannot return: return a .clone() of one"
                )


def _meet(place: Place, other: Place) -> bool:
    end = max(_span(place)[1], _span(other)[1])
    if end > _MAX_ELEMENTS:
        return True
    marks = torch.zeros(end, dtype=torch.bool)
    for p in (place, other):
        view = marks.as_strided([_hint(n) for n in p.shape], [_hint(s) for s in p.stride], _hint(p.offset))
        if view.any():
            return True
        view.fill_(True)
    return False

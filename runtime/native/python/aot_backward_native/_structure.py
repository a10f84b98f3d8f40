"""Results in the caller's structure. A tree is the JSON of ``aotb_structure``; the schema is in ``docs/format.md``,
section 4."""

from __future__ import annotations

import collections
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import InputError, PackageError

Tree = Mapping[str, Any]
Reader = Callable[[Sequence[Any], Callable[[str], int]], Any]
"""Makes the nested value of the flat results. The second argument evaluates a size."""


def reader(tree: Tree, count: int) -> Reader:
    """Return the function that builds the nested value of ``count`` flat results.

    Raises:
        PackageError: The tree is inconsistent.
    """
    kind, children = tree.get("kind"), tree.get("children", [])
    if kind == "tensor":
        index = tree.get("index")
        if type(index) is not int or not 0 <= index < count:
            raise PackageError(
                f"structure of the results: expected a number below {count}, got {index!r}. The package is damaged: export it again."
            )
        return lambda results, size: results[index]
    if kind == "constant":
        value = tree.get("value")
        return lambda results, size: value
    if kind == "size":
        expression = str(tree.get("expression", ""))
        return lambda results, size: size(expression)
    inside = [reader(child, count) for child in children]
    if kind == "tuple":
        return lambda results, size: tuple([of(results, size) for of in inside])
    if kind == "list":
        return lambda results, size: [of(results, size) for of in inside]
    keys = tuple(tree.get("keys", ()))
    if kind not in ("dict", "object", "namedtuple") or len(keys) != len(inside) or len(set(keys)) != len(keys):
        raise PackageError(
            f"structure of the results: {kind!r} with the keys {list(keys)!r} is unknown. Install a newer aot-backward-native."
        )
    if kind == "namedtuple":
        made = _namedtuple(str(tree.get("type_name", "")), keys)
        return lambda results, size: made(*[of(results, size) for of in inside])
    pairs = list(zip(keys, inside, strict=True))
    return lambda results, size: {key: of(results, size) for key, of in pairs}


def spread(tree: Tree, value: Any, out: dict[int, Any], where: str) -> None:
    """Put the arrays of ``value``, which has the structure of ``tree``, into ``out`` by their number. None, and a key
    left out, stand for no array.

    Raises:
        InputError: The structure differs.
    """
    kind, children = tree["kind"], tree.get("children", [])
    if value is None or kind in ("constant", "size"):
        return
    if kind == "tensor":
        if getattr(value, "readonly", False) or not getattr(getattr(value, "flags", None), "writeable", True):
            raise InputError(f"{where}: expected an array that can be written, got a read-only one. Pass a copy of it.")
        out[tree["index"]] = value
    elif kind in ("dict", "object"):
        named = dict(zip(tree.get("keys", ()), children, strict=True))
        if not isinstance(value, Mapping) or not value.keys() <= named.keys():
            raise InputError(f"{where}: expected a dict with keys of {list(named)}, got {_words(value)}.")
        for key, item in value.items():
            spread(named[key], item, out, f"{where}[{key!r}]")
    else:
        if not isinstance(value, (tuple, list)) or len(value) != len(children):
            raise InputError(
                f"{where}: expected a {kind} of {len(children)} arrays, got {_words(value)}. Put None where no array is given."
            )
        for number, (child, item) in enumerate(zip(children, value, strict=True)):
            spread(child, item, out, f"{where}[{number}]")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")


_NAMEDTUPLES: dict[tuple[str, tuple[str, ...]], Any] = {}


def _namedtuple(name: str, keys: tuple[str, ...]) -> Callable[..., Any]:
    """Return a namedtuple with that name and these fields, always the same class for the same arguments."""
    if (name, keys) not in _NAMEDTUPLES:
        short = name.rpartition(".")[2]
        for word in (short, *keys):
            if not isinstance(word, str) or not word.isidentifier() or keyword.iskeyword(word):
                raise PackageError(
                    f"structure of the results: {word!r} cannot name a field. The package is damaged: export it again."
                )
        _NAMEDTUPLES[name, keys] = collections.namedtuple(short, keys, rename=True)
    return _NAMEDTUPLES[name, keys]  # type: ignore[no-any-return]

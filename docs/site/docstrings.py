"""A griffe extension: how the docstrings and the public names of this project come to the API pages.

The pages refer to objects by their public names alone (`aot_backward.export`), so that modules can move.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

import griffe

_JOINED = "``\\ "  # in reStructuredText a backslash joins what follows to the literal: ``nn.Module``\\ s
_ROLE = re.compile(r":(?:py:)?(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")


class PublicNames(griffe.Extension):
    """Three changes to what griffe loads. A public name is its object, also where a module has the same name (griffe
    takes the module). The classes that public functions and methods return get a path beside the public names
    (`Package.module` returns a `LoadedModule`, which is not exported). Sphinx roles in docstrings (:class:`Package`),
    which Markdown does not know, become links where a page documents the object, else code."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        for obj in list(_objects(pkg)):
            if obj.docstring is not None:
                text = obj.docstring.value.replace(_JOINED, "``")
                obj.docstring.value = _ROLE.sub(lambda match, obj=obj: _link(match[1], obj, pkg), text)
        public = {name: _resolve(pkg.members[name]) for name in map(str, pkg.exports or ())}
        for name, obj in (_reachable_classes(pkg, public.values(), loader) | public).items():
            pkg.members[name] = griffe.Alias(name, obj, parent=pkg)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _resolve(member: griffe.Object | griffe.Alias) -> griffe.Object:
    target = member.final_target if isinstance(member, griffe.Alias) else member
    return _resolve(target.members[target.name]) if target.is_module else target


def _reachable_classes(
    pkg: griffe.Module, public: Iterable[griffe.Object], loader: griffe.GriffeLoader
) -> dict[str, griffe.Object]:
    """The classes of ``pkg`` that a call of a public function, a method or an attribute gives, and those that these
    give in turn."""
    found: dict[str, griffe.Object] = {}
    todo = [obj for obj in public if obj.canonical_path.startswith(f"{pkg.path}.")]
    while todo:
        obj = todo.pop()
        for member in [m for m in obj.members.values() if not m.name.startswith("_")] if obj.is_class else [obj]:
            for name in _names(member):
                if name.name not in found and name.canonical_path.startswith(f"{pkg.path}."):
                    cls = loader.modules_collection[name.canonical_path]
                    if cls.is_class:
                        found[name.name] = cls
                        todo.append(cls)
    return found


def _names(member: griffe.Object | griffe.Alias) -> Iterator[griffe.ExprName]:
    """Those in what a function returns, or an attribute is annotated with (`report: Report`) or made by (`report =
    Report()`)."""
    given = member.returns if member.is_function else member.annotation if member.is_attribute else None
    if member.is_attribute and given is None and isinstance(member.value, griffe.ExprCall):
        given = member.value.function
    if isinstance(given, griffe.ExprName):
        yield given
    elif isinstance(given, griffe.ExprBinOp | griffe.ExprSubscript):  # `X | None`, `dict[str, X]`
        yield from (
            name
            for name in given.iterate(flat=True)
            if isinstance(name, griffe.ExprName) and isinstance(name.parent, griffe.Object)
        )


def _link(target: str, obj: griffe.Object, pkg: griffe.Module) -> str:
    name = target.lstrip("~.")
    try:
        identifier = obj.resolve(name)
    except griffe.NameResolutionError:
        identifier = name if name.startswith("aot_backward") else f"{pkg.path}.{name}"
    shown = html.escape(name.rpartition(".")[2] if target.startswith("~") else name)
    return f'<autoref identifier="{html.escape(identifier)}" optional><code>{shown}</code></autoref>'

"""A griffe extension: how the docstrings and the public names of this project come to the API pages.

The pages refer to objects by their public names alone (`aot_backward.export`), so that modules can move.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import griffe

_ROLE = re.compile(r":(?:py:)?(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")


class PublicNames(griffe.Extension):
    """Finds the object of each public name, also where a module has that name too (griffe takes the module); puts the classes that public
    functions and methods return beside them (`Package.module` returns a `LoadedModule`, which is not exported); and replaces Sphinx's roles in
    docstrings (:class:`Package`), which Markdown does not know, by the name as code, linked where a page documents it."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        for obj in list(_objects(pkg)):
            if obj.docstring is not None:
                obj.docstring.value = _ROLE.sub(lambda match, obj=obj: _link(match[1], obj, pkg), obj.docstring.value)
        public = {name: _found(pkg.members[name]) for name in map(str, pkg.exports or ())}
        own = [obj for obj in public.values() if obj.canonical_path.startswith(f"{pkg.path}.")]
        returned = {name: loader.modules_collection[path] for obj in own for name, path in _returned(obj) if path.startswith(f"{pkg.path}.")}
        for name, obj in (returned | public).items():
            pkg.members[name] = griffe.Alias(name, obj, parent=pkg)


def _objects(parent: griffe.Object) -> Iterator[griffe.Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _found(member: griffe.Object | griffe.Alias) -> griffe.Object:
    found = member.final_target if isinstance(member, griffe.Alias) else member
    return _found(found.members[found.name]) if found.is_module else found


def _returned(public: griffe.Object) -> Iterator[tuple[str, str]]:
    functions = [m for m in public.members.values() if m.is_function and not m.name.startswith("_")] if public.is_class else [public]
    for function in functions:
        if function.is_function and isinstance(function.returns, griffe.ExprName):
            yield function.returns.name, function.returns.canonical_path


def _link(target: str, obj: griffe.Object, pkg: griffe.Module) -> str:
    name = target.lstrip("~.")
    try:
        identifier = obj.resolve(name)
    except griffe.NameResolutionError:
        identifier = name if name.startswith("aot_backward") else f"{pkg.path}.{name}"
    shown = html.escape(name.rpartition(".")[2] if target.startswith("~") else name)
    return f'<autoref identifier="{html.escape(identifier)}" optional><code>{shown}</code></autoref>'

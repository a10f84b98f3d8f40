"""Operators that a package calls and PyTorch lacks: whether they are registered in this process, and which module
registers them.

A package never imports anything: it only names the modules that registered its operators at export. Only modules that
the caller names are imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping

from .errors import IncompatibleError, InputError, PackageError
from .format.manifest import Manifest, OperatorSpec
from .torch_api import is_registered

_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?", re.ASCII)
_MODULE = re.compile(r"(\w+(\.\w+)*)?")


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of these names. Raise :class:`InputError` if one cannot be imported."""
    if isinstance(names, str):
        raise InputError(f"imports is {names!r}; expected a list of names of modules, [{names!r}]")
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("."):
            raise InputError(f"imports has {name!r}; expected the name of a module, such as 'package.module'")
        try:
            importlib.import_module(name)
        except Exception as error:  # the module's code may raise anything
            raise InputError(
                f"imports: the module {name!r} could not be imported ({type(error).__name__}: {error}); it must be on the path of this process "
                f"(sys.path, PYTHONPATH)"
            ) from error


def check_registered(manifest: Manifest, path: object, *, recorded_too: bool = False) -> None:
    """Raise :class:`IncompatibleError` if an entry calls operators that are not registered here. It names them all, and
    the modules that register them.

    ``recorded_too``: check recorded passes too. Loading does not, because a script that replays them may import its own
    operators after it has loaded the package."""
    recorded = {
        s.library
        for e in manifest.entries.values()
        for t in e.structures
        for v in t.variants
        for s in v.segments
        if s.library
    }
    if recorded_too:
        recorded = set()
    operators = [o for name, spec in manifest.libraries.items() if name not in recorded for o in spec.operators]
    for operator in (*manifest.operators, *(o for spec in manifest.libraries.values() for o in spec.operators)):
        spec = manifest.operators.get(operator, OperatorSpec())
        if not _OPERATOR.fullmatch(operator) or not _MODULE.fullmatch(spec.module) or not spec.file.isprintable():
            raise PackageError(
                f"corrupt package {path}: it calls {operator!r} of {(spec.module or spec.file)!r}, which is not an operator"
            )
    if missing := unregistered(operators):
        raise IncompatibleError(f"{path} {describe_missing_operators(missing, manifest.operators)}")


def unregistered(operators: Iterable[str]) -> list[str]:
    """Return the names in ``operators`` ("mine::cube", "mine::cube.out") that this process does not have."""
    return [o for o in dict.fromkeys(operators) if not is_registered(o)]


def describe_missing_operators(missing: Iterable[str], specs: Mapping[str, OperatorSpec]) -> str:
    """Return a text that names the missing operators, the module that registered each at export, and the remedy."""
    by_source: dict[OperatorSpec, list[str]] = {}
    for operator in missing:
        by_source.setdefault(specs.get(operator, OperatorSpec()), []).append(operator)
    return "; ".join(f"calls {', '.join(operators)}, {_source(spec)}" for spec, operators in by_source.items())


def _source(spec: OperatorSpec) -> str:
    usage = "imports=[{0!r}] of load() and replay(), --import {0} on the command line"
    if spec.module == "__main__":
        return (
            f"registered by a script{spec.file and f', {spec.file},'} that cannot be imported by name: move the operator to its own module, and "
            f"import the module first, or name it in {usage.format('MODULE')}"
        )
    if spec.module and spec.module in sys.modules:
        return f"registered at export by the Python module {spec.module!r}; the module imported here does not register it: is it another version?"
    if spec.module:
        return (
            f"registered by the Python module {spec.module!r}, which is not imported here: import it first, or name it in "
            f"{usage.format(spec.module)}"
        )
    if spec.file:
        origin = f"registered by the compiled extension {spec.file}, which is not loaded here"
        call = f"torch.ops.load_library('…/{spec.file}')"
    else:
        origin = "which is not registered here, and the package does not name the module that registers it"
        call = "torch.ops.load_library(FILE)"
    return f"{origin}: call {call} first, or name the module that registers it in {usage.format('MODULE')}"

"""Find the source of operators that a package calls and PyTorch itself lacks: a process that loads the package must
register them, too."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import torch

from aot_backward_exporters import torch_api
from aot_backward_runtime.format.manifest import Manifest, OperatorSpec

log = logging.getLogger("aot_backward")


def operators_of(manifest: Manifest) -> dict[str, OperatorSpec]:
    """Return the operators that the libraries call and PyTorch lacks, each with its source here or, if it has none, the
    source in ``manifest``."""
    operators = sorted(
        {o for spec in manifest.libraries.values() for build in spec.every_build for o in build.operators}
    )
    specs = {o: _registered_by(o) for o in operators if o.partition("::")[0] not in torch_api.NAMESPACES}
    custom_specs = {o: s for o, s in specs.items() if s.module.partition(".")[0] != "torch"}
    return {o: s if s != OperatorSpec() else manifest.operators.get(o, s) for o, s in custom_specs.items()}


def say(operators: Mapping[str, OperatorSpec]) -> None:
    """Log the steps that a process must take before it loads a package with calls of these operators."""
    by_source: dict[OperatorSpec, list[str]] = {}
    for operator, spec in operators.items():
        by_source.setdefault(spec, []).append(operator)
    for spec, names in by_source.items():
        log.warning("the package calls %s, %s", ", ".join(names), _advice(spec))


def _advice(spec: OperatorSpec) -> str:
    if spec.module == "__main__":
        return (
            f"which the script{spec.file and f' {spec.file}'} registers; a script cannot be imported by name. Move the operator to its own module, "
            "and import that before you load the package"
        )
    if spec.module:
        return (
            f"which the Python module {spec.module!r}{spec.file and f' ({spec.file})'} registers. Import it before you load the package, with "
            f"load(path, imports=[{spec.module!r}]) or, on the command line, --import {spec.module}"
        )
    return f"which {spec.file or 'a compiled extension'} registers. Load that before the package, with torch.ops.load_library()"


def _registered_by(operator: str) -> OperatorSpec:
    """Return the source of an operator, found by its ``torch.library.custom_op``; the C++ library's own statement
    (``m.set_python_module``); the Python file that defined it or registered its tracing rules; a compiled extension
    that contains its name."""
    name, _, overload = operator.partition(".")
    module = sys.modules.get(torch_api.module_of_custom_op(name))
    if module is not None:
        return _spec(module)
    if (stub := torch_api._dispatch_pystub(name, overload)) is not None:
        return OperatorSpec(stub[0])
    for place in torch_api.places_of_operator(name, overload):
        if (module := next((m for m in _modules() if _file(m) == Path(place)), None)) is not None:
            return _spec(module)
    extensions = [file for file in map(Path, torch.ops.loaded_libraries) if file.is_file() and _holds(file, name)]
    return OperatorSpec(file=extensions[0].name if len(extensions) == 1 else "")


def _modules() -> Iterator[ModuleType]:
    """Yield the imported modules, except torch's own, which others register through; ``__main__`` last: a script may
    have imported itself by name."""
    yield from (
        m
        for n, m in list(sys.modules.items())
        if isinstance(m, ModuleType) and n.partition(".")[0] not in ("__main__", "torch")
    )
    yield sys.modules["__main__"]


def _file(module: ModuleType) -> Path | None:
    file = vars(module).get("__file__")
    return Path(file) if isinstance(file, str) else None


def _spec(module: ModuleType) -> OperatorSpec:
    file = _file(module)
    return OperatorSpec(module.__name__ if _importable(module) else "__main__", file.name if file is not None else "")


def _importable(module: ModuleType) -> bool:
    """Return whether importing that name anew would find the same file."""
    top = module.__name__.partition(".")[0]
    root = sys.modules.get(top)
    if top == "__main__" or root is None:
        return False
    module_spec = next((s for finder in sys.meta_path if (s := finder.find_spec(top, None)) is not None), None)
    file = _file(root)
    return module_spec is not None and (
        module_spec.origin is None or file is None or Path(module_spec.origin).resolve() == file.resolve()
    )


def _holds(file: Path, name: str) -> bool:
    """Return whether a library contains both parts of an operator's name."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(part.encode()) >= 0 for part in name.split("::"))

"""Each adapter of ``aot_backward_native`` imports its own engine, is short, and the package itself needs none of
them."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import aot_backward_native as abn

FOLDER = Path(abn.__file__).parent
MAY_IMPORT = {
    "_arrays": {"numpy"},  # when an argument needs it
    "forcefield": {"numpy"},
    "_neighbors": {"numpy", "vesin"},
    "ase": {"ase", "numpy"},
    "openmm": {"numpy", "openmm"},
    "casadi": {"casadi", "numpy"},
    "_casadi_callback": {"casadi", "numpy"},
}


def imported(source: str) -> set[str]:
    """Return the top-level names of the modules that ``source`` imports, except the standard library and the package
    itself."""
    out = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            out |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            out.add(str(node.module).partition(".")[0])
    return out - sys.stdlib_module_names - {"aot_backward_native"}


def test_each_adapter_imports_its_own_engine_only() -> None:
    found = {path.stem: imported(path.read_text()) for path in FOLDER.glob("*.py")}
    assert {name: names for name, names in found.items() if names} == MAY_IMPORT
    assert imported("def f():\n    import torch.nn\n    from . import a") == {"torch"}  # the check can fail


def test_adapters_are_short() -> None:
    assert {
        name: lines
        for name in ("ase", "openmm", "casadi")
        if (lines := len((FOLDER / f"{name}.py").read_text().splitlines())) > 150
    } == {}

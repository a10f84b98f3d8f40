"""Check the imports between subpackages: which are allowed, that none forms a circle, and that only ``torch_api`` uses
private names of torch."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from aot_backward_exporters.graph import VERSION
from aot_backward_runtime import __version__

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "aot_backward": ROOT / "aot_backward",
    "aot_backward_exporters": ROOT / "exporters" / "aot_backward_exporters",
    "aot_backward_runtime": ROOT / "runtime" / "aot_backward_runtime",
}
_RUNTIME, _EXPORTERS = "aot_backward_runtime", "aot_backward_exporters"
_FILES = f"{_RUNTIME}.errors", f"{_RUNTIME}.format", f"{_RUNTIME}.package"
_CALLS = *_FILES, f"{_RUNTIME}.torch_api", f"{_RUNTIME}.native", f"{_RUNTIME}.operators"
_BASE = tuple(
    f"{_EXPORTERS}.{name}"
    for name in ("fake_quantization", "fx_splice", "graph", "process_state", "progress", "sixteen_bits", "torch_api")
)
_LIBRARY = _RUNTIME, *_BASE
ALLOWED = {
    # Subpackage or module -> the prefixes that its modules may import, in addition to itself. The longest key that is a
    # prefix of a module applies. A key names only earlier keys.
    f"{_RUNTIME}.errors": (),
    f"{_RUNTIME}.torch_api": (f"{_RUNTIME}.errors",),
    f"{_RUNTIME}.format": (f"{_RUNTIME}.errors",),
    f"{_RUNTIME}.package": (f"{_RUNTIME}.errors", f"{_RUNTIME}.format"),
    f"{_RUNTIME}.compatibility": _FILES,
    f"{_RUNTIME}.operators": (*_FILES, f"{_RUNTIME}.torch_api"),
    f"{_RUNTIME}.native": _CALLS,
    f"{_RUNTIME}.entries": _CALLS,
    f"{_RUNTIME}.training": (*_CALLS, f"{_RUNTIME}.entries"),
    f"{_RUNTIME}.loader": (*_CALLS, f"{_RUNTIME}.compatibility", f"{_RUNTIME}.entries", f"{_RUNTIME}.training"),
    f"{_RUNTIME}.tapes": _CALLS,
    f"{_RUNTIME}.optimizer_steps": (*_CALLS, f"{_RUNTIME}.training"),
    f"{_RUNTIME}.passes": (*_CALLS, f"{_RUNTIME}.tapes", f"{_RUNTIME}.loader", f"{_RUNTIME}.optimizer_steps"),
    _RUNTIME: (),  # the façade; its table _HOME does not count as imports
    f"{_EXPORTERS}.graph": (f"{_RUNTIME}.format",),
    f"{_EXPORTERS}.progress": (),
    f"{_EXPORTERS}.torch_api": (f"{_RUNTIME}.torch_api",),
    f"{_EXPORTERS}.sixteen_bits": (f"{_EXPORTERS}.graph", f"{_EXPORTERS}.torch_api"),
    f"{_EXPORTERS}.fx_splice": (f"{_EXPORTERS}.torch_api",),
    f"{_EXPORTERS}.process_state": (f"{_EXPORTERS}.torch_api",),
    f"{_EXPORTERS}.fake_quantization": (f"{_EXPORTERS}.torch_api", f"{_EXPORTERS}.process_state"),
    f"{_EXPORTERS}.decompositions": _LIBRARY,
    f"{_EXPORTERS}.toolchain": _LIBRARY,
    f"{_EXPORTERS}.cuda": (*_LIBRARY, f"{_EXPORTERS}.toolchain"),
    f"{_EXPORTERS}.rewrites": (*_LIBRARY, f"{_EXPORTERS}.decompositions"),
    f"{_EXPORTERS}.inductor": (*_LIBRARY, f"{_EXPORTERS}.rewrites", f"{_EXPORTERS}.toolchain", f"{_EXPORTERS}.cuda"),
    f"{_EXPORTERS}.portable": (*_LIBRARY, f"{_EXPORTERS}.inductor"),
    f"{_EXPORTERS}.onnx": (*_LIBRARY, f"{_EXPORTERS}.decompositions"),
    _EXPORTERS: (),
    "aot_backward.entries": (),
    "aot_backward.operators": _LIBRARY,
    "aot_backward.tensor_file": _LIBRARY,
    "aot_backward.capture": _LIBRARY,
    "aot_backward.checks": (*_LIBRARY, "aot_backward_exporters.toolchain", "aot_backward.capture"),
    "aot_backward.packaging": (
        *(*_LIBRARY, _EXPORTERS, "aot_backward.entries", "aot_backward.operators", "aot_backward.tensor_file"),
        *("aot_backward.capture", "aot_backward.checks"),
    ),
    "aot_backward.recording": (
        *(
            *_LIBRARY,
            _EXPORTERS,
            "aot_backward.operators",
            "aot_backward.tensor_file",
            "aot_backward.capture",
            "aot_backward.checks",
        ),
        *("aot_backward.entries", "aot_backward.packaging"),
    ),
    "aot_backward.api": (
        *_LIBRARY,
        "aot_backward.entries",
        "aot_backward.operators",
        "aot_backward.capture",
        "aot_backward.packaging",
    ),
    "aot_backward.forcefield_entry": (*_LIBRARY, "aot_backward.entries", "aot_backward.capture"),
    "aot_backward.derivative_entries": (*_LIBRARY, "aot_backward.entries", "aot_backward.capture"),
    "aot_backward.onnx": (
        *(
            *_LIBRARY,
            _EXPORTERS,
            "aot_backward.entries",
            "aot_backward.capture",
            "aot_backward.checks",
            "aot_backward.packaging",
        ),
        "aot_backward.api",
    ),
    "aot_backward.web": (
        *_LIBRARY,
        _EXPORTERS,
        "aot_backward.entries",
        "aot_backward.checks",
        "aot_backward.packaging",
        "aot_backward.api",
    ),
    "aot_backward.commands": (*_LIBRARY, _EXPORTERS, "aot_backward.tensor_file", "aot_backward.checks"),
    # The page shows only the archive. It needs the reader of portable graphs, but neither capture nor compiler.
    "aot_backward.report": (_RUNTIME, f"{_EXPORTERS}.graph", f"{_EXPORTERS}.portable"),
    "aot_backward.cli": (
        *(
            _RUNTIME,
            *_BASE,
            "aot_backward.tensor_file",
            "aot_backward.api",
            "aot_backward.checks.verify",
            "aot_backward.packaging.rebuild",
        ),
        *(
            "aot_backward.recording",
            "aot_backward.onnx",
            "aot_backward.web",
            "aot_backward.commands",
            "aot_backward.report",
        ),
    ),
    "aot_backward": (),  # the façade
}
LARGEST_ROOM = 20  # modules
OUTSIDE = {
    # imports that are allowed in addition to the standard library and torch
    "aot_backward_runtime": set(),
    "aot_backward_exporters": {"sympy", "numpy", "ml_dtypes", "onnx", "onnx_ir", "onnxscript"},
    "aot_backward_exporters.cuda.cross_compile": {"triton"},  # imported when a graph is cross-compiled
    "aot_backward": {"click", "rich", "safetensors", "sympy", "onnx", "onnxruntime"},
    "aot_backward.forcefield_entry": {"ase"},  # imported when forcefield() is called
    "aot_backward.checks.standalone_process": {"aot_backward_native"},  # run as a script in a process that has it
    "aot_backward_runtime.package.model_signing": {"cryptography", "model_signing"},  # behind the extra "sign"
}
PRIVATE_ALLOWED = {"torch.utils._pytree"}  # private, but torch offers this module under no public name


def modules() -> list[tuple[str, Path]]:
    out = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            out.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return out


def imports(name: str, path: Path, source: str) -> Iterator[str]:
    """Yield every module that ``source`` imports, also inside functions. ``from a import b`` yields a.b if that is a
    module of ours, else a."""
    known = {n for n, _ in modules()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            # The imported name may be a module or an attribute of ``base``.
            yield from (f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names)


def private(source: str) -> Iterator[str]:
    """Yield dotted names of torch with a component that begins with exactly one underscore."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts[1:]):
                yield name


def rule(name: str) -> str:
    return max((r for r in ALLOWED if name == r or name.startswith(f"{r}.")), key=len)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in prefixes)


def wrong_imports(name: str, path: Path, source: str) -> list[str]:
    own = rule(name)
    ours = [i for i in imports(name, path, source) if i.split(".")[0] in FOLDERS]
    if name in ("aot_backward", _RUNTIME):  # their TYPE_CHECKING blocks import the names that they offer
        return []
    # A part of the exporters may import their package itself
    return [
        i
        for i in ours
        if not within(i, (*ALLOWED[own], own)) and not (name.startswith(f"{_EXPORTERS}.") and i == _EXPORTERS)
    ]


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        todo, seen = [start], set[str]()
        while todo:
            for other in graph.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        reached[start] = seen
    groups = {tuple(sorted({a, *(b for b in reached[a] if a in reached.get(b, ()))})) for a in graph if a in reached[a]}
    return sorted(map(list, groups))


def rooms() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for name, path in modules():
        if path.name != "__init__.py":
            out.setdefault(name.rpartition(".")[0], []).append(name)
    return out


@pytest.mark.parametrize("room", rooms())
def test_a_room_says_what_it_is_for_and_is_not_too_full(room: str) -> None:
    assert len(rooms()[room]) <= LARGEST_ROOM
    assert ast.get_docstring(
        ast.parse((FOLDERS[room.split(".")[0]].joinpath(*room.split(".")[1:]) / "__init__.py").read_text())
    )


def test_nothing_imports_in_a_circle() -> None:
    facades = {"aot_backward", _RUNTIME}
    graph = {
        n: {i for i in imports(n, p, p.read_text()) if i.split(".")[0] in FOLDERS} - facades - {n}
        for n, p in modules()
        if n not in facades
    }
    assert circles(graph) == []
    of_rooms: dict[str, set[str]] = {}
    for name, ours in graph.items():
        of_rooms.setdefault(rule(name), set()).update({rule(i) for i in ours} - {rule(name)})
    assert circles(of_rooms) == []
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c"]]  # the check can fail


@pytest.mark.parametrize(("name", "path"), modules(), ids=[n for n, _ in modules()])
def test_imports_run_one_way(name: str, path: Path) -> None:
    source = path.read_text()
    assert wrong_imports(name, path, source) == []
    outside = {i.split(".")[0] for i in imports(name, path, source)} - set(FOLDERS) - {"torch", "__future__"}
    assert outside - sys.stdlib_module_names <= OUTSIDE.get(name, OUTSIDE[name.split(".")[0]])


@pytest.mark.parametrize(("name", "path"), modules(), ids=[n for n, _ in modules()])
def test_private_names_of_torch_stand_in_torch_api(name: str, path: Path) -> None:
    found = {n for n in private(path.read_text()) if not within(n, tuple(PRIVATE_ALLOWED))}
    assert name.endswith((".torch_api", ".cuda.cross_compile")) or found == set()


@pytest.mark.parametrize(
    ("name", "path"),
    [(n, p) for n, p in modules() if within(n, _FILES)],
    ids=[n for n, _ in modules() if within(n, _FILES)],
)
def test_what_reads_packages_imports_no_torch(name: str, path: Path) -> None:
    # Also not inside functions
    assert [i for i in imports(name, path, path.read_text()) if i.split(".")[0] == "torch"] == []


def test_these_checks_can_fail() -> None:
    path = FOLDERS["aot_backward_runtime"] / "package" / "archive.py"
    assert "torch.nn" in list(imports("aot_backward_runtime.package.archive", path, "def f():\n    import torch.nn"))
    path = FOLDERS["aot_backward_runtime"] / "native" / "plan.py"
    assert wrong_imports(
        "aot_backward_runtime.native.plan", path, "def f():\n    from aot_backward.api import export"
    ) == ["aot_backward.api"]
    for facade in ("aot_backward", "aot_backward_exporters"):
        assert wrong_imports("aot_backward_runtime.native.plan", path, f"import {facade}") == [facade]
    assert wrong_imports("aot_backward_runtime.format.elf", path, "from aot_backward_runtime import load") == [
        "aot_backward_runtime"
    ]
    path = FOLDERS["aot_backward"] / "cli" / "run.py"
    assert wrong_imports("aot_backward.cli.run", path, "from ..capture import joint_graph") == [
        "aot_backward.capture.joint_graph"
    ]
    assert list(private("import torch._inductor\nx = torch._C._aoti\nfrom torch._dynamo import y")) != []


def test_the_runtime_needs_torch_alone() -> None:
    runtime = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
    assert [d.split(">")[0] for d in runtime["dependencies"]] == ["torch"]
    library = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert library["optional-dependencies"]["sign"] == [f"aot-backward-runtime[sign]=={VERSION}"]
    assert runtime["version"] == library["version"] == VERSION == __version__
    assert f"aot-backward-runtime=={VERSION}" in library["dependencies"]

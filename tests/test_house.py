"""Who may import whom (cli -> export -> capture, exporters, package -> program -> runtime), and where private names of torch may stand."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from aot_backward.graph import VERSION
from aot_backward_runtime import __version__

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "aot_backward": ROOT / "aot_backward",
    "aot_backward_exporters": ROOT / "exporters" / "aot_backward_exporters",
    "aot_backward_runtime": ROOT / "runtime" / "aot_backward_runtime",
}
LIBRARY = "aot_backward_runtime", "aot_backward.graph", "aot_backward.torch_api", "aot_backward.capture.preserve"
ALLOWED = {
    # the longest prefix that fits a module says what it may import, besides its own
    "aot_backward_runtime": (),
    "aot_backward_exporters": LIBRARY,
    "aot_backward": (),  # the façade: see _HOME, which is not an import
    "aot_backward.graph": ("aot_backward_runtime",),
    "aot_backward.torch_api": (),
    "aot_backward.capture.preserve": ("aot_backward_runtime",),
    "aot_backward.operators": LIBRARY,
    "aot_backward.packaging.package_writer": (*LIBRARY, "aot_backward.operators"),
    "aot_backward.commands.tensor_file": (*LIBRARY, "aot_backward.packaging.package_writer"),
    "aot_backward.capture": LIBRARY,
    "aot_backward.checks.eager_check": LIBRARY,
    "aot_backward.checks.verify": (*LIBRARY, "aot_backward.checks.eager_check", "aot_backward.checks.step_check"),
    "aot_backward.commands.run_entry": LIBRARY,
    "aot_backward.commands.train_entry": (*LIBRARY, "aot_backward.commands.tensor_file"),
    "aot_backward.commands.sign": LIBRARY,
    "aot_backward.commands.doctor": (*LIBRARY, "aot_backward_exporters"),
    "aot_backward.entries": LIBRARY,
    "aot_backward.packaging.variant_spec": (*LIBRARY, "aot_backward.entries", "aot_backward.capture"),
    "aot_backward.checks.step_check": (*LIBRARY, "aot_backward.checks.eager_check", "aot_backward.capture"),
    "aot_backward.packaging.step_entry": (
        *(
            *LIBRARY,
            "aot_backward.entries",
            "aot_backward.packaging.variant_spec",
            "aot_backward.checks.step_check",
            "aot_backward.checks.eager_check",
            "aot_backward.capture",
        ),
        "aot_backward.packaging.builder",  # for types alone: build imports stepping
    ),
    "aot_backward.packaging.builder": (
        *(
            *LIBRARY,
            "aot_backward.entries",
            "aot_backward.packaging.variant_spec",
            "aot_backward.packaging.step_entry",
            "aot_backward.checks.eager_check",
        ),
        *("aot_backward.capture", "aot_backward.packaging.package_writer", "aot_backward_exporters"),
    ),
    "aot_backward.onnx": (
        *(
            *LIBRARY,
            "aot_backward.packaging.builder",
            "aot_backward.capture",
            "aot_backward.entries",
            "aot_backward.export",
            "aot_backward.checks.graph_check",
        ),
        *("aot_backward_exporters", "aot_backward.checks.verify"),
    ),
    "aot_backward.export": (
        *LIBRARY,
        "aot_backward.packaging.builder",
        "aot_backward.rebuild",
        "aot_backward.entries",
        "aot_backward.operators",
        "aot_backward.capture",
        "aot_backward.packaging.package_writer",
    ),
    "aot_backward.rebuild": (
        *(
            *LIBRARY,
            "aot_backward.capture",
            "aot_backward.checks.graph_check",
            "aot_backward.packaging.package_writer",
            "aot_backward.checks.eager_check",
        ),
        "aot_backward_exporters",
    ),
    "aot_backward.checks.graph_check": (*LIBRARY, "aot_backward.checks.eager_check", "aot_backward.checks.verify"),
    "aot_backward.record": (
        *LIBRARY,
        "aot_backward.capture",
        "aot_backward.recording.compile",
        "aot_backward.recording.miss_file",
        "aot_backward.packaging.package_writer",
    ),
    "aot_backward.recording.replay": (*LIBRARY, "aot_backward.record"),
    "aot_backward.recording.compile": (
        *(*LIBRARY, "aot_backward.checks.eager_check", "aot_backward.capture", "aot_backward.operators", "aot_backward.packaging.package_writer"),
        "aot_backward_exporters",
    ),
    "aot_backward.recording.miss_file": (
        *(*LIBRARY, "aot_backward.capture", "aot_backward.recording.compile", "aot_backward.record"),
        *("aot_backward.packaging.package_writer", "aot_backward.commands.tensor_file", "aot_backward_exporters"),
    ),
    # the page is made of what the archive says: no capture, no compiler, and of the exporters the reader of portable graphs alone
    "aot_backward.report": ("aot_backward_runtime", "aot_backward.graph", "aot_backward_exporters.portable.graph_json"),
    "aot_backward.cli": (
        *("aot_backward_runtime", "aot_backward.graph", "aot_backward.export", "aot_backward.checks.verify"),
        *(
            "aot_backward.record",
            "aot_backward.rebuild",
            "aot_backward.recording.replay",
            "aot_backward.recording.miss_file",
            "aot_backward.commands.sign",
            "aot_backward.onnx",
        ),
        *(
            "aot_backward.commands.run_entry",
            "aot_backward.commands.train_entry",
            "aot_backward.commands.tensor_file",
            "aot_backward.commands.doctor",
            "aot_backward.report",
        ),
    ),
}
OUTSIDE = {
    # what may be imported that is neither the standard library's nor torch
    "aot_backward_runtime": set(),
    "aot_backward_exporters": {"sympy", "numpy", "ml_dtypes", "onnx", "onnx_ir", "onnxscript"},
    "aot_backward_exporters.cuda.cross_compile": {"triton"},  # where it is asked for
    "aot_backward": {"click", "rich", "safetensors", "sympy", "onnx", "onnxruntime"},
    "aot_backward_runtime.package.model_signing": {"cryptography", "model_signing"},  # behind the extra "sign"
}
PRIVATE_ALLOWED = {"torch.utils._pytree"}  # torch has no public name for it, and never has had


def modules() -> list[tuple[str, Path]]:
    out = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            out.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return out


def imports(name: str, path: Path, source: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever in it; ``from a import b`` is a.b where that is a module of ours, else a."""
    known = {n for n, _ in modules()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                base = ".".join([*parents[: len(parents) - node.level + 1], *([node.module] if node.module else [])])
            # `from . import export` in aot_backward is the function's façade, and also the module it lives in
            yield from (f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names)


def private(source: str) -> Iterator[str]:
    """Dotted names of torch with a component that begins with one underscore."""
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
    if name == "aot_backward":  # its TYPE_CHECKING block repeats what it offers
        return []
    return [i for i in ours if i != "aot_backward" and not within(i, (*ALLOWED[own], own if own != "aot_backward" else "-"))]


@pytest.mark.parametrize(("name", "path"), modules(), ids=[n for n, _ in modules()])
def test_imports_run_one_way(name: str, path: Path) -> None:
    source = path.read_text()
    assert wrong_imports(name, path, source) == []
    outside = {i.split(".")[0] for i in imports(name, path, source)} - set(FOLDERS) - {"torch", "__future__"}
    assert outside - sys.stdlib_module_names <= OUTSIDE.get(name, OUTSIDE[name.split(".")[0]])


@pytest.mark.parametrize(("name", "path"), modules(), ids=[n for n, _ in modules()])
def test_private_names_of_torch_stand_in_torch_api(name: str, path: Path) -> None:
    found = {n for n in private(path.read_text()) if not within(n, tuple(PRIVATE_ALLOWED))}
    assert name.endswith((".torch_api", ".cuda_cross")) or found == set()  # DESIGN, section 8: the one exception


def test_these_checks_can_fail() -> None:
    path = FOLDERS["aot_backward_runtime"] / "plan.py"
    assert wrong_imports("aot_backward_runtime.native.plan", path, "def f():\n    from aot_backward.api import export") == ["aot_backward.export"]
    path = FOLDERS["aot_backward"] / "cli" / "run.py"
    assert wrong_imports("aot_backward.cli.run", path, "from ..capture import joint") == ["aot_backward.capture.joint_graph"]
    assert list(private("import torch._inductor\nx = torch._C._aoti\nfrom torch._dynamo import y")) != []


def test_the_runtime_needs_torch_alone() -> None:
    runtime = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
    assert [d.split(">")[0] for d in runtime["dependencies"]] == ["torch"]
    library = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert library["optional-dependencies"]["sign"] == [f"aot-backward-runtime[sign]=={VERSION}"]
    assert runtime["version"] == library["version"] == VERSION == __version__
    assert f"aot-backward-runtime=={VERSION}" in library["dependencies"]

"""``aot-backward export FILE.py:NAME -o OUT.pt2``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .convert import external_data_option, refuse_idle, say, say_paths
from .support.failures import EXIT_CODES, debug_option
from .support.options import tune_option
from .support.progress import shown

if TYPE_CHECKING:
    from ..api import Entries

_FORMATS = "pt2: a package. onnx: graphs for onnxruntime. wasm: a folder for browsers and Node.js."


class Program(click.ParamType):
    """``FILE.py:NAME`` as a path and a name."""

    name = "FILE.py:NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, str]:
        file, colon, name = str(value).rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            self.fail(f"{value!r} is not of the form FILE.py:NAME, such as model.py:entries", param, ctx)
        path = Path(file)
        if not path.is_file():
            self.fail(f"{file} does not exist", param, ctx)
        return path, name


@click.command(epilog=EXIT_CODES)
@click.argument("program", type=Program(), metavar="FILE.py:NAME")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="OUT.pt2 or OUT.onnx: the file to write, whole or not at all. With --format wasm, a folder.",
)
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    metavar="TARGETS",
    help="cpu:avx2 (the same as cpu), cpu:sse4, cpu:avx512, or several with commas between them; cuda for this machine's GPU, "
    "cuda:sm_90 (80, 89, 100), cpu:neon or cpu:wasm to cross-compile.",
)
@click.option(
    "--portable/--no-portable", default=True, help="Leave out the graphs as data, which rebuild and convert need."
)
@click.option(
    "--weights/--no-weights",
    default=True,
    help="Leave the weights out; they are then bound when the package is loaded.",
)
@tune_option("Time the alternatives that the graphs suggest against eager, or none. The fastest is shipped.")
@click.option(
    "--entry",
    "wanted",
    multiple=True,
    metavar="WHICH",
    help="Export only the entry of this name, or all of this kind: module, function, grad or step. May be given several times.",
)
@click.option(
    "--runtime",
    type=click.Choice(["torch", "standalone"]),
    default="torch",
    show_default=True,
    help="standalone: fail if an entry needs PyTorch, and name the operators that need it.",
)
@click.option(
    "--format", "form", type=click.Choice(["pt2", "onnx", "wasm"]), default="pt2", show_default=True, help=_FORMATS
)
@external_data_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="With --format onnx: report the written files as one JSON object on standard output.",
)
@debug_option
@click.pass_context
def export(
    context: click.Context,
    program: tuple[Path, str],
    output: Path,
    target: str,
    portable: bool,
    weights: bool,
    tune: str,
    wanted: tuple[str, ...],
    runtime: str,
    form: str,
    external_data: bool | None,
    as_json: bool,
) -> None:
    """Compile the entries that the function NAME of FILE.py returns into the package OUT.pt2.

    NAME takes no arguments. It returns an aot_backward.Module, Grad or Step, or a dict of several by their names in the
    package; a single entry is called "module", "function", "grad" or "step". Export compares every gradient, and every
    change of a training step, with eager before it writes anything.

    With --format onnx nothing is compiled: a module becomes OUT.forward.onnx and OUT.backward.onnx, anything else
    OUT.onnx. With --format wasm, -o names the folder for a WebAssembly module, its JavaScript and the weights; this
    needs emscripten and Node.js.
    """
    path, name = program
    compiled = ("target", "portable", "weights", "runtime")
    refuse_idle(
        context,
        form,
        {
            "pt2": ("external_data", "as_json"),
            "onnx": (*compiled, "tune"),
            "wasm": (*compiled, "external_data", "as_json"),
        }[form],
    )
    from ..api import export as export_package

    entries = _select(_entries(path, name), wanted, f"{path}:{name}")
    if form == "onnx":
        from ..onnx.export import export_onnx

        with shown() as progress:
            files = export_onnx(output, entries, external_data=external_data, progress=progress)
        say(files, as_json)
        return
    if form == "wasm":
        from ..web import export as export_wasm

        with shown() as progress:
            paths = export_wasm(output, entries, tune=tune, progress=progress)
        say_paths(paths)
        return
    with shown() as progress:
        export_package(
            output,
            entries,
            target=target,
            weights=weights,
            portable=portable,
            tune=tune,
            runtime=runtime,
            progress=progress,
        )
    click.echo(f"wrote {output} ({output.stat().st_size / 1e6:.2f} MB): {', '.join(entries)}")


def _entries(path: Path, name: str) -> Entries:
    from ..api import Function, Grad, Module, Step

    entries = _call(_function(path, name), f"{path}:{name}")
    if isinstance(entries, (Module, Function, Grad, Step)):
        return {_kind(entries): entries}
    if (
        not isinstance(entries, dict)
        or not entries
        or not all(isinstance(k, str) and isinstance(v, (Module, Function, Grad, Step)) for k, v in entries.items())
    ):
        description = (
            f"a dict of {sorted({type(v).__name__ for v in entries.values()})}"
            if isinstance(entries, dict) and entries
            else repr(entries)[:60]
        )
        raise click.ClickException(
            f"{path}:{name} returned {description}; return a Module, a Function, a Grad, a Step, or a dict of them by name"
        )
    return entries


def _kind(entry: object) -> str:
    return type(entry).__name__.lower()


def _select(entries: Entries, selectors: tuple[str, ...], program: str) -> Entries:
    """Return the entries that ``selectors`` select, each by name or, if no entry has that name, by kind."""
    names = set(entries) if not selectors else set[str]()
    for selector in selectors:
        matches = [selector] if selector in entries else [n for n, e in entries.items() if _kind(e) == selector]
        if not matches:
            available = ", ".join(f"{n} ({_kind(e)})" for n, e in entries.items())
            raise click.UsageError(
                f"--entry {selector}: {program} returned no entry of that name or kind; it returned: {available}"
            )
        names.update(matches)
    return {n: e for n, e in entries.items() if n in names}


def _function(path: Path, name: str) -> Callable[[], Any]:
    """Runs ``FILE.py`` as a module, with its folder on the path as for a script."""
    # A file called json.py must not replace json
    module_name = path.stem if path.stem not in sys.modules else f"{path.stem}_program"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[module_name] = module
    _call(lambda: spec.loader.exec_module(module), str(path))  # type: ignore[union-attr]
    if not callable(vars(module).get(name)):
        raise click.UsageError(f"{path} has no function {name!r}; it has: {', '.join(_offered(module)) or 'none'}")
    return vars(module)[name]


def _offered(module: Any) -> list[str]:
    return [
        n
        for n, v in vars(module).items()
        if callable(v) and not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
    ]


def _call(function: Callable[[], Any], source: str) -> Any:
    """Run user code. Its exceptions are reported as errors in ``source``, not as errors of aot-backward."""
    from aot_backward_runtime.errors import ExportError

    try:
        return function()
    except Exception as error:
        raise ExportError(f"{source} raised {type(error).__name__}: {error}; --debug shows where") from error

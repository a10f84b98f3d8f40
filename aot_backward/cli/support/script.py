"""Run a user's script in this process and inside a context, as ``python train.py ARGS…`` or
``python -m package.module ARGS…`` would."""

from __future__ import annotations

import builtins
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import click

from .failures import FAILED, ScriptInterrupted

_OURS = ("aot_backward", "aot_backward_runtime", "aot_backward_exporters")
_STARTS = _OURS  # packages of the frames before the script's first


@dataclass(frozen=True)
class Script:
    """A script and its arguments. ``name``: a file of Python code or, with ``as_module``, the module's name after
    ``-m``."""

    name: str
    arguments: tuple[str, ...]
    as_module: bool = False

    def run(self) -> None:
        """Run the script as ``__main__``. ``runpy`` would remove this module at the end, but the recorded passes are
        compiled after that and look up the script's definitions in it."""
        main = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __cached__=None)
        if self.as_module:
            spec, code = _find_module(self.name)
            main.__dict__.update(
                __spec__=spec,
                __file__=spec.origin,
                __cached__=spec.cached,
                __loader__=spec.loader,
                __package__=spec.parent,
            )
            sys.argv[0] = spec.origin or sys.argv[0]
        else:
            path = str(Path(self.name).absolute())
            main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 # as python does

    @property
    def folder(self) -> str:
        """Return the folder that Python puts first in ``sys.path``."""
        return str(Path.cwd()) if self.as_module else str(Path(self.name).resolve().parent)


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return the module that ``python -m`` runs: ``name`` itself, or the ``__main__`` of a package. Raise
    :class:`ImportError` in Python's words."""
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = name, find_spec(f"{name}.__main__")
            if spec is None:
                raise ImportError(
                    f"No module named {package}.__main__; {package!r} is a package and cannot be directly executed"
                )
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # from an import within the package
        raise ImportError(
            f"Error while finding module specification for {name!r} (ModuleNotFoundError: {error})"
        ) from None
    if spec is None:
        raise ImportError(f"No module named {name}")
    get_code: Any = getattr(spec.loader, "get_code", None)  # the loader of a zip file has it too
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ImportError(f"No code object available for {spec.name}")
    return spec, code


def script_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument ``script``, a :class:`Script`, and the option ``max_structures``."""
    option = click.option(
        "--max-structures", type=click.IntRange(min=1), metavar="N",
        help="After N structures that the package does not hold, run further ones in eager.  [default: 128]",
    )  # fmt: skip
    words = "TRAIN.py | -m MODULE [ARGS]…"
    return option(
        click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, callback=_parsed, metavar=words)(
            command
        )
    )


def _parsed(context: click.Context, parameter: click.Parameter, words: Sequence[str]) -> Script:
    first, *rest = words
    if first == "-m":
        if not rest:
            raise click.UsageError("-m needs the name of a module", context)
        return Script(rest[0], tuple(rest[1:]), as_module=True)
    path = Path(first)
    if not path.exists():
        raise click.UsageError(f"the script {first} does not exist", context)
    if not path.is_file():
        raise click.UsageError(f"the script {first} is not a file", context)
    return Script(first, tuple(rest))


def run_script(
    script: Script, context: AbstractContextManager[Any], on_interrupt: Callable[[], None] = lambda: None
) -> int:
    """Run ``script`` as ``__main__`` inside ``context``. Return its exit code.

    An exception of the script is printed as Python prints it, without frames of aot-backward, and ends the command with
    Python's exit status. An interrupt of the script passes through ``context`` too: ``on_interrupt`` is called first,
    and :class:`ScriptInterrupted` is raised after ``context`` has closed. Exceptions of ``context`` are raised
    unchanged, also a strict replay's :class:`MissError`.
    """
    from aot_backward_runtime.errors import MissError

    code, interrupted = 0, False
    try:
        with _as_main(script), context:
            try:
                with _interrupts_of_its_own():
                    script.run()
            except SystemExit as end:
                code = _exit_code(end)
            except MissError:
                raise
            except BaseException as error:
                _drop_own_frames(error, set())
                # An ImportError without a traceback is from _find_module(): the module cannot be run
                if isinstance(error, ImportError) and error.__traceback__ is None:
                    raise click.ClickException(str(error)) from None
                sys.excepthook(type(error), error, error.__traceback__)
                if isinstance(error, KeyboardInterrupt):
                    interrupted = True
                    on_interrupt()
                    raise
                raise click.exceptions.Exit(FAILED) from None
    except KeyboardInterrupt:
        if interrupted:
            raise ScriptInterrupted from None
        raise
    return code


@contextmanager
def _interrupts_of_its_own() -> Iterator[None]:
    """Restore the handler of interrupts after the script."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and signal.getsignal(signal.SIGINT) != before:
            signal.signal(signal.SIGINT, before)


@contextmanager
def _as_main(script: Script) -> Iterator[None]:
    arguments, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    # Script.run replaces "-m" by the module's file
    sys.argv = ["-m" if script.as_module else script.name, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = script.folder
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = arguments, path, main


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return FAILED


def _drop_own_frames(error: BaseException, visited: set[int]) -> None:
    """Remove our frames from the tracebacks of ``error``, its causes and its contexts."""
    if id(error) in visited:
        return
    visited.add(id(error))
    steps = []
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    while steps and _home(steps[0]) in _STARTS:
        del steps[0]
    frames: TracebackType | None = None
    for step in reversed(steps):
        if _home(step) not in _OURS:
            frames = TracebackType(frames, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = frames
    for cause in (
        error.__cause__,
        error.__context__,
        *(error.exceptions if isinstance(error, BaseExceptionGroup) else ()),
    ):
        if cause is not None:
            _drop_own_frames(cause, visited)


def _home(step: TracebackType) -> str:
    """Return the top-level package of a frame's code."""
    return str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]

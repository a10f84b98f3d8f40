"""Runs g++ for Inductor: in parallel instead of one by one, and only once for the parts that all graphs share.

While a graph is lowered, :func:`record_commands` keeps the commands that Inductor's ``CppBuilder`` would run.
:class:`Builder` runs them on all usable cores, with two precompiled headers (6 s each to build; 1.4 s off every wrapper
and 1.5 s off every kernel file), the C interface of the library compiled beforehand, and an empty library in place of
PyTorch's. The cache stores these parts and every object by content.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from aot_backward_runtime.errors import ExportError

from .. import torch_api
from ..process_state import patched
from . import aarch64, checked_loops, cpp_source, products, wasm
from .compile_cache import OBJECT, cache_root, digest, store_folder, stored_object

_LINK_FLAGS = (
    "-s",
    "-Wl,--build-id=none",
    "-Wl,-z,noexecstack",
    f"-Wl,--version-script={Path(__file__).with_name('exports.map')}",
)
_UNUSED = "-ltorch"
"""A library that only refers to others. In torch's CUDA build (2.15) it also has functions of the C++ library, so the
linker would keep the dependency. Packages that run without PyTorch do not have it."""
_HEADERS = {"wrapper.cpp": "wrapper.h", "kernel.cpp": "kernel.h"}
_PARTS = {"wrapper.h": "wrapper.cpp", "kernel.h": "kernel.cpp", "interface": "wrapper.cpp", "torch": "wrapper.cpp"}
"""Shared parts of libraries, and the file with the flags to compile each."""
HERE = platform.machine()
_CROSS = {wasm.MACHINE: ("em++", "emscripten")}
"""Compilers for machines without one of GNU, and their Debian packages."""
_TORCH, _TORCH_FLAG = "libtorch_cpu.so", "-ltorch_cpu"
_UNASKED = "-mavx512bf16"
"""A flag that Inductor (torch 2.13) adds for the first graph of a process if this machine has these instructions; the
target may lack them."""
_LARGE = 100_000
"""Characters from which on a wrapper is compiled with -O1: the 430,000 of a BERT's training step in 3.2 s, with -O2 in
5.3. The code between the kernels then takes 1 % longer, which matters for calls of some µs, whose wrappers have 20,000
to 60,000."""
_LINES_SHOWN = 15  # the last lines of a failing compiler's output: keeps the message short; a guess


class CompilerFailed(ExportError):
    """The compiler rejected a file. ``said``: its complete output."""

    said = ""


@dataclass(frozen=True)
class Command:
    """One run of g++ that Inductor requested. ``sources``: names and contents of C++ and assembler files, empty for the
    link. ``machine``: the target."""

    compiler: tuple[str, ...]
    flags: tuple[str, ...]
    sources: dict[str, str]
    machine: str = HERE


@contextlib.contextmanager
def record_commands(folder: Path, march: str, machine: str = HERE) -> Iterator[list[Command]]:
    """Return a context that records builds below ``folder`` instead of running them; targets are empty files, which
    Inductor then removes."""
    builder = torch_api.CppBuilder
    original = builder.build
    commands: list[Command] = []

    def build(self: object) -> None:
        target = Path(builder.get_target_file_path(self))
        if not target.is_relative_to(folder):
            original(self)
            return
        command = _parse(str(builder.get_command_line(self)).replace("-march=native", f"-march={march}"))
        # weights.S is assembler; wasm.py has C++ in its place
        if machine != wasm.MACHINE or "weights.S" not in command.sources:
            commands.append(_for_machine(command, machine))
        target.touch()

    with patched(builder, build=build):
        yield commands


def _parse(line: str) -> Command:
    argv = shlex.split(line)
    first_flag = next(i for i, a in enumerate(argv) if a.startswith("-"))
    files = [a for a in argv[:first_flag] if a.endswith((".cpp", ".S", ".o"))]
    output = argv.index("-o")
    flags = [a for a in (*argv[first_flag:output], *argv[output + 2 :]) if a not in ("-c", _UNASKED)]
    flags.append("-fsigned-zeros")  # eager keeps -0.0; Inductor passes -fno-signed-zeros
    sources = {_short(f): Path(f).read_text() for f in files if not f.endswith(".o")}
    return Command(tuple(argv[: first_flag - len(files)]), tuple(flags), sources)


def _for_machine(command: Command, machine: str) -> Command:
    """Return ``command`` with the compiler for ``machine``, and without the folders of this machine's libraries."""
    if machine == HERE:
        return command
    if machine == wasm.MACHINE:
        return Command(compiler(machine), wasm.flags(command.flags), command.sources, machine)
    flags = tuple(flag for flag in command.flags if not flag.startswith("-L"))
    return Command(compiler(machine), flags, command.sources, machine)


def _short(path: str) -> str:
    """Return ``…/c4cc2kw6….wrapper.cpp`` as ``wrapper.cpp``: relative and equal for all graphs, because the library
    contains it."""
    return ".".join(Path(path).name.split(".")[-2:])


@contextlib.contextmanager
def adjust_commands(march: str) -> Iterator[None]:
    """Make Inductor's own builds use the flags of :meth:`Builder.link`, and ``march`` instead of this machine's."""
    builder = torch_api.CppBuilder
    original = builder.get_command_line

    def get_command_line(self: object) -> str:
        line = str(original(self)).replace("-march=native", f"-march={march}")  # torch 2.11 lacks the setting
        return f"{line} {shlex.join(_LINK_FLAGS)}" if " -shared " in line else line

    with patched(builder, get_command_line=get_command_line):
        yield


def compiler(machine: str = HERE) -> tuple[str, ...]:
    """Return the command of the C++ compiler that Inductor would use, or of the one for another machine:
    ``$CXX_AARCH64``, or GNU's; ``$CXX_WASM32``, or emscripten's."""
    if machine != HERE:
        default, package = _CROSS.get(machine) or (
            f"{machine}-linux-gnu-g++",
            f"g++-{machine.replace('_', '-')}-linux-gnu",
        )
        command = tuple(shlex.split(os.environ.get(f"CXX_{machine.upper()}", ""))) or (default,)
        if shutil.which(command[0]) is None:
            raise ExportError(
                f"code for {machine} needs the compiler {command[0]}, and none was found: apt-get install {package}"
            )
        return command
    try:
        return tuple(shlex.split(torch_api.get_cpp_compiler()))
    except (torch_api.InvalidCxxCompiler, OSError) as error:  # OSError: CXX is empty or not a program
        raise ExportError(
            "exporting needs a C++ compiler, and none was found: apt-get install g++ (or set CXX)"
        ) from error


def c_compiler(machine: str) -> tuple[str, ...]:
    """Return the command of the C compiler that comes with :func:`compiler`, which may begin with another program:
    ``ccache g++``, ``zig c++``."""
    command = compiler(machine)
    for number, word in enumerate(command):
        folder, slash, name = word.rpartition("/")
        for cpp, c in (("clang++", "clang"), ("em++", "emcc"), ("g++", "gcc"), ("c++", "cc")):
            if cpp in name:
                return (*command[:number], folder + slash + name.replace(cpp, c), *command[number + 1 :])
    return command


def emscripten_tool(name: str) -> str:
    """Return the command of another program of emscripten: the one beside the compiler, if that is named by its
    path."""
    beside = Path(compiler(wasm.MACHINE)[0]).with_name(name)
    return str(beside) if beside.exists() else name


@functools.cache
def compiler_version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


class Builder:
    """Runs recorded commands in a thread pool. Leaving its ``with`` block waits for running commands and drops queued
    ones. An exception kills running commands: their results are not needed, and an interrupted Python would wait for
    them before it exits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="g++")
        self._parts: dict[str, Future[Path]] = {}
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._stopped = True
            for process in tuple(self._running):
                _kill(process)
        self._pool.shutdown(cancel_futures=True)

    def compile(self, name: str, commands: Sequence[Command], folder: Path, least_product: int) -> list[Future[None]]:
        """Start compiling the files of the graph ``name`` in ``folder``; shared parts that are not in the cache come
        first in the queue. ``least_product``: the multiplications from which on a matrix product may be oneDNN's; 0 if
        the graph has none so large."""
        compiles = commands[:-1]  # the last is the link
        if commands[-1].machine == wasm.MACHINE:
            return self._compile_for_wasm(name, compiles, folder)
        for command in compiles:
            for file, text in command.sources.items():
                prepare = {"wrapper.cpp": cpp_source.model_source, "kernel.cpp": cpp_source.kernel_source}.get(file)
                text = _without_name(folder, text)
                text = checked_loops.in_parallel(text) if file == "kernel.cpp" else text
                text = prepare(text) if prepare else text
                if least_product and file == "wrapper.cpp" and command.machine == "x86_64":
                    text = products.source(text, least_product)
                (folder / file).write_text(
                    aarch64.source(text) if command.machine == aarch64.MACHINE and prepare else text
                )
        self.prepare(commands)
        return [self._pool.submit(self._compile, name, command, folder) for command in compiles]

    def prepare(self, commands: Sequence[Command]) -> None:
        """Start compiling the parts that the library of ``commands`` shares with others; the ones that are needed first
        come first."""
        by_file = {file: command for command in commands for file in command.sources}
        for part, file in _PARTS.items():
            if file in by_file and part not in self._parts:
                self._parts[part] = self._pool.submit(_build_shared_part, part, by_file[file], self._run)

    def _compile_for_wasm(self, name: str, compiles: Sequence[Command], folder: Path) -> list[Future[None]]:
        texts = {file: _without_name(folder, text) for command in compiles for file, text in command.sources.items()}
        for file, text in wasm.sources(cpp_source.model_source(texts["wrapper.cpp"]), texts["kernel.cpp"]).items():
            (folder / file).write_text(text)
        cpp_source.write_patched_headers(folder / "include")
        return [self._pool.submit(self._compile, name, command, folder) for command in compiles]

    def link(self, name: str, commands: Sequence[Command], folder: Path, library: Path) -> Future[None]:
        """Link the objects of :meth:`compile`. No build id, no symbol table, no executable stack: the same graph gives
        the same bytes."""
        command = commands[-1]
        objects = [_object(file) for c in commands for file in c.sources]
        if command.machine == wasm.MACHINE:
            return self._pool.submit(self._run, name, [*command.compiler, "-r", *objects, "-o", str(library)], folder)
        interface = str(self._parts["interface"].result() / "interface.o")
        flags = [flag for flag in command.flags if flag not in (_UNUSED, _TORCH_FLAG)]
        torch_library = str(self._parts["torch"].result() / _TORCH)
        needed = ["-Wl,--push-state,--no-as-needed", torch_library, "-Wl,--pop-state"]
        wrap_flag = f"-Wl,--wrap={cpp_source.PARALLEL}"
        argv = [*command.compiler, *objects, interface, "-o", str(library), *needed, *flags]
        argv += [*_LINK_FLAGS, wrap_flag]
        return self._pool.submit(self._run, name, argv, folder)

    def _compile(self, name: str, command: Command, folder: Path) -> None:
        """Compile one file, or reuse the cached object of the same text and flags from any graph."""
        (file,) = command.sources
        include_flags: list[str] = []
        part = ""
        if command.machine == wasm.MACHINE:
            headers = (Path(cpp_source.__file__), *wasm.INCLUDE.iterdir())
            include_flags, part = ["-Iinclude"], "".join(path.read_text() for path in headers)
        elif file in _HEADERS:
            header = self._parts[_HEADERS[file]].result()
            include_flags, part = ["-include", str(header / _HEADERS[file]), f"-I{header / 'include'}"], header.name
        text = (folder / file).read_text()
        flags = (
            [*command.flags, "-O1"]
            if file == "wrapper.cpp" and len(text) > _LARGE and command.machine != wasm.MACHINE
            else command.flags
        )
        argv = [*command.compiler, *include_flags, *flags, "-w", "-c", file, "-o", _object(file)]
        key = digest([file, text, part, _versions(command), *command.compiler, *flags])

        def build(built: Path) -> None:
            try:
                self._run(name, argv, folder)
            # g++ 12 for aarch64 does not survive a copy from float16 to float32 at -O3 (expr.cc:333)
            except CompilerFailed as error:
                if "internal compiler error" not in error.said:
                    raise
                self._run(name, [*argv, "-O2"], folder)
            shutil.move(folder / _object(file), built / OBJECT)

        (folder / _object(file)).write_bytes(stored_object(key, build))

    def _run(self, name: str, argv: Sequence[str], folder: Path) -> None:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._running.add(process)
        if self._stopped:  # in another thread, while the process was started
            _kill(process)
        try:
            output, _ = process.communicate()
        finally:
            self._running.discard(process)
        if process.returncode:
            tail = "\n".join(output.splitlines()[-_LINES_SHOWN:])
            error = CompilerFailed(
                f"{name}: {argv[0]} failed with exit status {process.returncode}; another compiler can be named in CXX\n{tail}"
            )
            error.said = output
            raise error


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a running g++ and the compiler that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _build_shared_part(part: str, command: Command, run: Callable[[str, Sequence[str], Path], None]) -> Path:
    """Return the folder of a precompiled header or of the C interface's object; build it if the cache has none for
    these flags."""
    texts: dict[str, Callable[[], str]] = {
        "wrapper.h": cpp_source.wrapper_header,
        "kernel.h": lambda: cpp_source.KERNEL_HEADER,
        "interface": cpp_source.interface_source,
        "torch": str,
    }
    text = texts[part]()
    added = {"kernel.h": aarch64.kernel_header, "interface": aarch64.source}
    if command.machine == aarch64.MACHINE and part in added:
        text = added[part](text)
    key = digest(
        [part, text, Path(cpp_source.__file__).read_text(), _versions(command), *command.compiler[1:], *command.flags]
    )

    def build(folder: Path) -> None:
        if part == "torch":
            _build_stand_in(folder, command, run)
            return
        source, output = (
            (["-c", "interface.cpp"], "interface.o")
            if part == "interface"
            else (["-x", "c++-header", part], f"{part}.gch")
        )
        (folder / source[-1]).write_text(text)
        if part != "kernel.h":
            cpp_source.write_patched_headers(folder / "include")
        argv = [*command.compiler, "-Iinclude", *command.flags, "-w", *source, "-o", output]
        run(f"the part that all libraries share ({part})", argv, folder)

    return store_folder(cache_root() / "shared" / key, build)


def _build_stand_in(folder: Path, command: Command, run: Callable[[str, Sequence[str], Path], None]) -> None:
    """Build an empty library with the name of PyTorch's, so that libraries depend on it; their symbols are bound at load
    time. PyTorch's own may be for another machine, and the linker takes 0.3 s with it in place of 0.05."""
    (folder / "empty.c").write_text("")
    argv = [*command.compiler, "-shared", "-nostdlib", f"-Wl,-soname,{_TORCH}", "-x", "c", "empty.c", "-o", _TORCH]
    run(f"a stand-in for {_TORCH}", argv, folder)


def _versions(command: Command) -> list[str]:
    """Return the versions of torch and the compiler, and the path of torch's headers."""
    return [
        torch.__version__,
        str(torch.version.git_version),
        str(cpp_source.TORCH_INCLUDE),
        compiler_version(command.compiler),
    ]


def _without_name(folder: Path, text: str) -> str:
    """Return ``text`` without the name of Inductor's folder, which differs in each export: it is in a comment of the
    kernels."""
    return "".join(line for line in text.splitlines(True) if not (line.startswith("//") and str(folder) in line))


def _object(file: str) -> str:
    return f"{file.rpartition('.')[0]}.o"

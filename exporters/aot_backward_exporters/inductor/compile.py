"""Compiles captured graphs to native libraries with AOTInductor.

The steps for each graph:

1. Its canonical form, the settings and the versions of all compiling software give a key (:mod:`.cache_key`). If the
   cache has a library for that key, neither Inductor nor g++ runs.
2. Otherwise Inductor lowers a copy of it to C++ (:mod:`.lowering`), graph after graph in this process. Parameters and
   buffers stay out of the code: every one of ``Graph.constants`` must be a constant of the library, to be bound by
   pointer, and no other constant may exist.
3. On CPU, g++ runs for all graphs at once on the usable cores, while Inductor goes on with the next
   (:mod:`..toolchain.gcc`). Parts that all libraries share are compiled once (:mod:`..toolchain.cpp_source`). On CUDA
   Inductor builds each library itself, Triton kernels embedded.
4. The library loses its symbol table, its executable stack, and every path of this machine; its headers are read for
   the manifest.
5. The cache stores it; ``folder`` gets a copy of it, its metadata and the JSON of operators that need the proxy
   executor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch

import aot_backward_exporters
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.elf import clear_executable_stack, read_elf

from .. import fake_quantization, torch_api
from ..cuda import cross_compile
from ..cuda.retarget import retarget
from ..cuda.toolkit import toolkit
from ..graph import LINE, Artifact, Graph, Line
from ..progress import Progress, silent
from ..rewrites.graph_edit import call
from ..toolchain import gcc, wasm
from ..toolchain.compile_cache import CachedLibrary, digest, digest_of_sources, fetch, is_new, store
from ..toolchain.strip_paths import erase_paths
from . import extern_nodes, selections
from .cache_key import Canonical, canonical_graph
from .lowering import GeneratedCode, lower
from .settings import settings_for
from .targets import Processor, processor, target_spec


def compile_graphs(
    graphs: Sequence[Graph],
    *,
    folder: Path,
    fake_mode: Any,
    target: str = "cpu",
    progress: Progress = silent,
) -> dict[str, Artifact]:
    """Compile ``graphs`` to native libraries, by name; write their files into ``folder``, which must exist and be this
    target's alone.

    ``fake_mode``: the ``FakeTensorMode`` of the capture, with its shape environment; lowering may add guards to it.
    ``target``: one of :data:`.targets.KNOWN`. ``progress`` is called with the stages "lower" and "compile". Raises
    :class:`ExportError`.
    """
    if target.startswith("cuda:"):
        device = cross_compile.check(target)
        with cross_compile.crossing(device):
            graphs = [retarget(graph, fake_mode, device) for graph in graphs]
            return _compiled(graphs, folder, fake_mode, target, progress)
    if target == "cuda":
        with toolkit():
            return _compiled(graphs, folder, fake_mode, target, progress)
    return _compiled(graphs, folder, fake_mode, target, progress)


@contextlib.contextmanager
def shared_parts_started(names: Sequence[str]) -> Iterator[None]:
    """If the compile cache is new, compile the parts that all libraries for these targets share while the caller
    captures its program: they take g++ 15 s of one core. The flags are those of a graph of one operator."""
    processors = [processor(name) for name in names if name.startswith("cpu") and name != "cpu:wasm"]
    if not is_new() or not processors:
        yield
        return
    for built_for in processors:
        gcc.compiler(built_for.machine)  # an error for one that is missing
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as work, gcc.Builder() as builder:
        for number, built_for in enumerate(processors):
            folder = Path(work) / str(number)
            folder.mkdir()
            with gcc.record_commands(folder, built_for.march, built_for.machine) as commands:
                _lower_one_operator(folder / "inductor", built_for)
            builder.prepare(commands)
        yield


def _lower_one_operator(folder: Path, built_for: Processor) -> None:
    fake_mode = torch_api.FakeTensorMode(shape_env=torch_api.ShapeEnv())
    graph = torch.fx.Graph()
    with fake_mode:
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(2)
        graph.output((call(graph, torch.ops.aten.neg.default, node),))
    one = Graph("shared", torch.fx.GraphModule(torch.nn.Module(), graph), (), (), {}, 1)
    lower(one, canonical_graph(one, fake_mode.shape_env), folder, fake_mode, 0, built_for)


def _compiled(
    graphs: Sequence[Graph], folder: Path, fake_mode: Any, target: str, progress: Progress
) -> dict[str, Artifact]:
    for graph in graphs if target.startswith("cuda") else ():
        _refuse_elsewhere(graph)
    forms = {graph.name: canonical_graph(graph, fake_mode.shape_env) for graph in graphs}
    keys = {graph.name: _key(forms[graph.name], target, graph) for graph in graphs}
    entries = {key: entry for key in keys.values() if (entry := fetch(key)) is not None}
    missing = {keys[graph.name]: (graph, forms[graph.name]) for graph in graphs if keys[graph.name] not in entries}
    if missing:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as work, fake_quantization.shapes_known():
            compile_all = _compile_on_cuda if target.startswith("cuda") else _compile_on_cpu
            entries |= compile_all(missing, Path(work), fake_mode, processor(target), progress)
    for name, form in forms.items():
        _assume(entries[keys[name]].guards, form, fake_mode.shape_env)
    return {graph.name: _artifact(graph, keys[graph.name], entries[keys[graph.name]], folder) for graph in graphs}


def _refuse_elsewhere(graph: Graph) -> None:
    """Raise :class:`ExportError` for a CPU constant: libraries are bound only to tensors on their device, so the host
    would follow a GPU pointer."""
    for key, tensor in graph.constants.values():
        if tensor.device.type != "cuda":
            raise ExportError(
                f"{graph.name}: {key} is on the CPU, and the code is for a GPU: move the whole module (module.cuda()), or create the tensor there"
            )


_Missing = dict[str, tuple[Graph, Canonical]]


def _compile_on_cpu(
    graphs: _Missing, work: Path, fake_mode: Any, built_for: Processor, progress: Progress
) -> dict[str, CachedLibrary]:
    """Lower one graph after another while g++ compiles the finished ones."""
    code, commands, compile_jobs = {}, {}, {}
    num_guards = len(fake_mode.shape_env.guards)
    with gcc.Builder() as builder:
        for num_done, (key, (graph, form)) in enumerate(graphs.items()):
            progress("lower", num_done, len(graphs))
            (work / key).mkdir()
            with gcc.record_commands(work / key, built_for.march, built_for.machine) as commands[key]:
                code[key] = lower(graph, form, work / key / "inductor", fake_mode, num_guards, built_for)
            compile_jobs[key] = builder.compile(graph.name, commands[key], work / key, code[key].least_product)
        progress("compile", 0, len(graphs))
        for key, (graph, _) in graphs.items():
            for compile_job in compile_jobs[key]:
                try:
                    compile_job.result()
                except gcc.CompilerFailed as error:
                    if reason := _does_not_compile(graph, error.said):
                        raise ExportError(reason) from error
                    raise
        libraries = {key: work / key / "library.so" for key in graphs}
        link_jobs = [
            builder.link(graph.name, commands[key], work / key, libraries[key]) for key, (graph, _) in graphs.items()
        ]
        for num_done, link_job in enumerate(link_jobs, 1):
            link_job.result()
            progress("compile", num_done, len(graphs))
    return {key: _finish(key, code[key], libraries[key], work) for key in graphs}


def _does_not_compile(graph: Graph, message: str) -> str:
    """Return an error message with the operators and lines of the rejected code; "" if ``message`` names none of
    Inductor's loops."""
    fused_names = {f"_{name}_" for name in re.findall(r"\bcpp_fused_(\w+)_\d+\b", message)}
    calls = [n for n in graph.module.graph.nodes if isinstance(n.target, torch_api.OpOverload)]
    nodes = [
        n for n in calls if any(f"_{n.target.overloadpacket.__name__.strip('_')}_" in name for name in fused_names)
    ]
    if not nodes:
        return ""
    lines: dict[Line, None] = dict.fromkeys(n.meta[LINE] for n in nodes if LINE in n.meta)
    location = "; ".join(
        f"in {line.function} ({line.file.rpartition('/')[2]}:{line.number}: {line.text})" for line in lines
    )
    dtypes = sorted({str(n.meta["val"].dtype) for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)})
    return (
        f"{graph.name}: the C++ compiler rejects the code that Inductor generates for {', '.join(dict.fromkeys(str(n.target) for n in nodes))} "
        f"({', '.join(dtypes)}){location and f', called {location}'}. Compute that part in float32, or leave it to eager; --debug shows the "
        "compiler's own message"
    )


def _compile_on_cuda(
    graphs: _Missing, work: Path, fake_mode: Any, built_for: Processor, progress: Progress
) -> dict[str, CachedLibrary]:
    """Let Inductor build each library: other tools than g++ make the objects with the kernels' machine code."""
    entries = {}
    num_guards = len(fake_mode.shape_env.guards)
    with gcc.adjust_commands(built_for.march):
        for num_done, (key, (graph, form)) in enumerate(graphs.items()):
            progress("compile", num_done, len(graphs))
            code = lower(graph, form, work / key, fake_mode, num_guards, built_for)
            library = code.file(".so")
            assert library is not None
            entries[key] = _finish(key, code, library, work)
    progress("compile", len(graphs), len(graphs))
    return entries


def _assume(guards: Sequence[str], form: Canonical, shape_env: Any) -> None:
    """Add the compiler's assumptions to ``shape_env``, so that a cached library leaves the same guards as compiling
    does."""
    symbols = {str(new): symbol for symbol, new in form.symbols.items()}
    for guard in guards:
        guard_expr = sympy.sympify(guard, locals=vars(torch_api.sympy_functions))
        expression = guard_expr.xreplace({symbol: symbols[str(symbol)] for symbol in guard_expr.free_symbols})
        if not shape_env.evaluate_expr(expression):  # adds it as a guard
            raise ExportError(
                f"the compile cache holds a library for other sizes than the example's ({guard}); report this as a bug"
            )


def _finish(key: str, code: GeneratedCode, library: Path, work: Path) -> CachedLibrary:
    if not library.read_bytes().startswith(wasm.MAGIC):
        clear_executable_stack(library)
    metadata, extern = code.file(".wrapper_metadata.json"), code.file(".wrapper.json")
    assert metadata is not None
    entry = CachedLibrary(
        library=erase_paths(library.read_bytes(), [work]),
        metadata=metadata.read_bytes(),
        extern=extern_nodes.as_executed(extern.read_bytes()) if extern else b"",
        constants=code.constants(),
        guards=code.guards,
    )
    if code.cacheable:
        store(key, entry)
    return entry


def _artifact(graph: Graph, key: str, entry: CachedLibrary, folder: Path) -> Artifact:
    stem = key[:32]
    library, metadata, extern = folder / f"{stem}.so", folder / f"{stem}_metadata.json", folder / f"{stem}.json"
    library.write_bytes(entry.library)
    metadata.write_bytes(entry.metadata)
    if entry.extern:
        extern.write_bytes(entry.extern)
    elf = None if entry.library.startswith(wasm.MAGIC) else read_elf(library)
    return Artifact(
        library=library,
        metadata=metadata,
        extern=extern if entry.extern else None,
        constants={name: graph.constants[attribute][0] for name, attribute in entry.constants.items()},
        needed=elf.needed if elf else (),
        glibc=elf.versions["GLIBC"] if elf else "",
        glibcxx=elf.versions.get("GLIBCXX", "") if elf else "",
        operators=tuple(
            sorted({node["node"]["target"] for node in json.loads(entry.extern or '{"nodes": []}')["nodes"]})
        ),
    )


def _key(form: Canonical, target: str, graph: Graph) -> str:
    """Return the digest of everything that the library depends on: the graph, Inductor's settings, and all versions."""
    command = gcc.compiler(processor(target).machine)
    overrides = {"emulate_precision_casts": selections.is_rounded(graph.module)}
    with torch_api.inductor_config.patch({**settings_for(processor(target)), **overrides}):
        settings = torch_api.inductor_config.save_config_portable(ignore_private_configs=False)
    return digest(
        {
            "graph": form.form,
            "donated": list(graph.donated),
            "settings": {name: repr(value) for name, value in settings.items()},
            "target": dataclasses.asdict(target_spec(target)),
            "torch": [torch.__version__, str(torch.version.git_version)],
            "compiler": [*command, gcc.compiler_version(command)],
            "exporter": digest_of_sources(Path(aot_backward_exporters.__file__).parent),
        }
    )

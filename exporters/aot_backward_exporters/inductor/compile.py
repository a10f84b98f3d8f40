"""Compiles captured graphs to native libraries with AOTInductor.

What happens to a graph:

1. Its canonical form, the settings and the versions of everything that compiles give a key (:mod:`.graph_key`). What was compiled
   before under that key is taken from the cache, and neither Inductor nor g++ runs.
2. Otherwise Inductor lowers a copy of it to C++, graph after graph in this process. Parameters and buffers stay out of the code: every
   one of ``Graph.constants`` must be a constant of the library, to be bound by pointer, and no other constant may exist.
3. On CPU, g++ runs for all graphs at once on the usable cores, while Inductor goes on with the next (:mod:`.native_build`). What the
   libraries have in common is compiled once (:mod:`.native_source`). On CUDA Inductor builds each library itself, Triton kernels embedded.
4. The library loses its symbol table, its executable stack, and every path of this machine; its headers are read for the manifest.
5. It goes into the cache, and a copy of it, its metadata and the JSON of operators that need the proxy executor into ``folder``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import re
import tempfile
import traceback
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch

import aot_backward_exporters
from aot_backward import torch_api
from aot_backward.graph import Artifact, Graph, Options
from aot_backward.progress import Progress, silent
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.elf import clear_executable_stack, read_elf

from ..cuda import cross_compile
from ..toolchain import gcc
from ..toolchain.compile_cache import Entry, digest, digest_of_sources, fetch, store
from ..toolchain.strip_paths import erase_paths
from . import convolution_backends
from .cache_key import Canonical, canonical_graph
from .targets import Processor, processor, target_spec

_OPTIONS: Options = {
    "cpp_wrapper": True,
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    # Else a tensor of at most 8 elements (a bias) is baked into the code, and new weights give wrong numbers in silence.
    "always_keep_tensor_constants": True,
    # Likewise a tensor whose elements are equal, a LayerNorm's weight of ones; torch 2.13 runs that pass only where it partitions.
    "joint_graph_constant_folding": False,
    "cpp.weight_prepack": False,
    "freezing": False,
    # With it, gradients of ResNet-18 are off by 7e-2 relative, in 60 of 62 tensors (torch 2.13 on a CPU; torch.compile's are, too).
    "layout_optimization": False,
    "shape_padding": False,  # asks sizes, and the clock, on a GPU
    "fallback_random": True,  # the dropout masks are eager's
    "cpp.dynamic_threads": True,  # else the builder's number of cores is in the code
    # What is parallel is decided for so many, wherever it is built. Decided for one, the code of several would run single loops in each thread.
    "cpp.threads": 8,
    "cpp.vec_isa_ok": True,  # without a probe
    "aot_inductor.compile_wrapper_opt_level": "O2",
    "aot_inductor.precompile_headers": False,  # native_build has its own
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.enable_frame_pointer": False,
    "aot_inductor.embed_kernel_binary": True,
}

KERNELS = (torch.ops.aten.max_pool2d_with_indices.default, torch.ops.aten.max_pool2d_with_indices_backward.default)
"""Operators that eager's kernels do faster on a CPU than what Inductor generates: a step of two convolutions with pooling, 256 rows, takes 1.75 ms
with them and 2.7 to 3.7 with generated code."""

_CONSTANT = re.compile(r'constants_info_\[\d+\]\.(name|original_fqn) = "(.*)";')


def compile_graphs(
    graphs: Sequence[Graph],
    *,
    folder: Path,
    fake_mode: Any,
    target: str = "cpu",
    progress: Progress = silent,
) -> dict[str, Artifact]:
    """Native libraries for ``graphs``, by name; their files are written into ``folder``, which must exist and be this target's alone.

    ``fake_mode``: the ``FakeTensorMode`` of the capture, with its shape environment, to which lowering may add guards. ``target``: one of
    :data:`.targets.KNOWN`. ``progress`` is called with the stages "lower" and "compile". Raises :class:`ExportError`.
    """
    if target.startswith("cuda:"):
        device = cross_compile.check(target)
        with cross_compile.crossing(device):
            retargeted = [cross_compile.retargeted(graph, fake_mode, device) for graph in graphs]
            return _compiled(retargeted, folder, fake_mode, target, progress)
    if target == "cuda":
        with cross_compile.toolkit():
            return _compiled(graphs, folder, fake_mode, target, progress)
    return _compiled(graphs, folder, fake_mode, target, progress)


def _compiled(graphs: Sequence[Graph], folder: Path, fake_mode: Any, target: str, progress: Progress) -> dict[str, Artifact]:
    for graph in graphs if target.startswith("cuda") else ():
        _refuse_elsewhere(graph)
    forms = {graph.name: canonical_graph(graph, fake_mode.shape_env) for graph in graphs}
    keys = {graph.name: _key(forms[graph.name], target, graph.round_as_eager, graph.donated) for graph in graphs}
    entries = {key: entry for key in keys.values() if (entry := fetch(key)) is not None}
    missing = {keys[graph.name]: (graph, forms[graph.name]) for graph in graphs if keys[graph.name] not in entries}
    if missing:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as work:
            compile_all = _compile_on_cuda if target.startswith("cuda") else _compile_on_cpu
            entries |= compile_all(missing, Path(work), fake_mode, processor(target), progress)
    for name, form in forms.items():
        _assume(entries[keys[name]].guards, form, fake_mode.shape_env)
    return {graph.name: _artifact(graph, keys[graph.name], entries[keys[graph.name]], folder) for graph in graphs}


def _refuse_elsewhere(graph: Graph) -> None:
    """A library is bound to tensors on its device alone; one that expects another there would follow a pointer into the GPU's memory on the host."""
    for key, tensor in graph.constants.values():
        if tensor.device.type != "cuda":
            raise ExportError(
                f"{graph.name}: {key} is on the CPU, and the code is for a GPU: move the module whole (module.cuda()), or make it there"
            )


_Missing = dict[str, tuple[Graph, Canonical]]


@dataclass(frozen=True)
class _Lowered:
    """What Inductor made of a graph."""

    wrapper: str  # the generated C++ around the kernels
    files: tuple[Path, ...]
    guards: list[str]
    cacheable: bool

    def constants(self) -> dict[str, str]:
        """The library's name of each constant -> the attribute it stands for."""
        found = _CONSTANT.findall(self.wrapper)
        names = [value for kind, value in found if kind == "name"]
        return dict(zip(names, [value for kind, value in found if kind == "original_fqn"], strict=True))

    def file(self, suffix: str) -> Path | None:
        return next((f for f in self.files if f.name.endswith(suffix)), None)


def _compile_on_cpu(graphs: _Missing, work: Path, fake_mode: Any, built_for: Processor, progress: Progress) -> dict[str, Entry]:
    """Lowers one graph after another while g++ compiles those already lowered."""
    lowered, commands, started = {}, {}, {}
    known = len(fake_mode.shape_env.guards)
    with gcc.Builder() as builder:
        for done, (key, (graph, form)) in enumerate(graphs.items()):
            progress("lower", done, len(graphs))
            (work / key).mkdir()
            with gcc.recorded(work / key, built_for.march) as commands[key]:
                lowered[key] = _lower(graph, form, work / key / "inductor", fake_mode, known, built_for)
            started[key] = builder.compile(graph.name, commands[key], work / key)
        progress("compile", 0, len(graphs))
        for key in graphs:
            for compiling in started[key]:
                compiling.result()
        libraries = {key: work / key / "library.so" for key in graphs}
        linking = [builder.link(graph.name, commands[key], work / key, libraries[key]) for key, (graph, _) in graphs.items()]
        for done, link in enumerate(linking, 1):
            link.result()
            progress("compile", done, len(graphs))
    return {key: _finish(key, lowered[key], libraries[key], work) for key in graphs}


def _compile_on_cuda(graphs: _Missing, work: Path, fake_mode: Any, built_for: Processor, progress: Progress) -> dict[str, Entry]:
    """Inductor builds each library: objects with the kernels' machine code come from other tools than g++."""
    entries = {}
    known = len(fake_mode.shape_env.guards)
    with gcc.adjusted(built_for.march):
        for done, (key, (graph, form)) in enumerate(graphs.items()):
            progress("compile", done, len(graphs))
            lowered = _lower(graph, form, work / key, fake_mode, known, built_for)
            library = lowered.file(".so")
            assert library is not None
            entries[key] = _finish(key, lowered, library, work)
    progress("compile", len(graphs), len(graphs))
    return entries


def _lower(graph: Graph, form: Canonical, folder: Path, fake_mode: Any, known: int, built_for: Processor) -> _Lowered:
    """``known``: how many guards the capture left. All later ones count as this graph's: an earlier graph's may have shaped its code."""
    config, V = torch_api.inductor_config, torch_api.V
    module = _copy(graph.module)
    _call_kernels(module)
    _complex_numbers_as_tensors(module, fake_mode)
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with (
        torch.no_grad(),
        _torchs_own_warnings_ignored(),
        V.set_aot_compilation(True),
        config.patch({**_options(built_for), "aot_inductor.output_path": str(folder), "aot_inductor.metadata": {}}),
        config.patch(torch_api.get_cpp_wrapper_config()),
        config.patch(emulate_precision_casts=graph.round_as_eager),
        V.set_fake_mode(fake_mode),
        torch_api.functorch_config.patch(unlift_effect_tokens=True),
        torch_api._compiling_state_context(),
        _open_sizes(),
        _only(built_for),
        _donating(graph, fake_mode) as donating,
    ):
        try:
            compiled = torch_api.compile_fx_inner(
                module, inputs, static_input_idxs=[], is_inference=not donating, is_backward=donating, cpp_wrapper=True
            )
        except torch_api.InductorError as error:
            reason = str(error).partition("\n")[0]
            named = re.search(r"^\s*target: (\S+)", str(error), re.MULTILINE)
            operator = named[1] if named else _lowered_when(error)
            raise ExportError.of(
                operator,
                f"{graph.name}: Inductor cannot compile {operator or 'the graph'}: {reason}. Leave it to eager, or make it an operator of your own "
                "(torch.library.custom_op with register_fake and register_autograd); TORCH_LOGS=+inductor shows more",
            ) from error
    files = tuple(Path(f) for f in compiled.filename)
    wrapper = next(f for f in files if f.name.endswith(".wrapper.cpp")).read_text()
    new = [g.expr for g in fake_mode.shape_env.guards[known:] if not g.expr.free_symbols.isdisjoint(form.symbols)]
    lowered = _Lowered(
        wrapper=wrapper,
        files=files,
        guards=[sympy.srepr(guard.xreplace(form.symbols)) for guard in new],  # as text, torch's // would come back as a fraction
        # A guard that ties this graph's sizes to another's can be told only by that other graph.
        cacheable=all(guard.free_symbols <= form.symbols.keys() for guard in new),
    )
    _check_constants(graph, lowered.constants())
    return lowered


@contextlib.contextmanager
def _torchs_own_warnings_ignored() -> Iterator[None]:
    """Lowerings call functions that torch has deprecated since; where the person's filters make warnings errors, the graph would be refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module=r"torch\._inductor")  # advice on speed: "bf16 and fp16 are mixed in the scheduler node"
        yield


@contextlib.contextmanager
def _open_sizes() -> Iterator[None]:
    """Within, Inductor does not narrow a dynamic size to the example's side of a limit that matters only for speed.

    How to add up more than 4096 floats: the accurate way serves any number (a bias gradient adds up over the batch). Which library a
    convolution would run on (:mod:`.backends`). Whether a product of at most 16 rows is better written out.
    """
    kernel, V = torch_api.CppKernel, torch_api.V
    original, decomposition = kernel.need_use_acc_helper, torch_api.decomposition
    asked = decomposition.guard_or_false

    def need_use_acc_helper(self: Any, reduction_type: str, dtype: torch.dtype, use_scalar: bool) -> bool:
        if reduction_type == "sum" and dtype == torch.float:
            return not V.graph.sizevars.statically_known_leq(math.prod(self.call_ranges[self.reduction_depth :]), 4096)
        return bool(original(self, reduction_type, dtype, use_scalar))

    kernel.need_use_acc_helper = need_use_acc_helper
    decomposition.guard_or_false = torch_api.statically_known_true
    try:
        with convolution_backends.undecided():
            yield
    finally:
        kernel.need_use_acc_helper = original
        decomposition.guard_or_false = asked


@contextlib.contextmanager
def _donating(graph: Graph, fake_mode: Any) -> Iterator[bool]:
    """Within, Inductor may put its own values into the memory of the inputs that are donated. Whether there are any.

    None where the graph has graphs within it (cond, scan): Inductor takes the numbers for those of their inputs, too, and code overwrote incoming
    gradients there."""
    if not graph.donated or any(isinstance(m, torch.fx.GraphModule) for m in graph.module.children()):
        yield False
        return
    context = torch_api.TracingContext(fake_mode)
    context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(graph.donated))
    with torch_api.in_tracing_context(context):
        yield True


@contextlib.contextmanager
def _only(built_for: Processor) -> Iterator[None]:
    """Within, Inductor generates code for that processor whichever builds it, and compiles no probes to find out (10 s in a fresh cache)."""
    isa = torch_api.cpu_vec_isa
    vectors = [getattr(isa, built_for.isa)()] if built_for.isa else []
    original, isa.valid_vec_isa_list = isa.valid_vec_isa_list, lambda: vectors
    try:
        yield
    finally:
        isa.valid_vec_isa_list = original


def _assume(guards: Sequence[str], form: Canonical, shape_env: Any) -> None:
    """Adds to ``shape_env`` what the compiler assumed, so that the cache leaves the same guards as compiling."""
    known = {str(new): symbol for symbol, new in form.symbols.items()}
    for guard in guards:
        written = sympy.sympify(guard, locals=vars(torch_api.sympy_functions))
        expression = written.xreplace({symbol: known[str(symbol)] for symbol in written.free_symbols})
        if not shape_env.evaluate_expr(expression):  # asking is what adds it
            raise ExportError(f"the compile cache holds a library for other sizes than the example's ({guard}); report this as a bug")


def _check_constants(graph: Graph, constants: dict[str, str]) -> None:
    for name, attribute in constants.items():
        if attribute not in graph.constants:
            raise ExportError(f"{graph.name}: the graph holds a tensor that is neither parameter nor buffer ({name}): register it as a buffer")
    bound = {graph.constants[attribute][0] for attribute in constants.values()}  # a tie has two attributes and one weight
    for weight, _ in graph.constants.values():
        if weight not in bound:
            raise ExportError(f"{graph.name}: the compiled code does not read {weight}, its value was folded into it: report this as a bug")


def _finish(key: str, lowered: _Lowered, library: Path, work: Path) -> Entry:
    clear_executable_stack(library)
    metadata, extern = lowered.file(".wrapper_metadata.json"), lowered.file(".wrapper.json")
    assert metadata is not None
    entry = Entry(
        library=erase_paths(library.read_bytes(), [work]),
        metadata=metadata.read_bytes(),
        extern=extern.read_bytes() if extern else b"",
        constants=lowered.constants(),
        guards=lowered.guards,
    )
    if lowered.cacheable:
        store(key, entry)
    return entry


def _artifact(graph: Graph, key: str, entry: Entry, folder: Path) -> Artifact:
    stem = key[:32]
    library, metadata, extern = folder / f"{stem}.so", folder / f"{stem}_metadata.json", folder / f"{stem}.json"
    library.write_bytes(entry.library)
    metadata.write_bytes(entry.metadata)
    if entry.extern:
        extern.write_bytes(entry.extern)
    elf = read_elf(library)
    return Artifact(
        library=library,
        metadata=metadata,
        extern=extern if entry.extern else None,
        constants={name: graph.constants[attribute][0] for name, attribute in entry.constants.items()},
        needed=elf.needed,
        glibc=elf.versions["GLIBC"],
        glibcxx=elf.versions.get("GLIBCXX", ""),
        operators=tuple(sorted({node["node"]["target"] for node in json.loads(entry.extern or '{"nodes": []}')["nodes"]})),
    )


def _key(form: Canonical, target: str, round_as_eager: bool = False, donated: Sequence[int] = ()) -> str:
    """What the library depends on: the graph, every setting of Inductor, and the versions of all that takes part."""
    with torch_api.inductor_config.patch({**_options(processor(target)), "emulate_precision_casts": round_as_eager}):
        settings = torch_api.inductor_config.save_config_portable(ignore_private_configs=False)
    return digest(
        {
            "graph": form.form,
            "donated": list(donated),
            "settings": {name: repr(value) for name, value in settings.items()},
            "target": dataclasses.asdict(target_spec(target)),
            "torch": [torch.__version__, str(torch.version.git_version)],
            "compiler": gcc.compiler_version(gcc.compiler()),
            "exporter": digest_of_sources(Path(aot_backward_exporters.__file__).parent),
        }
    )


def _options(built_for: Processor) -> Options:
    return torch_api.known_options({**_OPTIONS, "cpp.march": built_for.march, "cpp.simdlen": built_for.simd_bits})


def _call_kernels(module: torch.fx.GraphModule) -> None:
    """Marks the operators that Inductor is to call as they are."""
    for node in module.graph.nodes:
        if (node.target in KERNELS or _miscompiled(node)) and node.args[0].meta["val"].device.type == "cpu":
            node.meta["should_fallback"] = True
    for _, child in module.named_children():
        if isinstance(child, torch.fx.GraphModule):
            _call_kernels(child)


def _miscompiled(node: torch.fx.Node) -> bool:
    """Calls that Inductor generates wrong code for.

    The backward of average pooling with ``ceil_mode`` divides by the whole window where it reaches beyond the padded input; eager by what of the
    window lies in it.
    """
    aten = torch.ops.aten
    return node.target in (aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default) and bool(node.args[5])


def _complex_numbers_as_tensors(module: torch.fx.GraphModule, fake_mode: Any) -> None:
    """Makes tensors of the complex numbers among the arguments: generated C++ cannot pass them to an operator that it calls."""
    aten = torch.ops.aten
    overloads = {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not any(isinstance(a, complex) for a in node.args):
            continue
        like = {"dtype": node.meta["val"].dtype.to_real(), "device": node.meta["val"].device}
        with module.graph.inserting_before(node), fake_mode:

            def made(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
                out = module.graph.call_function(target, args, kwargs)
                values = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args]
                out.meta["val"] = target(*values, **kwargs)
                return out

            def tensor(size: Sequence[Any], number: complex) -> torch.fx.Node:
                parts = [made(aten.full.default, size, part, **like) for part in (number.real, number.imag)]  # noqa: B023
                return made(aten.complex.default, *parts)

            if node.target is aten.full.default:
                node.replace_all_uses_with(tensor(*node.args))
                module.graph.erase_node(node)
            elif node.target in (*overloads, *overloads.values()):
                node.args = tuple(tensor([], a) if isinstance(a, complex) else a for a in node.args)
                node.target = overloads.get(node.target, node.target)
    module.recompile()


def _lowered_when(error: BaseException) -> str:
    """The operator that Inductor was at when it raised, as its own frames know it; nothing where none of them does."""
    found = ""
    for one in (error, error.__cause__, getattr(error, "inner_exception", None)):
        for frame, _ in traceback.walk_tb(one.__traceback__ if one is not None else None):
            nodes = [v for k, v in frame.f_locals.items() if k in ("n", "node", "fx_node", "origin_node") and isinstance(v, torch.fx.Node)]
            found = next((str(v.target) for v in nodes if v.op == "call_function"), found)
    return found


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy for Inductor, which rewrites what it is given; tensors are shared."""
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, child in copied.named_children():  # bodies of control flow
        if isinstance(child, torch.fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied

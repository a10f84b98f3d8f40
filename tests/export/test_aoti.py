"""Native libraries: compiled code computes what the graph says, for any weights, and contains no trace of the machine
that built it."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from elftools.elf.elffile import ELFFile
from torch._dynamo.source import ConstantSource
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import ValueRanges

import aot_backward as ab
import aot_backward_exporters
from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_exporters.inductor import compile, settings
from aot_backward_exporters.inductor.cache_key import canonical_graph
from aot_backward_exporters.toolchain import compile_cache, cpp_source, gcc
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.elf import read_elf
from aot_backward_runtime.format.manifest import Target

from ..support.versions import since

Weights = Mapping[str, torch.Tensor]
Captured = tuple[Graph, FakeTensorMode]


def capture(
    compute: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    weights: Weights,
    *,
    dynamic: bool = True,
    ties: Mapping[str, str] | None = None,
    name: str = "net.0.forward",
    source: str = "input",
) -> Captured:
    """Return ``compute(weights, *inputs)`` as a graph. If ``dynamic``, dimension 0 of every input is a symbol.

    ``ties``: attribute -> weight key. ``source``: the base of the symbols' names."""
    count = itertools.count()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor, symbolic: bool) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if symbolic and d == 0 else DimDynamic.STATIC for d in range(tensor.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"{source}{next(count)}"))

    fakes = [fake(t, False) for t in weights.values()]
    traced = make_fx(
        lambda *args: tuple(compute(dict(zip(weights, args[: len(weights)], strict=True)), *args[len(weights) :])),
        decomposition_table=select_decomp_table(),
    )(*fakes, *(fake(t, dynamic) for t in inputs))
    placeholders = traced.graph.find_nodes(op="placeholder")
    for node, (attribute, value) in zip(placeholders, weights.items(), strict=False):
        traced.register_buffer(attribute, value)
        with traced.graph.inserting_after(placeholders[-1]):
            read = traced.graph.get_attr(attribute)
        read.meta = dict(node.meta)
        node.replace_all_uses_with(read)
        traced.graph.erase_node(node)
    for node in traced.graph.find_nodes(op="get_attr"):
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    used = {str(node.target) for node in traced.graph.find_nodes(op="get_attr")}
    keys = {
        attribute: ((ties or {}).get(attribute, attribute), value)
        for attribute, value in weights.items()
        if attribute in used
    }
    return Graph(name, traced, (), (), keys, len(traced.graph.nodes)), mode


def layer(w: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Compute a layer norm, a tie, a bias of 3, a 0-d factor, and running statistics that are updated in place."""
    h = torch.nn.functional.layer_norm(x, (8,), w["scale"], w["shift"]) @ w["matrix"] + w["bias"]
    g = h @ w["tied"].t() * w["factor"]
    w["mean"].copy_(w["mean"] * 0.9 + x.mean(0) * 0.1)
    w["steps"].copy_(w["steps"] + 1)
    return [h.relu(), g.sin().sum(), x * w["scale"]]


TIES = {"tied": "matrix"}


def weights(fill: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by weight key. The graph has one attribute more, ``tied``."""
    shapes = {"scale": (8,), "shift": (8,), "matrix": (8, 3), "bias": (3,), "factor": (), "mean": (8,)}
    return {name: fill(shape) for name, shape in shapes.items()} | {"steps": torch.zeros((), dtype=torch.int64)}


def captured_layer(fill: Callable[..., torch.Tensor], rows: int = 5, **options: Any) -> Captured:
    values = weights(fill)
    return capture(layer, [torch.ones(rows, 8)], values | {"tied": values["matrix"]}, ties=TIES, **options)


@pytest.fixture(scope="session")
def headers() -> Path:
    """Return the precompiled headers of this user's cache, which take 20 s to build once."""
    shared = compile_cache.cache_root() / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    return shared


@pytest.fixture(scope="module")
def new_cache(headers: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def make() -> Path:
        root = tmp_path_factory.mktemp("cache")
        (root / "shared").symlink_to(headers)
        return root

    return make


@pytest.fixture
def cache(new_cache: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    root = new_cache()
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(root))
    return root


@dataclass
class Compiled:
    graph: Graph
    artifact: Artifact
    key: str
    cache: Path


@pytest.fixture(scope="module")
def compiled(new_cache: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Compiled]]:
    """Yield the layer captured with all weights at one, and at zero with other symbols. Each is compiled in separate
    folders."""
    out = []
    with pytest.MonkeyPatch.context() as patch:
        for fill, source in ((torch.ones, "a"), (torch.zeros, "b")):
            root, work, inductor = new_cache(), tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("inductor")
            patch.setenv("AOT_BACKWARD_CACHE", str(root))
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor))
            patch.setattr("tempfile.tempdir", str(work))
            patch.chdir(work)
            graph, mode = captured_layer(fill, source=source)
            key = compile._key(canonical_graph(graph, mode.shape_env), "cpu", graph)
            artifact = compile.compile_graphs([graph], folder=tmp_path_factory.mktemp("out"), fake_mode=mode)[
                graph.name
            ]
            assert list(work.iterdir()) == []
            assert {p.suffix for p in inductor.rglob("*") if p.is_file()} <= {".lock"}  # no probes of the processor
            out.append(Compiled(graph, artifact, key, root))
    yield out


@since("2.13", "does not number the arrays of its wrapper in the order of the graph: other bytes, the same code")
def test_same_graph_same_bytes(compiled: list[Compiled]) -> None:
    """Weight values, symbol names and folders leave no trace."""
    one, zero = compiled
    assert one.key == zero.key
    assert one.artifact.library.read_bytes() == zero.artifact.library.read_bytes()
    assert one.artifact.metadata.read_bytes() == zero.artifact.metadata.read_bytes()


def test_library_is_lean_and_anonymous(compiled: list[Compiled]) -> None:
    artifact = compiled[0].artifact
    data = artifact.library.read_bytes()
    for trace in (
        b"/root",
        b"/tmp",
        b"/work",
        b"/home",
        b"site-packages",
        *(str(p).encode() for p in (Path.home(), Path.cwd(), sys.prefix)),
    ):
        assert trace not in data
        assert trace not in artifact.metadata.read_bytes()
    assert b"torch/csrc/inductor/" in data  # the header that an error message may name
    assert len(data) < 350_000
    assert b"unmatched dtype" not in data  # checks that our runtime makes earlier
    elf = read_elf(artifact.library)
    assert not elf.executable_stack
    assert (artifact.needed, artifact.glibc, artifact.glibcxx) == (
        elf.needed,
        elf.versions["GLIBC"],
        elf.versions["GLIBCXX"],
    )
    assert "libtorch_cpu.so" in artifact.needed
    with artifact.library.open("rb") as file:
        sections = ELFFile(file)
        assert sections.get_section_by_name(".symtab") is None
        assert sections.get_section_by_name(".note.gnu.build-id") is None
        tags = {tag.entry.d_tag for tag in sections.get_section_by_name(".dynamic").iter_tags()}
        assert not tags & {"DT_RPATH", "DT_RUNPATH"}
        exported = {
            s.name for s in sections.get_section_by_name(".dynsym").iter_symbols() if s.entry.st_shndx != "SHN_UNDEF"
        }
    assert all(name.startswith("AOTInductor") for name in exported)


def test_loading_leaves_denormals_alone(compiled: list[Compiled]) -> None:
    """A library linked with crtfastmath.o sets flush-to-zero in the thread that loads it."""
    code = (
        "import sys, torch; tiny = torch.tensor([1e-40])\n"
        "torch._C._aoti.AOTIModelContainerRunnerCpu(sys.argv[1], 1)\n"
        "assert (tiny * 0.5).item() > 0"
    )
    subprocess.run([sys.executable, "-c", code, compiled[0].artifact.library], check=True)


def test_a_hit_runs_no_compiler(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("a compiler ran")

    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(compiled[0].cache))
    monkeypatch.setattr("subprocess.Popen", never)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", never)
    monkeypatch.setitem(vars(compile.torch_api), "compile_fx_inner", never)
    graph, mode = captured_layer(torch.ones, source="c", name="other")
    again = compile.compile_graphs([graph], folder=tmp_path, fake_mode=mode)["other"]
    assert again.library.read_bytes() == compiled[0].artifact.library.read_bytes()
    assert again.constants == compiled[0].artifact.constants


def test_another_exporter_compiles_no_text_again(
    compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Objects are cached by text and flags. A damaged object is compiled again."""
    root, ran = tmp_path / "cache", list[str]()
    shutil.copytree(compiled[0].cache / "objects", root / "objects")
    (root / "shared").symlink_to(compile_cache.cache_root() / "shared")
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(root))
    monkeypatch.setattr(compile, "digest_of_sources", lambda folder: "another exporter")
    run = gcc.Builder._run

    def seen(self: gcc.Builder, what: str, argv: list[str], folder: Path) -> None:
        ran.extend(a for a in argv if a.endswith(".cpp"))
        run(self, what, argv, folder)

    monkeypatch.setattr(gcc.Builder, "_run", seen)

    def again() -> bytes:
        shutil.rmtree(root / "compiled", ignore_errors=True)
        graph, mode = captured_layer(torch.ones, source="a")
        return compile.compile_graphs([graph], folder=tmp_path, fake_mode=mode)[graph.name].library.read_bytes()

    assert again() == compiled[0].artifact.library.read_bytes() and not ran
    for spoilt in (root / "objects").glob("*/*.o"):
        spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\xff")
    assert again() == compiled[0].artifact.library.read_bytes() and "wrapper.cpp" in ran


@pytest.mark.parametrize("file", ["library", "metadata", "entry"])
def test_a_spoilt_cache_entry_is_none(file: str, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    root, key = compiled[1].cache, compiled[1].key
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(root))
    entry = compile_cache.fetch(key)
    assert entry is not None
    spoilt = root / "compiled" / key / file
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"\xff")
    assert compile_cache.fetch(key) is None
    assert not spoilt.exists()
    compile_cache.store(key, entry)
    assert compile_cache.fetch(key) == entry


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ExportError, match=r"compile cache cannot be written: .*file/compiled.*; set AOT_BACKWARD_CACHE"
    ):
        compile_cache.store("a", compile_cache.CachedLibrary(b"", b"", b"", {}, []))
    assert compile_cache.fetch("a") is None


def test_the_cache_keeps_what_was_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path))
    entry = compile_cache.CachedLibrary(b"x" * 10_000, b"", b"", {}, [])
    for i, key in enumerate("abc"):
        compile_cache.store(key, entry)
        os.utime(tmp_path / "compiled" / key, (i, i))
    assert compile_cache.fetch("a") == entry
    monkeypatch.setattr(compile_cache, "LARGEST", 25_000)
    compile_cache.store("d", entry)
    assert [key for key in "abcd" if compile_cache.fetch(key)] == ["a", "d"]


def _scaled(factor: float, op: Callable[..., torch.Tensor] = operator.mul) -> Callable[..., list[torch.Tensor]]:
    return lambda w, x: [op(x, w["a"]) * factor + w["b"]]


PAIR = {"a": torch.ones(8), "b": torch.ones(8)}
ROWS = torch.ones(5, 8)


def _key(captured: Captured, change: Callable[[Any], None] = lambda shape_env: None) -> str:
    graph, mode = captured
    change(mode.shape_env)
    return compile._key(canonical_graph(graph, mode.shape_env), "cpu", graph)


def _narrow(shape_env: Any) -> None:
    (symbol,) = shape_env.var_to_range
    shape_env.var_to_range[symbol] = ValueRanges(2, 64)


CHANGES: dict[str, Callable[[], str]] = {
    "operator": lambda: _key(capture(_scaled(2.0, operator.add), [ROWS], PAIR)),
    "scalar": lambda: _key(capture(_scaled(2.0 + 2**-50), [ROWS], PAIR)),
    "output": lambda: _key(capture(lambda w, x: [*_scaled(2.0)(w, x), x + 1], [ROWS], PAIR)),
    "input dtype": lambda: _key(capture(_scaled(2.0), [ROWS.double()], PAIR)),
    "input stride": lambda: _key(capture(_scaled(2.0), [torch.ones(8, 5).t()], PAIR)),
    "static size": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR, dynamic=False)),
    "hint": lambda: _key(capture(_scaled(2.0), [torch.ones(6, 8)], PAIR)),
    "range": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR), _narrow),
    "weight dtype": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR | {"a": torch.ones(8, dtype=torch.float64)})),
    "weight shape": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR | {"a": torch.ones(1, 8)})),
    "weight stride": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR | {"a": torch.ones(16)[::2]})),
    "weight name": lambda: _key(
        capture(lambda w, x: _scaled(2.0)({"a": w["c"], "b": w["b"]}, x), [ROWS], {"c": PAIR["a"], "b": PAIR["b"]})
    ),
    "tie": lambda: _key(capture(_scaled(2.0), [ROWS], PAIR, ties={"b": "a"})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_changes_the_key(change: str) -> None:
    base = _key(capture(_scaled(2.0), [ROWS], PAIR))
    assert base == _key(capture(_scaled(2.0), [ROWS], PAIR, source="other"))
    assert base != CHANGES[change]()


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch, "__version__", f"{compile.torch_api.minor()}.99"),
        (torch.version, "git_version", "0" * 40),
        (gcc, "compiler_version", lambda command: "g++ 99"),
        (compile, "digest_of_sources", lambda folder: "another"),
        (settings, "FIXED", settings.FIXED | {"cpp.threads": 4}),
        (compile, "target_spec", lambda target: Target("cpu", march="x86-64-v4")),
    ],
    ids=lambda value: value if isinstance(value, str) and not value.endswith(".99") else "",
)
def test_every_version_and_setting_changes_the_key(
    place: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = capture(_scaled(2.0), [ROWS], PAIR)
    base = _key(captured)
    monkeypatch.setattr(place, name, value)
    assert base != _key(captured)
    monkeypatch.undo()
    with inductor_config.patch(epilogue_fusion=False):  # monkeypatch would delete the option at the end
        assert base != _key(captured)


def test_every_folder_that_compiles_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It includes each kind of file in each folder, also in a new one, and their paths."""
    copied = tmp_path / "exporters"
    shutil.copytree(Path(aot_backward_exporters.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(aot_backward_exporters, "__file__", str(copied / "__init__.py"))
    (copied / "a" / "b").mkdir(parents=True)
    (copied / "a" / "b" / "new.py").write_text("x = 1")
    captured = capture(_scaled(2.0), [ROWS], PAIR)

    def key() -> str:
        compile_cache.digest_of_sources.cache_clear()
        return _key(captured)

    base, sources = key(), {(p.parent, p.suffix): p for p in copied.rglob("*") if p.is_file()}  # one of each kind
    assert {suffix for _, suffix in sources} == {".py", ".map", ".typed", ".h"} and len(sources) > 10
    for source in sources.values():
        text = source.read_bytes()
        source.write_bytes(text + b"\nanother = 1\n")
        assert (key() != base) == (source.parent.name not in ("onnx", "portable")), source
        source.write_bytes(text)
    assert key() == base
    source.rename(source.with_name("moved.py"))
    assert key() != base
    compile_cache.digest_of_sources.cache_clear()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (
            '# Why.\n\ndef scaled(x, by=2.0):\n    """Return the product."""\n    product = x * by\n    return product\n',
            True,
        ),
        ('def scaled(x, by=3.0):\n    """Scale."""\n    y = x * by\n    return y\n', False),
        ('def scaled(x, by=2.0):\n    """Scale."""\n    y = x / by\n    return y\n', False),
        ('def scaled(x, factor=2.0):\n    """Scale."""\n    y = x * factor\n    return y\n', False),
        ('def scaled(x, by=2.0):\n    """Scale."""\n    y = x.by\n    return y\n', False),
    ],
)
def test_words_of_a_source_do_not_count(text: str, same: bool, tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text('def scaled(x, by=2.0):\n    """Scale."""\n    y = x * by\n    return y\n')
    second.write_text(text)
    assert (compile_cache.digest_of_source(first) == compile_cache.digest_of_source(second)) == same


def test_compiling_imports_no_other_format() -> None:
    program = "import sys, aot_backward_exporters.inductor.compile; print([n for n in sys.modules if n.startswith('aot_backward_exporters.')])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "inductor.compile" in loaded and not any(
        f"aot_backward_exporters.{folder}" in loaded for folder in compile_cache._AFTER
    )


def test_the_target_changes_the_key() -> None:
    graph, mode = capture(_scaled(2.0), [ROWS], PAIR)
    form = canonical_graph(graph, mode.shape_env)
    assert len({compile._key(form, target, graph) for target in ("cpu:sse4", "cpu:avx2", "cpu:avx512")}) == 3


def test_what_else_is_asked_for_changes_the_key() -> None:
    graph, mode = capture(_scaled(2.0), [ROWS], PAIR)
    form = canonical_graph(graph, mode.shape_env)
    assert compile._key(form, "cpu", graph) != compile._key(form, "cpu", dataclasses.replace(graph, donated=(0,)))


def refused(captured: Captured, folder: Path) -> str:
    """Return the one line of the refusal. Check that it leaves no files."""
    graph, mode = captured
    out = folder / "out"
    out.mkdir()
    with pytest.raises(ExportError) as caught:
        compile.compile_graphs([graph], folder=out, fake_mode=mode)
    assert list(out.iterdir()) == []
    return str(caught.value)


def test_a_constant_that_is_no_weight_is_refused(cache: Path, tmp_path: Path) -> None:
    message = refused(capture(lambda w, x: [x + torch.arange(8.0) + torch.tensor([0.5] * 8)], [ROWS], {}), tmp_path)
    assert "net.0.forward: the graph holds a tensor that is neither parameter nor buffer" in message


def test_a_folded_weight_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.FIXED, "always_keep_tensor_constants", False)
    message = refused(capture(_scaled(2.0), [ROWS], PAIR), tmp_path)
    assert "net.0.forward: the compiled code does not read a" in message


def test_what_inductor_refuses_is_refused_by_name(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", fails)
    message = refused(capture(_scaled(2.0), [ROWS], PAIR), tmp_path)
    assert message.startswith(
        "net.0.forward: Inductor cannot compile the graph: ValueError: no such thing. Leave it to eager, or make it a custom operator"
    )


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """Return a compiler that only answers for its version."""
    script = tmp_path / "broken-g++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "broken 1.0"; exit 0; }\necho "wrapper.cpp:1: error: out of luck"; exit 3\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def test_of_torch_code_needs_what_it_calls_alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whatever else the linker would add."""
    link = gcc.Builder.link

    def with_all(builder: gcc.Builder, name: str, commands: Sequence[gcc.Command], *places: Path) -> Any:
        last = dataclasses.replace(commands[-1], flags=("-Wl,--no-as-needed", *commands[-1].flags))
        return link(builder, name, [*commands[:-1], last], *places)

    monkeypatch.setattr(gcc.Builder, "link", with_all)
    graph, mode = capture(_scaled(2.0), [ROWS], PAIR)
    artifact = compile.compile_graphs([graph], folder=tmp_path, fake_mode=mode)[graph.name]
    assert [n for n in artifact.needed if "torch" in n] == ["libtorch_cpu.so"]


def test_a_failing_compiler_is_quoted(
    compiler: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(work))
    with inductor_config.patch({"cpp.cxx": (None, str(compiler))}):
        message = refused(capture(_scaled(2.0), [ROWS], PAIR), tmp_path)
    assert f"{compiler} failed with exit status 3; another compiler can be named in CXX" in message
    assert message.endswith("\nwrapper.cpp:1: error: out of luck")
    assert list(work.iterdir()) == []
    assert not [p for p in (cache / "shared").iterdir() if p.name.startswith(".new-")]


def test_a_program_that_raises_stops_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new cache g++ runs while the program is captured. Without a kill, the export would wait for it and what it
    has started."""

    def raises(x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    script = tmp_path / "slow-g++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && {{ echo 1; exit 0; }}\n( sleep 20; touch {tmp_path}/finished ) | cat\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "new"))
    with inductor_config.patch({"cpp.cxx": (None, str(script))}), pytest.raises(ExportError):
        ab.export_grad(raises, (torch.ones(3),), path=tmp_path / "no.pt2")
    assert list((tmp_path / "new" / "shared").iterdir())  # locks: it had started
    assert not (tmp_path / "finished").exists()


def test_a_missing_compiler_is_an_export_error(cache: Path, tmp_path: Path) -> None:
    with inductor_config.patch({"cpp.cxx": (None, "/nowhere/g++")}):
        message = refused(capture(_scaled(2.0), [ROWS], PAIR), tmp_path)
    assert "apt-get install g++" in message


def test_code_for_avx512_uses_no_instructions_that_only_the_building_machine_has(tmp_path: Path) -> None:
    """Inductor adds the flag for the first graph of a process alone, if the machine has the instructions."""
    (tmp_path / "x.kernel.cpp").touch()
    command = gcc._parse(f"g++ {tmp_path}/x.kernel.cpp -mavx512f -mavx512bf16 -c -o {tmp_path}/x.kernel.o")
    assert "-mavx512f" in command.flags and "-mavx512bf16" not in command.flags


def test_no_regular_expression_is_compiled(tmp_path: Path) -> None:
    """std::regex takes g++ 3 s. On the tests' torch, its one use is found and replaced."""
    cpp_source.write_patched_headers(tmp_path)
    (header,) = tmp_path.rglob("model_base.h")
    assert "regex" not in header.read_text()

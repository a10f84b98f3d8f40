"""Recorded passes -> compiled variants in a package: traced, compiled, compared with the recorded numbers, added to what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_runtime.errors import ExportError, InputError, PackageError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import FORMAT_VERSION, EntrySpec, Manifest, PassSpec, Segment, StructureSpec, Verdict, WeightSpec
from aot_backward_runtime.native.cuda_library import library_on
from aot_backward_runtime.native.guards import laid_out
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.native.weights import load_examples, load_weights
from aot_backward_runtime.package.archive import Archive, open_package
from aot_backward_runtime.passes.compiled_pass import PassContract
from aot_backward_runtime.passes.tape import Slot, Tape

from .. import operators
from ..checks.eager_check import RELATIVE, plain_ratio
from ..graph import VERSION, Artifact, Graph
from ..packaging.package_writer import library_spec, write_package
from . import infer_shapes, pass_graphs
from .infer_shapes import Shapes
from .observation import Observation

Progress = Callable[[str, int, int], None]
_MOST = 8  # variants of one structure
_UNTRACED = 4  # kinds of nodes that stay as they are because they read their tensors' values, such as the lengths of packed sequences
_PREFIX = "pass"  # of the graphs' names


@dataclass
class Program:
    """One variant on its way."""

    fingerprint: str
    name: str
    tape: Tape
    shapes: Shapes
    observation: Observation
    pieces: list[pass_graphs.Piece]
    traced: list[pass_graphs.Traced]
    examples: list[Any]
    graphs: list[Graph] = field(default_factory=list)
    portables: dict[str, bytes] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)


def add_passes(path: Path, entry: str, met: Mapping[str, Any], *, target: str = "cpu", progress: Progress | None = None) -> Counter[str]:
    """Compiles what ``met`` holds (``record.Met`` by fingerprint) and adds it to the ``replay`` entry of the package at ``path``.

    What could not be compiled rightly is left out: the reasons come back, counted. Raises :class:`ExportError` where the package there
    is for another torch or target, or cannot be written.
    """
    say = progress or (lambda *_: None)
    with _alone(path):
        base = _Base.read(path, entry, target)
        skipped: Counter[str] = Counter()
        mode = infer_shapes.fake_mode()
        programs = traced_passes(met, base.variants, mode, skipped, say)
        return skipped + _add(base, programs, met, mode, target, say)


def add_programs(
    path: Path, entry: str, programs: list[Program], met: Mapping[str, Any], mode: Any, *, target: str = "cpu", progress: Progress | None = None
) -> Counter[str]:
    """:func:`add_passes` of what is traced already."""
    with _alone(path):
        return _add(_Base.read(path, entry, target), programs, met, mode, target, progress or (lambda *_: None))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this user at a time reads a package, adds to it, and writes it: else the last would undo what the others added."""
    folder = Path(tempfile.gettempdir()) / f"aot-backward-locks-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / hashlib.sha256(str(path.resolve()).encode()).hexdigest()).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def traced_passes(
    met: Mapping[str, Any], known: Callable[[str], Sequence[PassSpec]], mode: Any, skipped: Counter[str], say: Progress
) -> list[Program]:
    """``known``: the variants that there are of a fingerprint."""
    programs: list[Program] = []
    for done, (fingerprint, seen) in enumerate(met.items()):
        say("trace", done, len(met))
        programs += _traced(fingerprint, seen, known(fingerprint), mode, skipped)
    say("trace", len(met), len(met))
    return programs


def _add(base: _Base, programs: list[Program], met: Mapping[str, Any], mode: Any, target: str, say: Progress) -> Counter[str]:
    skipped: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as work:
        artifacts = _compiled(programs, Path(work), mode, target, say, skipped)
        finished: dict[str, list[PassSpec]] = {}
        kept: list[Program] = []
        for done, program in enumerate(programs):
            say("check", done, len(programs))
            try:
                spec = spelled(program, mode.shape_env)
                spec = dataclasses.replace(spec, **_checked(program, spec, artifacts))
            except (ExportError, InputError, PackageError, RuntimeError) as error:  # the last from native code
                skipped[f"{program.name}: {str(error).partition(chr(10))[0]}{_at(met[program.fingerprint])}"] += 1
                continue
            finished.setdefault(program.fingerprint, []).append(spec)
            kept.append(program)
        say("check", len(programs), len(programs))
        if kept:
            base.add({g.name: (g, artifacts[g.name]) for p in kept for g in p.graphs}, finished, met)
            for program in kept:
                base.graphs.update(program.portables)
            say("write", 0, 1)
            base.write()
            say("write", 1, 1)
    return skipped


def _traced(fingerprint: str, seen: Any, known: Sequence[PassSpec], mode: Any, skipped: Counter[str]) -> list[Program]:
    out = []
    ranked = sorted(infer_shapes.groups(list(seen.observations), known), key=lambda g: -sum(seen.observations.get(o, 0) for o in g))
    for number, group in enumerate(ranked):
        name = f"{_PREFIX}.{fingerprint[:12]}.{len(known) + number}"
        if len(known) + number >= _MOST:
            skipped[f"{name}: passes of one structure came in more than {_MOST} kinds (where sizes are 0 or 1, layouts, dtypes)"] += 1
            continue
        try:
            out.append(_trace_group(fingerprint, name, seen, group, mode))
        except Exception as error:  # the engine's formulas run on fake tensors in there, and any of them may lack one
            node = error.node if isinstance(error, pass_graphs.NotTraced) else None
            cause = error.__cause__ or error if isinstance(error, pass_graphs.NotTraced) else error
            first = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
            words = first if isinstance(cause, ExportError) else f"could not be traced: {type(cause).__name__}: {first}"
            skipped[f"{name}: {words}{_at(seen, node)}"] += 1
    return out


def _at(seen: Any, node: int | None = None) -> str:
    place = seen.place(node)
    return f" ({place})" if place else ""


def _trace_group(fingerprint: str, name: str, seen: Any, group: Sequence[Observation], mode: Any) -> Program:
    tape, observation = seen.tape, group[0]
    if not all(map(math.isfinite, observation.scalars)):
        raise ExportError(f"the pass holds the scalars {observation.scalars}, which a package cannot")
    unlike = next(((i, t.unlike) for i, t in enumerate(observation.inputs) if t.unlike), None)
    if unlike is not None:
        raise ExportError(
            f"{pass_graphs.origin(tape, unlike[0])} is {unlike[1]}; a compiled pass takes plain, dense tensors. Such passes go on being "
            "interpreted, with eager's gradients; to have them compiled, let the forward compute on plain, dense tensors there"
        )
    shapes = infer_shapes.symbolic(group, mode, name.replace(".", "_"))
    examples = [e for o, e in seen.examples.get(observation.kind(), [])]
    single = pass_graphs.sparse_operations(tape, examples)
    opaque = set(pass_graphs.OPAQUE)
    with_customs = bool(tape.plain_customs)
    while True:
        pieces = pass_graphs.cut(tape, observation.hook_groups, with_customs, opaque, single)
        values: dict[int, Any] = {}
        traced: list[pass_graphs.Traced] = []
        try:
            for piece in pieces:
                if piece.compiled:
                    traced.append(pass_graphs.trace(tape, piece, shapes, values, observation.scalars, observation.ambient, seen.contexts, mode))
                else:
                    pass_graphs.assume(tape.ops[piece.ops[0]], examples, values, shapes, mode)
        except Exception as error:
            if with_customs:  # a custom backward that fake tensors cannot go through is called, as it is
                with_customs = False
            elif isinstance(error, pass_graphs.NotTraced) and error.name and len(opaque) < _UNTRACED:  # and so is a node of PyTorch's
                opaque.add(error.name)
            else:
                raise
            continue
        break
    return Program(fingerprint, name, tape, shapes, observation, pieces, traced, examples)


def _compiled(programs: list[Program], work: Path, mode: Any, target: str, say: Progress, skipped: Counter[str]) -> dict[str, Artifact]:
    """Compiles everything at once; a program with a graph that the compiler refuses is taken out, and the others go on."""
    for program in list(programs):
        try:
            sizes = program.shapes.spelled(mode.shape_env)
            traced = iter(program.traced)
            for number, piece in enumerate(program.pieces):
                graph, segments = pass_graphs.finish(f"{program.name}.{number}", piece, next(traced) if piece.compiled else None, sizes, program.tape)
                program.segments += segments
                if graph is not None:
                    program.graphs.append(graph)
        except ExportError as error:
            skipped[f"{program.name}: {error}"] += 1
            programs.remove(program)
    attempt = 0
    while True:
        folder = work / str(attempt)
        folder.mkdir()
        graphs = [g for p in programs for g in p.graphs]
        if not graphs:
            return {}
        try:
            return compile.compile_graphs(graphs, folder=folder, fake_mode=mode, target=targets.parsed(target)[0], progress=say)
        except ExportError as error:
            guilty = [p for p in programs if any(str(error).startswith(f"{g.name}:") for g in p.graphs)]
            if not guilty:
                raise
            skipped[str(error)] += 1
            programs.remove(guilty[0])
            attempt += 1


def spelled(program: Program, shape_env: Any) -> PassSpec:
    """The variant as the package states it, with what lowering assumed."""
    sizes = program.shapes.spelled(shape_env)
    observation, tape = program.observation, program.tape
    for n, graph in enumerate(program.graphs):
        traced = next(t for t in program.traced if t.name == graph.name)
        inputs, outputs = pass_graphs.specs(traced, sizes)
        program.graphs[n] = graph = dataclasses.replace(graph, inputs=inputs, outputs=outputs)
        with contextlib.suppress(ExportError):  # the package works; it cannot be rebuilt
            program.portables[graph.name] = graph_json.graph_to_bytes(graph, sizes.worded, sizes.hints())
        given = pass_graphs.operands(traced, sizes)
        program.segments = [dataclasses.replace(s, operands=given) if s.library == graph.name else s for s in program.segments]
    return PassSpec(
        inputs=tuple(
            sizes.spec(pass_graphs.origin(tape, i), fake, looks.requires_grad)
            for i, (fake, looks) in enumerate(zip(program.shapes.inputs, observation.inputs, strict=True))
        ),
        sizes=tuple(sizes.size(s) for s in program.shapes.sizes),
        scalars=observation.scalars,
        symbols=sizes.symbols,
        guards=sizes.guards(program.shapes.symbols.keys()),
        ambient=observation.ambient,
        verdict=Verdict("not run"),
        segments=tuple(program.segments),
    )


def _checked(program: Program, spec: PassSpec, artifacts: Mapping[str, Artifact]) -> dict[str, Any]:
    """Every graph on the recorded numbers; the verdict, and the segments with the leaves' gradients that may be handed over as they are.

    The measure: ‖a − e‖ at most r·max(‖e‖, 1e-2·G): e the recorded numbers, G the largest norm in the pass, r the tolerance of the coarsest
    dtype in it (under autocast a float32 gradient comes of bfloat16 ones).
    """
    libraries = {g.name: _library(g, artifacts[g.name]) for g in program.graphs}
    tape = program.tape
    leaves = {n: op.operands[1].index for n, op in enumerate(tape.ops) if op.kind == "accumulate" and isinstance(op.operands[1], Slot)}
    own = {v for t in program.traced for v in t.own}
    worst, name, at = 0.0, "", []
    served = 0
    for example in program.examples:
        values = PassContract(spec).symbol_values(example.shapes, example.sizes)
        if not _serves(spec, example, values):  # the trace found that it holds for the other numbers alone
            continue
        served += 1
        largest = max(
            (
                float(torch.linalg.vector_norm(v.double()))
                for v in example.values.values()
                if v is not None and v.layout is torch.strided and v.is_floating_point()
            ),
            default=0.0,
        )
        coarsest = max((RELATIVE[d] for d in _dtypes(example)), default=0.0)
        for segment in spec.segments:
            if not segment.library:
                continue
            given = []
            for operand, looks in zip(segment.operands, libraries[segment.library].spec.inputs, strict=True):
                kind, _, where = operand.partition(":")
                if kind == "size":
                    given.append(torch.empty((evaluate(where, values), 0)))
                else:
                    tensor = example.inputs[int(where)] if kind == "input" else example.values[int(where)]
                    assert tensor is not None
                    given.append(laid_out(tensor, looks, values))  # what a hook gave may lie in any way
            results = libraries[segment.library].run(given)
            for number, result in zip(segment.results, results, strict=True):
                expected = example.values[number]
                if expected is None or result.shape != expected.shape or result.dtype != expected.dtype:
                    raise ExportError(f"%v{number} has another shape or dtype than the recorded one")
                ratio = plain_ratio(result, expected, largest, coarsest)
                if not ratio <= 1:
                    raise ExportError(f"%v{number} is wrong: {ratio:.3g} times what is allowed off the recorded numbers")
                if ratio >= worst:
                    worst, name = ratio, f"%v{number}"
                leaf = next((tape.ops[n].operands[0].index for n, v in leaves.items() if v == number), None)
                if leaf is not None and not _lies_as(result, spec, leaf, values):
                    own.discard(number)
            for number in segment.undefined:
                if example.values.get(number) is not None:
                    raise ExportError(f"%v{number} is defined in one pass and undefined in another")
        at.append(", ".join(f"{k}={v}" for k, v in values.items()))
    if not served:
        raise ExportError("no numbers were kept of this kind of pass to check it against")
    segments = tuple(dataclasses.replace(s, operands=("fresh",)) if len(s.ops) == 1 and leaves.get(s.ops[0]) in own else s for s in spec.segments)
    return {"segments": segments, "verdict": Verdict("verified", name, round(worst, 6), tuple(a for a in at if a))}


def _serves(spec: PassSpec, example: Any, values: Mapping[str, int]) -> bool:
    shapes = [(s.shape, seen) for s, seen in zip(spec.inputs, example.shapes, strict=True)]
    sizes = all(evaluate(wanted, values) == n for wanted, n in zip(spec.sizes, example.sizes, strict=True))
    return (
        sizes
        and all(evaluate(g, values) for g in spec.guards)
        and all(evaluate(w, values) == n for ws, ns in shapes for w, n in zip(ws, ns, strict=True))
    )


def _lies_as(result: torch.Tensor, spec: PassSpec, leaf: int, values: Mapping[str, int]) -> bool:
    wanted = tuple(evaluate(s, values) for s in spec.inputs[leaf].stride)
    dense = pass_graphs.gradient_strides(tuple(result.shape), wanted)
    return all(n <= 1 or a == b for n, a, b in zip(result.shape, result.stride(), dense, strict=True))


def _dtypes(example: Any) -> set[torch.dtype]:
    tensors = (*example.inputs.values(), *example.values.values())
    return {t.dtype for t in tensors if t is not None and t.dtype in RELATIVE and t.dtype not in (torch.float64, torch.complex128)}


def _library(graph: Graph, artifact: Artifact) -> Library:
    spec = library_spec(graph, artifact)
    on_gpu = any(looks.device == "cuda" for looks in (*spec.inputs, *spec.outputs))
    library = library_on(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"), lambda: artifact.library, spec)
    library.bind((dict(graph.constants.values()), ()))
    return library


@dataclass
class _Base:
    """The package that is added to; an empty one where there is none yet."""

    path: Path
    entry: str
    manifest: Manifest
    artifacts: dict[str, Artifact]
    weights: dict[str, torch.Tensor]
    examples: dict[str, torch.Tensor]
    graphs: dict[str, bytes]

    @classmethod
    def read(cls, path: Path, entry: str, target: str) -> _Base:
        names = targets.parsed(target)
        if len(names) > 1:
            raise ExportError(f"recorded passes are compiled for one target, not {target!r}; aot-backward rebuild adds further ones")
        spec = targets.target_spec(names[0])
        if not path.exists():
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                required_features=(),
                producer=f"aot-backward {VERSION}",
                torch=torch.__version__,
                target=spec,
                entries={entry: EntrySpec("replay", (), ())},
                libraries={},
                weights={},
                members={},
                created=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
            return cls(path, entry, manifest, {}, {}, {}, {})
        archive = open_package(path)
        old = archive.manifest
        if old.targets:
            raise ExportError(f"{path} is for several targets, and passes are added to a package for one: choose a new file")
        if old.torch != torch.__version__ or dataclasses.replace(old.target, name=spec.name) != spec:
            raise ExportError(
                f"{path} was built by torch {old.torch} for {old.target}; this is torch {torch.__version__}, {spec}: record into a new file"
            )
        known = old.entries.get(entry, EntrySpec("replay", (), ()))
        if known.kind != "replay":
            raise ExportError(f"{path} has a {known.kind} entry {entry!r}; give the recorded passes another name, entry='…'")
        manifest = dataclasses.replace(old, format_version=FORMAT_VERSION, entries={**old.entries, entry: known})
        weights = load_weights(archive) if old.has_weights else {}
        if not old.has_weights and old.weights:
            raise ExportError(f"{path} was written without weights; record into a new file")
        graphs = {name: archive.read_member(spec.graph) for name, spec in old.libraries.items() if spec.graph}
        return cls(path, entry, manifest, _artifacts(archive), weights, load_examples(archive), graphs)

    def variants(self, fingerprint: str) -> tuple[PassSpec, ...]:
        found = next((s for s in self.manifest.entries[self.entry].structures if s.fingerprint == fingerprint), None)
        return found.variants if found else ()

    def add(self, graphs: Mapping[str, tuple[Graph, Artifact]], finished: Mapping[str, Sequence[PassSpec]], met: Mapping[str, Any]) -> None:
        old = self.manifest.entries[self.entry]
        structures = {s.fingerprint: s for s in old.structures}
        for fingerprint, variants in finished.items():
            seen, before = met[fingerprint], structures.get(fingerprint)
            # new ones first: a dynamic variant made of what a static one was made of, and more, serves both
            every = (*variants, *(before.variants if before else ()))
            seconds = seen.seconds if seen.seconds < float("inf") else (before.seconds if before else 0.0)
            structures[fingerprint] = StructureSpec(fingerprint, seen.tape.nodes, len(seen.tape.ops), every, round(seconds, 7))
        libraries = dict(self.manifest.libraries)
        for name, (graph, artifact) in graphs.items():
            libraries[name] = library_spec(graph, artifact)
            self.artifacts[name] = artifact
            for key, tensor in graph.constants.values():
                self.weights.setdefault(key, tensor)
        specs = {k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "") for k, t in self.weights.items()}
        entries = {**self.manifest.entries, self.entry: dataclasses.replace(old, structures=tuple(structures.values()))}
        self.manifest = dataclasses.replace(self.manifest, libraries=libraries, entries=entries, weights=specs)

    def write(self) -> None:
        operators.say(write_package(self.path, self.manifest, self.artifacts, self.weights, self.examples, self.graphs).operators)


def _artifacts(archive: Archive) -> dict[str, Artifact]:
    """The libraries of a package as files, to be written again."""
    out = {}
    for name, spec in archive.manifest.libraries.items():
        library = archive.library(name)
        extern = library.with_suffix(".json") if spec.extern else None
        constants = {c.name: c.weight for c in spec.constants}
        metadata = library.with_name(library.stem + "_metadata.json")
        out[name] = Artifact(library, metadata, extern, constants, spec.needed, spec.glibc, spec.glibcxx, spec.operators)
    return out

"""Passes that a replay interpreted, as a file: their graphs and the values to check them by; no native code, no pickle.

The file is a zip of ``passes.json`` and ``numbers.safetensors``. It is written when the replaying context closes: the autograd engine hands out
the functional backward of a node type once in a process, when it first meets a node of it, and a pass that is read from a file cannot be traced
without them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.portable.graph_json import graph_from_json, graph_to_json
from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.atomic_file import replacing
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import PassSpec, SymbolSpec
from aot_backward_runtime.format.manifest_json import plain, read_as
from aot_backward_runtime.tapes.tape import tape_from_json

from ..tensor_file import read_tensors, write_tensors
from .compile import add_programs
from .infer_shapes import Shapes, fake_mode
from .observation import Observation, TensorMetadata
from .partition_tape import Partition
from .pass_graphs import TracedPartition
from .recorded_structure import DEFAULT_ENTRY, ExamplePass, RecordedStructure
from .trace import TracedProgram, trace_structures

_NEVER = 1e9  # seconds, of passes that were not timed
VERSION = 1
"""Of the file. 1: 2026-11-21, the first."""


def save_misses(path: str | os.PathLike[str], structures: Mapping[str, RecordedStructure]) -> Counter[str]:
    """Traces ``structures`` (by fingerprint) and writes them; an existing file is replaced. What could not be traced is returned, counted."""
    skipped: Counter[str] = Counter()
    mode = fake_mode()
    programs = []
    numbers: dict[str, torch.Tensor] = {}
    for program in trace_structures(structures, lambda _: (), mode, skipped, silent):
        try:
            programs.append(_program_to_json(program, mode.shape_env, numbers))
        except ExportError as error:
            skipped[f"{program.name}: {error}"] += 1
    form = {"version": VERSION, "torch": torch.__version__, "passes": programs}
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder, replacing(path.resolve()) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("passes.json", json.dumps(form, separators=(",", ":")))
            write_tensors(Path(folder) / "numbers.safetensors", numbers)
            archive.write(Path(folder) / "numbers.safetensors", "numbers.safetensors")
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
    return skipped


def compile_misses(
    path: str | os.PathLike[str],
    package: str | os.PathLike[str],
    *,
    entry: str = DEFAULT_ENTRY,
    target: str = "cpu",
    progress: Progress | None = None,
) -> Counter[str]:
    """Compiles the passes of the file at ``path`` and adds them to ``package``, each compared with the values in the file.

    What could not be compiled, or differs from them, is left out: the reasons are returned, counted. Raises :class:`PackageError` where
    :func:`save_misses` did not write the file, and what :func:`aot_backward.recording.compile.add_passes` raises.
    """
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder, zipfile.ZipFile(path) as archive:
            form = json.loads(archive.read("passes.json"))
            target_file = Path(folder) / "numbers.safetensors"
            target_file.write_bytes(archive.read("numbers.safetensors"))
            numbers = {k: t.clone() for k, t in read_tensors(target_file).items()}
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise PackageError(f"cannot read {path} as a file of missed passes: {error}") from error
    if not isinstance(form, dict) or not isinstance(form.get("passes"), list) or "torch" not in form:
        raise PackageError(f"{path} is no file of missed passes")
    if form.get("version") != VERSION:
        raise PackageError(f"{path} is of version {form.get('version')}; this reader knows {VERSION}")
    if form["torch"] != torch.__version__:
        raise ExportError(f"{path} was traced by torch {form['torch']}; this is {torch.__version__}: record there, or replay here")
    mode = fake_mode()
    programs = [_program_from_json(known, number, mode, numbers) for number, known in enumerate(form["passes"])]
    return add_programs(Path(package), entry, programs, mode, target=target, progress=progress)


def _program_to_json(program: TracedProgram, shape_env: Any, numbers: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The program but for its tensors, which are added to ``numbers``."""
    sizes = program.shapes.package_sizes(shape_env)
    spec = program.spec(sizes)
    hints = {sizes.names[s]: int(shape_env.backed_var_to_val[s]) for s in sizes.names}
    pieces = []
    for traced in program.traced:
        places = [(kind, str(sizes.size(fake.shape[0])) if kind == "size" else where) for kind, where, fake in traced.placeholders]
        values = [plain(sizes.spec("", fake, False)) for kind, _, fake in traced.placeholders]
        pieces.append({
            "ops": list(traced.partition.ops), "placeholders": places, "looks": values, "graph": graph_to_json(traced.module),
            "gives": traced.outputs, "undefined": traced.undefined_outputs, "absent": traced.undefined_values, "own": sorted(traced.unaliased),
        })  # fmt: skip
    examples = []
    for n, example in enumerate(program.examples):
        prefix = f"{program.fingerprint}/{program.name}/{n}"
        for kind, tensors in (("input", example.inputs), ("value", example.values)):
            for i, tensor in tensors.items():
                if tensor is not None and tensor.layout is torch.strided:
                    numbers[f"{prefix}/{kind}/{i}"] = _storable(tensor)
        inputs = {str(i): [list(t.stride()), str(t.dtype)] for i, t in example.inputs.items()}
        results = {str(i): [list(t.stride()), str(t.dtype)] for i, t in example.values.items() if t is not None and t.layout is torch.strided}
        undefined = [i for i, t in example.values.items() if t is None]
        examples.append({"shapes": example.shapes, "sizes": example.sizes, "inputs": inputs, "values": results, "undefined": undefined})
    return {
        "fingerprint": program.fingerprint, "name": program.name, "tape": program.structure.tape.to_json(),
        "seconds": min(program.structure.seconds, _NEVER), "spec": plain(spec), "hints": hints, "pieces": pieces, "examples": examples,
        "cut": [[list(p.ops), p.compiled] for p in program.partitions],
    }  # fmt: skip


def _program_from_json(form: dict[str, Any], number: int, mode: Any, numbers: Mapping[str, torch.Tensor]) -> TracedProgram:
    try:
        tape = tape_from_json(form["tape"])
        spec: PassSpec = read_as(PassSpec, form["spec"])
        if tape.fingerprint() != form["fingerprint"]:
            raise PackageError("a tape has another fingerprint than it says")
        named: dict[str, Any] = {}
        symbols: dict[sympy.Symbol, SymbolSpec] = {}
        env = mode.shape_env
        for symbol in spec.symbols:
            source = torch_api.ConstantSource(f"missed_{number}_{symbol.name}")
            made = env.create_symbol(form["hints"][symbol.name], source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
            named[symbol.name] = env.create_symintnode(made, hint=form["hints"][symbol.name], source=source)
            symbols[made] = symbol
        for guard in spec.guards:
            if not evaluate(guard, named):  # evaluating a guard on SymInts adds it to the shape environment
                raise PackageError(f"the guard {guard} does not hold for its own numbers")

        def size(expression: Any) -> Any:
            return evaluate(expression, named)

        def fake(tensor: Any) -> torch.Tensor:
            with mode:
                shape, stride = [size(s) for s in tensor["shape"]], [size(s) for s in tensor["stride"]]
                return torch.empty_strided(shape, stride, dtype=getattr(torch, tensor["dtype"]), device=tensor["device"])

        inputs = [fake(plain(s)) for s in spec.inputs]
        shapes = Shapes(inputs, [size(s) for s in spec.sizes], symbols, {s: named[k.name] for s, k in symbols.items()})
        metadata = tuple(
            TensorMetadata(getattr(torch, s.dtype), s.device, (0,) * len(s.shape), (0,) * len(s.stride), s.requires_grad) for s in spec.inputs
        )
        traced = [_traced_from_json(piece, fake, mode) for piece in form["pieces"]]
        partitions = [Partition(tuple(ops), compiled) for ops, compiled in form["cut"]]
        examples = [_example_from_json(form, n, e, numbers) for n, e in enumerate(form["examples"])]
        kind = hashlib.sha256(json.dumps(form["spec"], sort_keys=True).encode()).hexdigest()  # another file may have other passes of the structure
        name = f"{form['name']}.m{form['fingerprint'][12:16]}{kind[:8]}"
        seconds = form["seconds"] if form["seconds"] < _NEVER else math.inf
        structure, observation = RecordedStructure(tape, seconds=seconds), Observation(metadata, (), spec.scalars, spec.ambient)
        return TracedProgram(form["fingerprint"], name, structure, shapes, observation, partitions, traced, examples)
    except Exception as error:  # the file may say anything, and much of it is run on fake tensors to see
        raise PackageError(f"this is no file of missed passes: {type(error).__name__}: {error}") from error


def _traced_from_json(piece: dict[str, Any], fake: Callable[[Any], torch.Tensor], mode: Any) -> TracedPartition:
    places = [(kind, where, fake(tensor)) for (kind, where), tensor in zip(piece["placeholders"], piece["looks"], strict=True)]
    module = graph_from_json(piece["graph"], [p[2] for p in places], mode)
    results = list(next(iter(module.graph.find_nodes(op="output"))).args[0])
    partition = Partition(tuple(piece["ops"]), True)
    return TracedPartition(
        partition, module, places, results, piece["gives"], piece["undefined"], set(piece["own"]), undefined_values=piece["absent"]
    )


def _example_from_json(form: Mapping[str, Any], n: int, known: Mapping[str, Any], numbers: Mapping[str, torch.Tensor]) -> ExamplePass:
    prefix = f"{form['fingerprint']}/{form['name']}/{n}"

    def tensor(kind: str, i: str, stride: list[int], dtype: str) -> torch.Tensor:
        stored = numbers[f"{prefix}/{kind}/{i}"]
        if dtype == "torch.complex128":
            stored = torch.view_as_complex(stored)
        small = (
            stored[tuple(slice(0, 1) if s == 0 and m > 1 else slice(None) for m, s in zip(stored.shape, stride, strict=True))] if stride else stored
        )
        return torch.empty_strided(small.shape, stride, dtype=stored.dtype).copy_(small).expand(stored.shape)

    inputs = {int(i): tensor("input", i, *about) for i, about in known["inputs"].items()}
    values: dict[int, torch.Tensor | None] = {int(i): tensor("value", i, *about) for i, about in known["values"].items()}
    values.update(dict.fromkeys(known["undefined"]))
    return ExamplePass(inputs, tuple(map(tuple, known["shapes"])), tuple(known["sizes"]), values)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return torch.view_as_real(tensor.resolve_conj()).contiguous() if tensor.dtype is torch.complex128 else tensor

"""Passes that a replay met and its package did not hold, as a file: graphs and the numbers to check them by, no native code, no pickle.

The file is a zip of ``passes.json`` and ``numbers.safetensors``. It is written when the replaying context closes: the autograd engine hands out
the functional backward of a node type once in a process, when it first meets a node of it, and a pass that is read from a file cannot be traced
without them.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch

from aot_backward_exporters.portable.graph_json import graph_from_json, graph_to_json
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import PassSpec, SymbolSpec
from aot_backward_runtime.format.manifest_json import plain, read_as
from aot_backward_runtime.passes.tape import tape_from_json

from .. import torch_api
from ..packaging.package_writer import _replacing
from ..tensor_file import read_tensors, write_tensors
from . import infer_shapes, pass_graphs
from .compile import Program, add_programs, spelled, traced_passes
from .infer_shapes import Shapes
from .observation import Looks, Observation
from .record import ENTRY, Example, Met

VERSION = 1
"""Of the file. 1: 2026-11-21, the first."""
Progress = Callable[[str, int, int], None]


def save_misses(path: str | os.PathLike[str], met: Mapping[str, Met]) -> Counter[str]:
    """Traces what ``met`` holds and writes it; a file that is there already is replaced. What could not be traced comes back, counted."""
    skipped: Counter[str] = Counter()
    mode = infer_shapes.fake_mode()
    programs = []
    numbers: dict[str, torch.Tensor] = {}
    for program in traced_passes(met, lambda _: (), mode, skipped, lambda *_: None):
        try:
            programs.append(_program_to_json(program, mode.shape_env, met[program.fingerprint], numbers))
        except ExportError as error:
            skipped[f"{program.name}: {error}"] += 1
    form = {"version": VERSION, "torch": torch.__version__, "passes": programs}
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder, _replacing(path.resolve()) as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr("passes.json", json.dumps(form, separators=(",", ":")))
            write_tensors(Path(folder) / "numbers.safetensors", numbers)
            archive.write(Path(folder) / "numbers.safetensors", "numbers.safetensors")
    except OSError as error:
        raise ExportError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error
    return skipped


def compile_misses(
    path: str | os.PathLike[str], package: str | os.PathLike[str], *, entry: str = ENTRY, target: str = "cpu", progress: Progress | None = None
) -> Counter[str]:
    """Compiles the passes of the file at ``path`` and adds them to ``package``, each compared with the numbers in the file.

    What could not be compiled rightly is left out: the reasons come back, counted. Raises :class:`PackageError` where the file is none
    of ours, and what :func:`aot_backward.recording.compile.add_passes` raises.
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
    mode = infer_shapes.fake_mode()
    programs, met = [], {}
    for number, known in enumerate(form["passes"]):
        program, seen = _program_from_json(known, number, mode, numbers)
        programs.append(program)
        met[program.fingerprint] = seen
    return add_programs(Path(package), entry, programs, met, mode, target=target, progress=progress)


def _program_to_json(program: Program, shape_env: Any, met: Met, numbers: dict[str, torch.Tensor]) -> dict[str, Any]:
    sizes = program.shapes.spelled(shape_env)
    spec = spelled(program, shape_env)
    hints = {sizes.names[s]: int(shape_env.backed_var_to_val[s]) for s in sizes.names}
    pieces = []
    for traced in program.traced:
        places = [(kind, str(sizes.size(fake.shape[0])) if kind == "size" else where) for kind, where, fake in traced.placeholders]
        values = [plain(sizes.spec("", fake, False)) for kind, _, fake in traced.placeholders]
        pieces.append({
            "ops": list(traced.piece.ops), "placeholders": places, "looks": values, "graph": graph_to_json(traced.module),
            "gives": traced.gives, "undefined": traced.undefined, "absent": traced.absent, "own": sorted(traced.own),
        })  # fmt: skip
    examples = []
    for n, example in enumerate(program.examples):
        prefix = f"{program.fingerprint}/{program.name}/{n}"
        for kind, tensors in (("input", example.inputs), ("value", example.values)):
            for i, tensor in tensors.items():
                if tensor is not None and tensor.layout is torch.strided:
                    numbers[f"{prefix}/{kind}/{i}"] = _storable(tensor)
        about = {str(i): [list(t.stride()), str(t.dtype)] for i, t in example.inputs.items()}
        undefined = [i for i, t in example.values.items() if t is None]
        looks = {str(i): [list(t.stride()), str(t.dtype)] for i, t in example.values.items() if t is not None and t.layout is torch.strided}
        examples.append({"shapes": example.shapes, "sizes": example.sizes, "inputs": about, "values": looks, "undefined": undefined})
    return {
        "fingerprint": program.fingerprint, "name": program.name, "tape": met.tape.to_json(), "seconds": min(met.seconds, 1e9), "spec": plain(spec),
        "hints": hints, "pieces": pieces, "examples": examples, "cut": [[list(p.ops), p.compiled] for p in program.pieces],
    }  # fmt: skip


def _program_from_json(form: dict[str, Any], number: int, mode: Any, numbers: Mapping[str, torch.Tensor]) -> tuple[Program, Met]:
    try:
        tape = tape_from_json(form["tape"])
        spec: PassSpec = read_as(PassSpec, form["spec"])
        if tape.fingerprint() != form["fingerprint"]:
            raise PackageError("a tape has another fingerprint than it says")
        carried: dict[str, Any] = {}
        symbols: dict[sympy.Symbol, SymbolSpec] = {}
        env = mode.shape_env
        for symbol in spec.symbols:
            source = torch_api.ConstantSource(f"missed_{number}_{symbol.name}")
            made = env.create_symbol(form["hints"][symbol.name], source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
            carried[symbol.name] = env.create_symintnode(made, hint=form["hints"][symbol.name], source=source)
            symbols[made] = symbol
        for guard in spec.guards:
            if not evaluate(guard, carried):  # asking is what adds it
                raise PackageError(f"the guard {guard} does not hold for its own numbers")

        def size(expression: Any) -> Any:
            return evaluate(expression, carried)

        def fake(looks: Any) -> torch.Tensor:
            with mode:
                dtype = getattr(torch, looks["dtype"])
                return torch.empty_strided([size(s) for s in looks["shape"]], [size(s) for s in looks["stride"]], dtype=dtype, device=looks["device"])

        inputs = [fake(plain(s)) for s in spec.inputs]
        named = {s: carried[k.name] for s, k in symbols.items()}
        shapes = Shapes(inputs, [size(s) for s in spec.sizes], symbols, named)
        looks = tuple(
            Looks(getattr(torch, s.dtype), s.device, tuple(0 for _ in s.shape), tuple(0 for _ in s.stride), s.requires_grad) for s in spec.inputs
        )
        observation = Observation(looks, (), spec.scalars, spec.ambient)
        traced = []
        for piece in form["pieces"]:
            places = [(kind, where, fake(look)) for (kind, where), look in zip(piece["placeholders"], piece["looks"], strict=True)]
            module = graph_from_json(piece["graph"], [p[2] for p in places], mode)
            results = list(next(iter(module.graph.find_nodes(op="output"))).args[0])
            whole = pass_graphs.Piece(tuple(piece["ops"]), True)
            traced.append(
                pass_graphs.Traced(whole, module, places, results, piece["gives"], piece["undefined"], set(piece["own"]), absent=piece["absent"])
            )
        pieces = [pass_graphs.Piece(tuple(ops), compiled) for ops, compiled in form["cut"]]
        examples = [_example(form, n, e, numbers) for n, e in enumerate(form["examples"])]
    except Exception as error:  # the file may say anything, and much of it is run on fake tensors to see
        raise PackageError(f"this is no file of missed passes: {type(error).__name__}: {error}") from error
    met = Met(tape, seconds=form["seconds"])
    return Program(form["fingerprint"], f"{form['name']}.m{form['fingerprint'][12:16]}", tape, shapes, observation, pieces, traced, examples), met


def _example(form: Mapping[str, Any], n: int, known: Mapping[str, Any], numbers: Mapping[str, torch.Tensor]) -> Example:
    prefix = f"{form['fingerprint']}/{form['name']}/{n}"

    def tensor(kind: str, i: str, about: Any) -> torch.Tensor:
        stride, dtype = about
        stored = numbers[f"{prefix}/{kind}/{i}"]
        if dtype == "torch.complex128":
            stored = torch.view_as_complex(stored)
        small = (
            stored[tuple(slice(0, 1) if s == 0 and m > 1 else slice(None) for m, s in zip(stored.shape, stride, strict=True))] if stride else stored
        )
        return torch.empty_strided(small.shape, stride, dtype=stored.dtype).copy_(small).expand(stored.shape)

    inputs = {int(i): tensor("input", i, about) for i, about in known["inputs"].items()}
    values: dict[int, torch.Tensor | None] = {int(i): tensor("value", i, about) for i, about in known["values"].items()}
    values.update(dict.fromkeys(known["undefined"]))
    return Example(inputs, tuple(map(tuple, known["shapes"])), tuple(known["sizes"]), values)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return torch.view_as_real(tensor.resolve_conj()).contiguous() if tensor.dtype is torch.complex128 else tensor

"""What is collected while the entries of a package are captured, compiled and checked."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_runtime.compatibility import hindrance
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import FORMAT_VERSION, EntrySpec, Manifest, StateSpec, Verdict, WeightSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.pytree import describe
from aot_backward_runtime.package.targets import seen_as

from .. import torch_api
from ..capture import higher_order, joint_graph, partition, preserve, program_module, trace
from ..capture.shapes import dynamic_shapes
from ..capture.shapes.symbolic_shapes import Sizes
from ..capture.user_code import source_location
from ..checks import eager_check
from ..entries import Entry, Grad, Module, Step
from ..graph import VERSION, Artifact, Graph
from .package_writer import library_spec, stem_of
from .step_entry import add_step
from .variant_spec import differentiated, prepared, required, requiring, variant_spec

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and how many there are."""

Check = Callable[[Package, int, dict[str, torch.Tensor]], Verdict]
"""Compares variant I of a loaded entry with eager; what ``verify`` will need goes to the dict."""


class Build:
    """What is collected while entries are added."""

    def __init__(self, target: str, folder: Path, say: Progress, *, portable: bool = True):
        """``target``: one or several (:func:`targets.parsed`). ``portable``: whether the graphs go into the package as data, too."""
        self.targets, self.folder, self.say, self.portable = targets.parsed(target), folder, say, portable
        self.specs = tuple(targets.target_spec(name) for name in self.targets)
        self.portables: dict[str, bytes] = {}
        self.notes: dict[str, str] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.entries: dict[str, EntrySpec] = {}
        self.artifacts: dict[str, Any] = {}
        self.graphs: dict[str, Graph] = {}
        self.fills: dict[str, float] = {}  # weights that are one number throughout, and are not stored
        self._checks: dict[str, Check] = {}
        self._keys: dict[int, str] = {}
        self._own: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, entry: Entry) -> None:
        if not name.isidentifier():
            raise ExportError(f"entry name {name!r}: use a Python identifier")
        if isinstance(entry, Module) and not (type(entry.order) is int and 1 <= entry.order <= 4):
            raise ExportError(f"entry {name!r}: order is {entry.order!r}; expected 1 (gradients), 2 (gradients of gradients), 3 or 4")
        if not entry.variants:
            raise ExportError(f"entry {name!r} has no variants: give at least one Variant(args)")
        if isinstance(entry, Step):
            self.entries[name], self._checks[name] = add_step(self, name, entry)
        else:
            self._add(name, entry)

    def _add(self, name: str, entry: Module | Grad) -> None:
        is_module = isinstance(entry, Module)
        fn = entry.module if isinstance(entry, Module) else entry.fn
        program = fn if isinstance(fn, nn.Module) else program_module.FunctionModule(fn)
        signature = program.forward if isinstance(fn, nn.Module) else fn
        state = program_module.state_of(program)
        weights = {n: (self.key(name, n, t), t.detach()) for n, t in state.items()}
        variants, examples = [], []
        asked: tuple[tuple[str, Any], ...] = ()
        for i, variant in enumerate(entry.variants):
            self.say(f"capture {name}", i, len(entry.variants))
            args, kwargs = prepared(variant, signature, self.specs[0].device)
            shapes = dynamic_shapes.normalized(variant.dynamic_shapes, signature, variant.args, variant.kwargs)
            mode = (variant.mode or ("train" if program.training else "eval")) if isinstance(fn, nn.Module) else ""
            wanted: list[tuple[str, str]] | None
            if isinstance(entry, Grad):
                names = entry.wrt if entry.wrt is not None else "parameters" if isinstance(fn, nn.Module) else "inputs"
                wanted = differentiated("wrt", names, program, signature, args, kwargs)
            else:
                wanted = None
                if variant.requires_grad is not None:
                    wanted = differentiated("requires_grad", variant.requires_grad, program, signature, args, kwargs)
            with (
                preserve.in_mode(program, mode),
                requiring(program, wanted, args, kwargs) as (args, kwargs),
                source_location.errors_located(program, args, kwargs),
            ):
                kind = "module" if is_module else "grad"
                joint = trace.trace_program(program, args, kwargs, shapes, signature=signature, kind=kind, first_only=not is_module)
                for fixed in dynamic_shapes.left_fixed(dynamic_shapes.declared(shapes, signature, args, kwargs), joint.input_names, joint.inputs):
                    self.say(f"capture {name}: Dim.AUTO came out fixed, {fixed}", i, len(entry.variants))
                if isinstance(entry, Grad) and not entry.has_aux and joint.out_tree.kind != "tensor":
                    raise ExportError(f"{name} returns more than a loss, {describe(joint.out_tree)}: say has_aux=True where the loss comes first")
                prefix = f"{name}.{i}"
                further = self._further(entry.order, program, (args, kwargs), joint, weights) if isinstance(entry, Module) else []
                if is_module:
                    pieces = partition.split_module(joint, prefix, weights, forward_only=mode == "eval")
                else:
                    assert wanted is not None
                    asked = tuple(_asked(wanted, joint, weights))
                    pieces = partition.split_grad(joint, prefix, weights, asked)
                graphs, again = list(pieces.graphs), []
                for order, one in enumerate(further, start=2):
                    again.append(partition.split_module(one.joint, f"{prefix}.order{order}", weights, forward_only=False))
                    graphs += again[-1].graphs
                known = _settled(joint)
                self.compile(graphs, joint)
                if _settled(joint) != known:
                    raise ExportError(f"{prefix}: the compiler fixed a size that was declared dynamic; make it static, or report the model")
                double = None
                for one, cut in reversed(list(zip(further, again, strict=True))):
                    double = dataclasses.replace(variant_spec(mode, one.joint, cut), gives=one.gives, random=one.random, double=double)
                apart = tuple(n for n, m in program.named_modules(remove_duplicate=False) if n and mode and m.training != (mode == "train"))
                unreached = () if joint.differentiable or not is_module else required(state, args, kwargs)
                spec = dataclasses.replace(variant_spec(mode, joint, pieces), double=double, unreached=unreached, set_apart=apart)
                variants.append(eager_check.without_refused_emptiness(spec, program, mode, args, kwargs))
                examples.append(eager_check.Example(args, kwargs, mode, None if is_module else asked, any(map(_coarse, graphs))))
            self.say(f"capture {name}", i + 1, len(entry.variants))

        def check(package: Any, i: int, stored: Any) -> Verdict:
            example = examples[i]
            with source_location.errors_located(program, example.args, example.kwargs):
                return eager_check.check(package, name, i, program, example, stored)

        persistent = set(program.state_dict(keep_vars=True))
        names = [t[1] if t[0] == "parameter" else variants[0].inputs[t[1]].name for t in asked]
        self.entries[name] = EntrySpec(
            kind="module" if is_module else "grad",
            state=tuple(StateSpec(n, weights[n][0], isinstance(t, nn.Parameter), t.requires_grad, n in persistent) for n, t in state.items()),
            variants=tuple(variants),
            modules=tuple(n for n, _ in program.named_modules(remove_duplicate=False) if n),
            training=program.training,
            wrt=tuple(f"{k}:{w}" for k, w in asked),
            names=tuple(names),
            single=not is_module and isinstance(entry.wrt, str) and len(names) == 1,  # type: ignore[union-attr]
            has_aux=not is_module and entry.has_aux,  # type: ignore[union-attr]
        )
        self._checks[name] = check

    def _further(
        self, order: int, program: nn.Module, arguments: Any, joint: joint_graph.Joint, weights: Mapping[str, tuple[str, torch.Tensor]]
    ) -> list[higher_order.Differentiated]:
        """The gradients as programs of their own, from the first that can be differentiated again up to ``order - 1`` times."""
        out: list[higher_order.Differentiated] = []
        while len(out) < order - 1 and joint.has_backward:
            out.append(higher_order.trace(program, arguments, joint, weights))
            program, arguments, joint = out[-1].program, out[-1].arguments, out[-1].joint
        return out

    def compile(self, graphs: Sequence[Graph], joint: joint_graph.Joint) -> None:
        folder = self.folder / f"g{len(self.artifacts)}"
        folder.mkdir()
        for number, (name, spec) in enumerate(zip(self.targets, self.specs, strict=True)):
            (folder / str(number)).mkdir()
            made = compile.compile_graphs(graphs, folder=folder / str(number), fake_mode=joint.fake_mode, target=name, progress=self.say)
            self.artifacts |= {stem_of(n, spec if number else None): artifact for n, artifact in made.items()}
        for graph in graphs:
            self.graphs[graph.name] = graph
            if self.portable:
                self._write_portable(graph, joint.sizes)
            for key, tensor in graph.constants.values():
                self.weights.setdefault(key, tensor)

    def _write_portable(self, graph: Graph, sizes: Sizes) -> None:
        try:
            self.portables[graph.name] = graph_json.graph_to_bytes(graph, sizes.worded, sizes.hints())
        except ExportError as error:  # the package works; it cannot be rebuilt
            self.notes[f"no portable graph of {graph.name}"] = str(error)

    def key(self, entry: str, name: str, tensor: torch.Tensor) -> str:
        """The weight's key: one per distinct tensor, however many names and entries it has."""
        if id(tensor) not in self._keys:
            self._refuse_overlap(name, tensor)
            key = name if name not in self.weights else f"{entry}.{name}"
            self._keys[id(tensor)] = key
            self._own.append((name, tensor))  # also keeps it, so that no other tensor gets its id
            self.weights[key] = tensor.detach()
        return self._keys[id(tensor)]

    def _refuse_overlap(self, name: str, tensor: torch.Tensor) -> None:
        """Two tensors of one memory would become two of their own when they are loaded."""
        first, last = _span(tensor)
        for other, known in self._own:
            start, end = _span(known)
            if first < end and start < last:
                raise ExportError(
                    f"{name} and {other} share memory without being one tensor; tie them (module.weight = other.weight), or clone one of them"
                )

    def _features(self) -> tuple[str, ...]:
        """What a runtime must know to read the package rightly."""
        plans = [p for e in self.entries.values() for one in e.variants for v in one.orders for p in (v.backward,) if p is not None]
        return (*(["fill"] if self.fills else []), *(["consumes"] if any(p.consumes for p in plans) else []))

    def manifest(self, with_weights: bool) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            required_features=self._features(),
            producer=f"aot-backward {VERSION}",
            torch=torch.__version__,
            target=self.specs[0],
            targets=self.specs[1:],
            entries={name: self._unjudged(entry) for name, entry in self.entries.items()},
            libraries={name: library_spec(graph, *self._artifacts(name)) for name, graph in self.graphs.items()},
            weights={
                k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "", self.fills.get(k)) for k, t in self.weights.items()
            },
            members={},
            has_weights=with_weights,
            created=datetime.datetime.now(datetime.UTC).date().isoformat(),
            notes=self.notes,
        )

    def _unjudged(self, entry: EntrySpec) -> EntrySpec:
        verdicts = (Verdict("not run"),) * (len(self.specs) - 1)
        return dataclasses.replace(entry, variants=tuple(dataclasses.replace(v, verdicts=verdicts) for v in entry.variants))

    def _artifacts(self, name: str) -> tuple[Artifact, list[Artifact]]:
        first, *further = (self.artifacts[stem_of(name, spec if n else None)] for n, spec in enumerate(self.specs))
        return first, further

    def check(self, manifest: Manifest, stored: dict[str, torch.Tensor]) -> Manifest:
        """The manifest with the verdict of every variant for every target in it; inputs, results and what they may be off go to ``stored``."""
        packages = [self._loaded(manifest, number) for number in range(len(self.specs))]
        entries = {}
        for name, spec in manifest.entries.items():
            variants = []
            total = len(spec.variants) * len(packages)
            for i, variant in enumerate(spec.variants):
                verdicts = list[Verdict]()
                for package in packages:
                    self.say(f"check {name}", i * len(packages) + len(verdicts), total)
                    verdicts.append(Verdict(f"not run: {package}") if isinstance(package, str) else self._checks[name](package, i, stored))
                variants.append(dataclasses.replace(variant, verdict=verdicts[0], verdicts=tuple(verdicts[1:]), seed=eager_check.SEED))
            self.say(f"check {name}", total, total)
            entries[name] = dataclasses.replace(spec, variants=tuple(variants))
        return dataclasses.replace(manifest, entries=entries)

    def _loaded(self, manifest: Manifest, number: int) -> Package | str:
        """The package as it would be loaded for that target; or why this machine cannot."""
        if reason := hindrance(manifest, number):
            return reason
        target = self.specs[number]
        paths = {name: self.artifacts[stem_of(name, target if number else None)].library for name in manifest.libraries}
        return eager_check.loaded(seen_as(manifest, number), paths, self.weights)


def _asked(wanted: Sequence[tuple[str, str]], joint: joint_graph.Joint, weights: Mapping[str, tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """``wanted`` as the joint graph names it: inputs by number, a tied parameter by its first name."""
    first: dict[str, str] = {}
    for name, (key, _) in weights.items():
        first.setdefault(key, name)
    for kind, name in wanted:
        yield (kind, first[weights[name][0]]) if kind == "parameter" else (kind, joint.input_names.index(name))


def _coarse(graph: Graph) -> bool:
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.float16, torch.bfloat16) for v in values)


def _settled(joint: joint_graph.Joint) -> dict[Any, Any]:
    """What is known of the sizes of inputs; those that come from data are the compiler's own."""
    replacements = joint.sizes.shape_env.replacements
    return {symbol: value for symbol, value in replacements.items() if not torch_api.free_unbacked_symbols(symbol)}


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize

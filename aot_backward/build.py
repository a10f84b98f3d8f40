"""What is collected while the entries of a package are captured, compiled and checked."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters import aoti, targets
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.manifest import FORMAT_VERSION, EntrySpec, Manifest, StateSpec, Verdict, WeightSpec
from aot_backward_runtime.package import Package
from aot_backward_runtime.tree import describe

from . import selfcheck, undisturbed
from .capture import joint as joints
from .capture import split, trees
from .entries import Entry, Grad, Module, Step
from .package import library_spec
from .program import VERSION, Graph
from .stepping import add_step
from .variants import below, prepared, requiring, variant_spec

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and how many there are."""

Check = Callable[[Package, int, dict[str, torch.Tensor]], Verdict]
"""Compares variant I of a loaded entry with eager; what ``verify`` will need goes to the dict."""


class Build:
    """What is collected while entries are added."""

    def __init__(self, target: str, folder: Path, say: Progress):
        self.target, self.folder, self.say = target, folder, say
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
        if not entry.variants:
            raise ExportError(f"entry {name!r} has no variants: give at least one Variant(args)")
        if isinstance(entry, Step):
            self.entries[name], self._checks[name] = add_step(self, name, entry)
        else:
            self._add(name, entry)

    def _add(self, name: str, entry: Module | Grad) -> None:
        is_module = isinstance(entry, Module)
        fn = entry.module if isinstance(entry, Module) else entry.fn
        program = fn if isinstance(fn, nn.Module) else joints.FunctionModule(fn)
        signature = program.forward if isinstance(fn, nn.Module) else fn
        state = joints.state_of(program)
        weights = {n: (self.key(name, n, t), t.detach()) for n, t in state.items()}
        variants, examples = [], []
        asked: tuple[tuple[str, Any], ...] = ()
        for i, variant in enumerate(entry.variants):
            self.say(f"capture {name}", i, len(entry.variants))
            args, kwargs = prepared(variant, signature)
            mode = (variant.mode or ("train" if program.training else "eval")) if isinstance(fn, nn.Module) else ""
            wanted = None if is_module else _wrt(entry.wrt, program, isinstance(fn, nn.Module), signature, args, kwargs)  # type: ignore[union-attr]
            with undisturbed.in_mode(program, mode), requiring(program, wanted, args, kwargs) as (args, kwargs):
                joint = joints.trace(program, args, kwargs, variant.dynamic_shapes, signature=signature, first_only=wanted is not None)
                if wanted is not None and not entry.has_aux and joint.out_tree.kind != "tensor":  # type: ignore[union-attr]
                    raise ExportError(f"{name} returns more than a loss, {describe(joint.out_tree)}: say has_aux=True where the loss comes first")
                prefix = f"{name}.{i}"
                if wanted is None:
                    pieces = split.split_module(joint, prefix, weights, forward_only=mode == "eval")
                else:
                    asked = tuple(_asked(wanted, joint, weights))
                    pieces = split.split_grad(joint, prefix, weights, asked)
                known = dict(joint.sizes.shape_env.replacements)
                self.compile(pieces.graphs, joint)
                if joint.sizes.shape_env.replacements != known:
                    raise ExportError(f"{prefix}: the compiler fixed a size that was declared dynamic; make it static, or report the model")
                variants.append(variant_spec(mode, joint, pieces))
                examples.append(selfcheck.Example(args, kwargs, mode, asked if wanted is not None else None))
            self.say(f"capture {name}", i + 1, len(entry.variants))
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
        self._checks[name] = lambda package, i, stored: selfcheck.check(package, name, i, program, examples[i], stored)

    def compile(self, graphs: Sequence[Graph], joint: joints.Joint) -> None:
        folder = self.folder / f"g{len(self.artifacts)}"
        folder.mkdir()
        made = aoti.compile_graphs(graphs, folder=folder, fake_mode=joint.fake_mode, target=self.target, progress=self.say)
        self.artifacts.update(made)
        for graph in graphs:
            self.graphs[graph.name] = graph
            for key, tensor in graph.constants.values():
                self.weights.setdefault(key, tensor)

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

    def manifest(self, with_weights: bool) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            required_features=("fill",) if self.fills else (),
            producer=f"aot-backward {VERSION}",
            torch=torch.__version__,
            target=targets.target_spec(self.target),
            entries=self.entries,
            libraries={name: library_spec(self.graphs[name], artifact) for name, artifact in self.artifacts.items()},
            weights={
                k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "", self.fills.get(k)) for k, t in self.weights.items()
            },
            members={},
            has_weights=with_weights,
            created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    def check(self, manifest: Manifest, stored: dict[str, torch.Tensor]) -> Manifest:
        """The manifest with the verdict of every variant in it; inputs, results and what they may be off go to ``stored``."""
        package = selfcheck.loaded(manifest, {n: a.library for n, a in self.artifacts.items()}, self.weights)
        entries = {}
        for name, spec in manifest.entries.items():
            variants = []
            for i in range(len(spec.variants)):
                self.say(f"check {name}", i, len(spec.variants))
                verdict = self._checks[name](package, i, stored)
                variants.append(dataclasses.replace(spec.variants[i], verdict=verdict, seed=selfcheck.SEED))
            self.say(f"check {name}", len(spec.variants), len(spec.variants))
            entries[name] = dataclasses.replace(spec, variants=tuple(variants))
        return dataclasses.replace(manifest, entries=entries)


def _wrt(wrt: str | Sequence[str] | None, program: nn.Module, is_module: bool, signature: Any, args: Any, kwargs: Any) -> list[tuple[str, str]]:
    """What is differentiated, as ("parameter", name) and ("input", name), in the order asked for."""
    inputs, _ = trees.input_names(signature, args, kwargs)
    flat = pytree.tree_leaves((args, kwargs))
    floating = [n for n, v in zip(inputs, flat, strict=True) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    parameters = dict(program.named_parameters())
    trained = [n for n, p in parameters.items() if p.requires_grad]
    asked = [wrt] if isinstance(wrt, str) else list(wrt) if wrt is not None else ["parameters" if is_module else "inputs"]
    out: list[tuple[str, str]] = []
    for name in asked:
        if name == "parameters" or name == "inputs":
            found = [("parameter", n) for n in trained] if name == "parameters" else [("input", n) for n in floating]
            if not found:
                raise ExportError(f"wrt={name!r}, but there is none of floating point that could get a gradient")
        elif name in parameters:
            found = [("parameter", name)]
        else:
            found = [("input", n) for n in inputs if below(n, name)]
            wrong = [n for _, n in found if n not in floating]
            if wrong:
                raise ExportError(f"wrt names the input {wrong[0]!r}, which is no floating-point tensor")
            if not found:
                raise ExportError(f"wrt names {name!r}, which is no input {inputs} and no parameter {list(parameters)[:20]}")
        out += [f for f in found if f not in out]
    return out


def _asked(wanted: Sequence[tuple[str, str]], joint: joints.Joint, weights: Mapping[str, tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """``wanted`` as the joint graph names it: inputs by number, a tied parameter by its first name."""
    first: dict[str, str] = {}
    for name, (key, _) in weights.items():
        first.setdefault(key, name)
    for kind, name in wanted:
        yield (kind, first[weights[name][0]]) if kind == "parameter" else (kind, joint.input_names.index(name))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize

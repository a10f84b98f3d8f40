"""``export``: entries -> capture -> native code -> self-check -> one package."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters import aoti, targets
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.manifest import FORMAT_VERSION, EntrySpec, Manifest, StateSpec, VariantSpec, Verdict, WeightSpec
from aot_backward_runtime.tree import describe

from . import selfcheck, undisturbed
from .capture import joint as joints
from .capture import split, trees
from .package import check_destination, library_spec, write_package
from .program import VERSION, Graph

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and how many there are."""


@dataclass(frozen=True)
class Variant:
    """One way in which a program is called.

    ``args``, ``kwargs``: example inputs: tensors, None, bool, int, float, str, in any nesting of tuple, list, dict, namedtuple and registered
    pytrees. Values of tensors are used only to check the result. ``dynamic_shapes``: as ``torch.export.export`` takes it.
    ``requires_grad``: the names of the inputs that get a gradient; by default those whose example requires one.
    ``mode``: "train" or "eval"; by default the module's own.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    _: KW_ONLY
    dynamic_shapes: Any = None
    requires_grad: Sequence[str] | None = None
    mode: str | None = None


@dataclass(frozen=True)
class Module:
    """An ``nn.Module`` whose forward and backward are exported; loaded with ``load(path).module(name)``."""

    module: nn.Module
    variants: Sequence[Variant]


@dataclass(frozen=True)
class Grad:
    """A function or module that returns a scalar loss (or ``(loss, aux)``), exported with its gradients; ``load(path).grad(name)``.

    ``wrt``: what is differentiated: a name or several, each an input's ("pos"), a parameter's ("net.0.weight"), "parameters" (all that
    require a gradient) or "inputs" (all of floating point). By default the parameters of a module, and the inputs of a function.
    A function's parameters are those of the modules that it closes over, named by the variable.
    """

    fn: Callable[..., Any]
    variants: Sequence[Variant]
    wrt: str | Sequence[str] | None = None
    has_aux: bool = False


Entries = Mapping[str, Module | Grad]


def export(path: str | os.PathLike[str], entries: Entries, *, target: str = "cpu", weights: bool = True, progress: Progress | None = None) -> Path:
    """Compiles ``entries`` ahead of time, compares each with eager, and writes one package to ``path``.

    ``target``: "cpu" (any x86-64-v3 processor) or "cuda" (this machine's GPU). ``weights=False`` leaves the weights out; they are bound when
    the package is loaded. Nothing is written where a gradient is wrong or cannot be had: :class:`ExportError` says which and why.
    The modules are left as they were: parameters, buffers, ``.grad``, modes and the random state.
    """
    path = Path(path)
    if not entries:
        raise ExportError("nothing to export: entries is empty")
    if target.partition(":")[0] not in ("cpu", "cuda"):
        raise ExportError(f"unknown target {target!r}; known: cpu, cuda")
    check_destination(path)
    say = progress or (lambda *_: None)
    with _undisturbed(entries), tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        built = _Build(target, Path(folder), say)
        for name, entry in entries.items():
            built.add(name, entry)
        manifest = built.manifest(weights)
        examples: dict[str, torch.Tensor] = {}
        manifest = built.check(manifest, examples)
        say("write", 0, 1)
        write_package(path, manifest, built.artifacts, built.weights, examples)
        say("write", 1, 1)
    return path


def export_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """One module, one variant, in its present mode: forward and backward. See :func:`export`."""
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes)
    return export(path, {"module": Module(module, [variant])}, target=target, progress=progress)


def export_grad(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    has_aux: bool = False,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """One function or module that returns a loss: value and gradients in one fused graph. See :class:`Grad` and :func:`export`."""
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes)
    return export(path, {"grad": Grad(fn_or_module, [variant], wrt, has_aux)}, target=target, progress=progress)


class _Build:
    """What is collected while entries are added."""

    def __init__(self, target: str, folder: Path, say: Progress):
        self.target, self.folder, self.say = target, folder, say
        self.weights: dict[str, torch.Tensor] = {}
        self.entries: dict[str, EntrySpec] = {}
        self.artifacts: dict[str, Any] = {}
        self.graphs: dict[str, Graph] = {}
        self.programs: dict[str, tuple[nn.Module, list[selfcheck.Example]]] = {}
        self._keys: dict[int, str] = {}
        self._own: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, entry: Module | Grad) -> None:
        if not name.isidentifier():
            raise ExportError(f"entry name {name!r}: use a Python identifier")
        is_module = isinstance(entry, Module)
        fn = entry.module if isinstance(entry, Module) else entry.fn
        program = fn if isinstance(fn, nn.Module) else joints.FunctionModule(fn)
        signature = program.forward if isinstance(fn, nn.Module) else fn
        state = joints.state_of(program)
        weights = {n: (self._key(name, n, t), t.detach()) for n, t in state.items()}
        if not entry.variants:
            raise ExportError(f"entry {name!r} has no variants: give at least one Variant(args)")
        variants, examples = [], []
        asked: tuple[tuple[str, Any], ...] = ()
        for i, variant in enumerate(entry.variants):
            self.say(f"capture {name}", i, len(entry.variants))
            args, kwargs = _prepared(variant, signature)
            mode = (variant.mode or ("train" if program.training else "eval")) if isinstance(fn, nn.Module) else ""
            wanted = None if is_module else _wrt(entry.wrt, program, isinstance(fn, nn.Module), signature, args, kwargs)  # type: ignore[union-attr]
            with undisturbed.in_mode(program, mode), _requiring(program, wanted, args, kwargs) as (args, kwargs):
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
                self._compile(pieces.graphs, joint)
                if joint.sizes.shape_env.replacements != known:
                    raise ExportError(f"{prefix}: the compiler fixed a size that was declared dynamic; make it static, or report the model")
                variants.append(_variant_spec(mode, joint, pieces))
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
        self.programs[name] = (program, examples)

    def _compile(self, graphs: Sequence[Graph], joint: joints.Joint) -> None:
        folder = self.folder / f"g{len(self.artifacts)}"
        folder.mkdir()
        made = aoti.compile_graphs(graphs, folder=folder, fake_mode=joint.fake_mode, target=self.target, progress=self.say)
        self.artifacts.update(made)
        for graph in graphs:
            self.graphs[graph.name] = graph
            for key, tensor in graph.constants.values():
                self.weights.setdefault(key, tensor)

    def _key(self, entry: str, name: str, tensor: torch.Tensor) -> str:
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
            required_features=(),
            producer=f"aot-backward {VERSION}",
            torch=torch.__version__,
            target=targets.target_spec(self.target),
            entries=self.entries,
            libraries={name: library_spec(self.graphs[name], artifact) for name, artifact in self.artifacts.items()},
            weights={k: WeightSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride(), "") for k, t in self.weights.items()},
            members={},
            has_weights=with_weights,
            created=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )

    def check(self, manifest: Manifest, stored: dict[str, torch.Tensor]) -> Manifest:
        """The manifest with the verdict of every variant in it; inputs, results and what they may be off go to ``stored``."""
        package = selfcheck.loaded(manifest, {n: a.library for n, a in self.artifacts.items()}, self.weights)
        entries = {}
        for name, (program, examples) in self.programs.items():
            spec = manifest.entries[name]
            variants = []
            for i, example in enumerate(examples):
                self.say(f"check {name}", i, len(examples))
                verdict = selfcheck.check(package, name, i, program, example, stored)
                variants.append(dataclasses.replace(spec.variants[i], verdict=verdict, seed=selfcheck.SEED))
            self.say(f"check {name}", len(examples), len(examples))
            entries[name] = dataclasses.replace(spec, variants=tuple(variants))
        return dataclasses.replace(manifest, entries=entries)


def _variant_spec(mode: str, joint: joints.Joint, pieces: split.Pieces) -> VariantSpec:
    sizes = joint.sizes
    tensors = [(i, o) for i, o in enumerate(joint.outputs) if o is not None]
    outputs = []
    for i, output in tensors:
        if isinstance(output, tuple):
            value = joint.inputs[output[1]] if output[0] == "input" else joint.state[output[1]]
        else:
            value = output.meta["val"]
        outputs.append(sizes.spec(f"output[{i}]", value, joint.output_requires_grad[i]))
    cotangents = [sizes.spec(f"the gradient of output[{i}]", v, False) for i, v in zip(joint.cotangents, joint.cotangent_values, strict=True)]
    return VariantSpec(
        mode=mode,
        in_tree=joint.in_tree,
        out_tree=joint.out_tree,
        inputs=tuple(sizes.spec(n, t) for n, t in zip(joint.input_names, joint.inputs, strict=True)),
        outputs=tuple(outputs),
        cotangents=tuple(cotangents),
        differentiable=joint.differentiable,
        symbols=sizes.symbols,
        guards=sizes.guards(),
        ambient=joint.ambient,
        verdict=Verdict("not run"),
        forward=pieces.forward,
        backward=pieces.backward,
        inference=pieces.inference,
        gradient=pieces.gradient,
        argument_names=joint.argument_names,
    )


def _prepared(variant: Variant, signature: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as leaves of their own, with ``requires_grad`` as asked for."""
    if not isinstance(variant.args, tuple):
        raise ExportError(f"args is a {type(variant.args).__name__}; expected a tuple of the positional arguments, args=(x,)")
    kwargs = dict(variant.kwargs or {})
    try:
        inspect.signature(signature).bind(*variant.args, **kwargs)
    except TypeError as error:
        raise ExportError(f"the example arguments do not fit {inspect.signature(signature)}: {error}") from error
    names, _ = trees.input_names(signature, variant.args, kwargs)
    flat, spec = pytree.tree_flatten((variant.args, kwargs))
    if variant.requires_grad is not None:
        for name in variant.requires_grad:
            if not any(_below(n, name) for n in names):
                raise ExportError(f"requires_grad names {name!r}, which is no input; the inputs are {names}")
    for i, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            needed = value.requires_grad if variant.requires_grad is None else any(_below(names[i], n) for n in variant.requires_grad)
            if needed and not (value.is_floating_point() or value.is_complex()):
                raise ExportError(f"input {names[i]!r} has dtype {value.dtype}; only floating point and complex tensors get gradients")
            flat[i] = value.detach().requires_grad_(needed)
    return pytree.tree_unflatten(flat, spec)


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
            found = [("input", n) for n in inputs if _below(n, name)]
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


@contextlib.contextmanager
def _requiring(program: nn.Module, wanted: Sequence[tuple[str, str]] | None, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Exactly what is differentiated requires a gradient inside; a ``module`` entry keeps what it has."""
    if wanted is None:
        yield args, kwargs
        return
    names = {n for k, n in wanted if k == "parameter"}
    inputs, _ = trees.input_names(joints.forward_of(program), args, kwargs)
    chosen = {n for k, n in wanted if k == "input"}
    flat, spec = pytree.tree_flatten((args, kwargs))
    flat = [v.detach().requires_grad_(n in chosen) if isinstance(v, torch.Tensor) else v for n, v in zip(inputs, flat, strict=True)]
    before = [(p, p.requires_grad) for p in program.parameters()]
    wanted_tensors = {id(p) for n, p in program.named_parameters(remove_duplicate=False) if n in names}
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in wanted_tensors)
        yield pytree.tree_unflatten(flat, spec)
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@contextlib.contextmanager
def _undisturbed(entries: Entries) -> Iterator[None]:
    """Buffers and random state are put back: tracing and checking run the program."""
    fns = [e.module if isinstance(e, Module) else e.fn for e in entries.values()]
    programs = [p if isinstance(p, nn.Module) else joints.FunctionModule(p) for p in fns]
    buffers = [b for p in programs for b in p.buffers()]
    kept = [b.detach().clone() for b in buffers]
    with torch.random.fork_rng(), contextlib.ExitStack() as stack:
        for program in programs:
            stack.enter_context(undisturbed.slots_kept(program))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, kept, strict=True):
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


def _below(name: str, asked: str) -> bool:
    """Whether the leaf ``name`` is the argument ``asked`` or lies in it."""
    return name == asked or (name.startswith(asked) and name[len(asked)] in "[.")

"""Observed modules -> ``module`` entries of a package: exported as any module is, compared with eager and timed, and added to what is there."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.entries.dispatch import Entry
from aot_backward_runtime.errors import AotBackwardError, ExportError, InputError
from aot_backward_runtime.format.manifest import ModuleSource
from aot_backward_runtime.loader import load
from aot_backward_runtime.module_calls import interception
from aot_backward_runtime.module_calls.audit import on_copies_of_buffers
from aot_backward_runtime.module_calls.live_module import class_name
from aot_backward_runtime.module_calls.plain_values import NotPlain
from aot_backward_runtime.module_calls.recorded_speed import why_slower

from ...capture.preserve import requiring_alone
from ...entries import Module, Variant
from ...packaging.checked_package import checked_package
from ..package_update import PackageUpdate, locked
from .observed_modules import DEEPEST, MOST_KINDS, CallKind, ObservedModule, ObservedModules

_SIZES_AGAIN = 3
_INNER = 12
"""Kinds of modules that are compiled because those that call them were refused, at most: the most expensive."""


@dataclasses.dataclass
class AddedModules:
    """``added``: the classes of modules of which calls were compiled, with how they compare with eager. ``skipped``: why others were not."""

    added: list[str] = dataclasses.field(default_factory=list)
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)


def add_modules(
    path: Path, entry: str, observed: ObservedModules, found: AddedModules, *, target: str, tune: str, progress: Progress | None = None
) -> None:
    """Adds an entry for each kind of module that was called at least twice; what cannot be exported is left out, with its reason, and the modules
    that it calls are looked at in its place. ``found`` says what was done. Raises :class:`ExportError` where the package there is for another torch
    or target, or cannot be written."""
    say, number = progress or silent, itertools.count()
    with locked(path), tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        package = PackageUpdate.read(path, entry, target)
        known = {entry.name: entry for entry in load(path).recorded_modules()} if path.exists() else {}
        for _ in range(DEEPEST + 1):
            failed: dict[type, ObservedModule] = {}  # of modules of one class the most expensive
            for name, seen, source in _to_compile(observed, known, found.skipped, failed):
                try:
                    part = _exported(Path(folder) / f"{next(number)}.pt2", name, seen, source, target, tune, say, found.skipped)
                except (AotBackwardError, RuntimeError) as error:
                    found.skipped[f"calls of {_words(seen)}: {str(error).partition(chr(10))[0]}"] += 1
                    failed.setdefault(type(seen.module), seen)
                    continue
                package = package.with_entries(part)
                package.write()  # each when it is done: an interrupt keeps them
                known = {entry.name: entry for entry in load(path).recorded_modules()}
                if fixed := _fixed(known[name], seen):
                    found.skipped[f"calls of {_words(seen)} with other sizes than {fixed}: the program fixes a size that changed"] += 1
                speeds = [s for v in part.manifest.entries[name].variants if (s := v.speed) is not None]
                ratios = [r for s in speeds for r in s.ratios]
                took = f": {min(ratios):.2f} to {max(ratios):.2f} of eager's time" if ratios else ""
                took += ", too little to gain: replay leaves them to eager (--always)" if why_slower(known[name]) else ""
                found.added.append(f"{class_name(seen.module)}{took}")
            observed = _called_again(failed.values())


def _called_again(failed: Iterable[ObservedModule]) -> ObservedModules:
    """What modules that could not be compiled call, by calling each again as it was called, twice for each of a few sizes."""
    inner = ObservedModules(_called_again.__code__)
    for seen in failed:
        if seen.differentiated:
            continue
        calling, inner.line = _Within(seen.module, inner), seen.line
        interception.enter(calling)
        try:
            for kind in seen.kinds.values():
                for shapes in [*kind.sizes][:_SIZES_AGAIN] * 2:
                    flat, places, tree = _tensors_of(kind)
                    for place, shape in zip(places, shapes, strict=True):
                        flat[place] = _of_shape(flat[place], shape)
                    args, kwargs = pytree.tree_unflatten(flat, tree)
                    with contextlib.suppress(Exception), _as_called(seen.module, kind), on_copies_of_buffers(seen.module), torch.random.fork_rng([]):
                        seen.module(*args, **kwargs)
        finally:
            interception.leave(calling)
    return inner


@dataclasses.dataclass(frozen=True, eq=False)
class _Within:
    """Observes the calls within those of ``module``."""

    module: nn.Module
    inner: ObservedModules

    def module_call(self, module: nn.Module, plain: interception.Plain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if interception.depth() == 0:
            return interception.opened(module, plain, args, kwargs)
        return self.inner.call(module, plain, args, kwargs)


def _words(seen: ObservedModule) -> str:
    return f"{class_name(seen.module)} (called at {seen.line})"


def _to_compile(
    observed: ObservedModules, known: Mapping[str, Entry], skipped: Counter[str], failed: dict[type, ObservedModule]
) -> Iterator[tuple[str, ObservedModule, ModuleSource]]:
    """Each kind of module once, the most expensive first: the name of its entry, and what it was recorded from. What one of the ``known`` entries
    serves is left out; what depends on something that cannot be told is put among the ``failed``."""
    grouped: dict[str, tuple[ObservedModule, ModuleSource]] = {}
    for seen in sorted(observed.modules.values(), key=lambda s: -s.seconds):
        if seen.refused:
            skipped[f"calls of {_words(seen)}: {seen.refused}"] += 1
            continue
        by_autocast: dict[str, dict[Any, CallKind]] = {}
        for key, kind in seen.kinds.items():
            if kind.count > 1:
                by_autocast.setdefault(kind.ambient.autocast, {})[key] = kind
        if not by_autocast:
            skipped[f"calls of {_words(seen)}: no kind of call came twice"] += 1
            continue
        try:
            source = seen.source()
        except NotPlain as error:
            skipped[f"calls of {_words(seen)}: {error}"] += 1
            failed.setdefault(type(seen.module), seen)
            continue
        for autocast, kinds in by_autocast.items():
            name = seen.entry_name(source, autocast)
            if name in grouped:
                _add_kinds(grouped[name][0].kinds, kinds)
            else:
                grouped[name] = dataclasses.replace(seen, kinds=kinds), source
    inner = 0
    for name, (seen, source) in grouped.items():
        if name in known and all(_serves(known[name], kind) for kind in seen.kinds.values()):
            continue
        inner += seen.inner
        if seen.inner and inner > _INNER:
            skipped[f"calls of {_words(seen)}: of modules that others call, {_INNER} kinds are compiled"] += 1
        else:
            yield name, seen, source


def _add_kinds(kinds: dict[Any, CallKind], others: Mapping[Any, CallKind]) -> None:
    """Of another module that the same entry serves."""
    for key, kind in others.items():
        known = kinds.get(key)
        if known is not None:
            kinds[key] = dataclasses.replace(known, count=known.count + kind.count, sizes=Counter(known.sizes) + Counter(kind.sizes))
        elif len(kinds) < MOST_KINDS:
            kinds[key] = kind


def _serves(entry: Entry, kind: CallKind) -> bool:
    """Whether the entry serves calls of all the observed sizes."""
    flat, places, tree = _tensors_of(kind)
    with _ambient(kind):
        for shapes in kind.sizes:
            for place, shape in zip(places, shapes, strict=True):
                flat[place] = _of_shape(flat[place], shape)
            args, kwargs = pytree.tree_unflatten(flat, tree)
            try:
                entry.match(kind.mode, tuple(args), dict(kwargs), frozenset(f"parameter:{n}" for n in kind.trained))
            except InputError:
                return False
    return True


def _tensors_of(kind: CallKind) -> tuple[list[Any], list[int], pytree.TreeSpec]:
    """The arguments of the first call, where among them the tensors are, and how they are put together."""
    flat, tree = pytree.tree_flatten((kind.args, kind.kwargs))
    return flat, [i for i, v in enumerate(flat) if isinstance(v, torch.Tensor)], tree


def _fixed(entry: Entry, seen: ObservedModule) -> str:
    """The sizes of which alone calls are served, where others were observed; or ""."""
    kinds = [kind for kind in seen.kinds.values() if not _serves(entry, kind)]
    return "; ".join(", ".join(str(list(shape)) for shape in _most_often(kind)) for kind in kinds)


def _most_often(kind: CallKind) -> tuple[tuple[int, ...], ...]:
    return max(kind.sizes, key=lambda sizes: kind.sizes[sizes])


def _ambient(kind: CallKind) -> contextlib.AbstractContextManager[object]:
    """The autocast of the observed calls."""
    autocast = kind.ambient.autocast
    return torch.autocast("cpu", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext()


def _exported(
    path: Path, name: str, seen: ObservedModule, source: ModuleSource, target: str, tune: str, say: Progress, skipped: Counter[str]
) -> PackageUpdate:
    """A package of its own, with open sizes if that can be, else with those that came most often."""
    kinds = list(seen.kinds.values())
    try:
        variants = [_variant(seen.module, kind, opened=True) for kind in kinds]
        _export(path, name, seen, kinds, variants, target, tune, say)
    except ExportError as error:
        if all(len(kind.sizes) == 1 for kind in kinds):
            raise
        skipped[f"{_words(seen)}, with open sizes: {str(error).partition(chr(10))[0]}; compiled for the sizes that came most often"] += 1
        variants = [_variant(seen.module, kind, opened=False) for kind in kinds]
        _export(path, name, seen, kinds, variants, target, tune, say)
    part = PackageUpdate.read(path, "backward", target)
    own = dataclasses.replace(part.manifest.entries[name], source=source)
    return dataclasses.replace(part, manifest=dataclasses.replace(part.manifest, entries={name: own}))


def _export(
    path: Path, name: str, seen: ObservedModule, kinds: Sequence[CallKind], variants: Sequence[Variant], target: str, tune: str, say: Progress
) -> None:
    with _as_called(seen.module, kinds[0]):
        checked_package(path, {name: Module(seen.module, variants)}, target, weights=True, portable=True, tune=tune, progress=say, qualified=True)


@contextlib.contextmanager
def _as_called(module: nn.Module, kind: CallKind) -> Iterator[None]:
    """The module in the modes, with the parameters trained and under the autocast of the observed calls; as it was afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    parameters = dict(module.named_parameters())
    try:
        for name, part in module.named_modules(remove_duplicate=False):
            part.training = (kind.mode == "train") != (name in kind.apart)
        with (
            requiring_alone(parameters.values(), [parameters[n] for n in kind.trained if n in parameters]),
            _ambient(kind),
        ):
            yield
    finally:
        for part, training in modes:
            part.training = training


def _variant(module: nn.Module, kind: CallKind, *, opened: bool) -> Variant:
    shapes = list(kind.sizes)
    flat, places, tree = _tensors_of(kind)
    requires = [*kind.trained, *_inputs_requiring_gradients(module, kind)]
    for place, shape in zip(places, _most_often(kind), strict=True):
        flat[place] = _of_shape(flat[place], shape)
    args, kwargs = pytree.tree_unflatten(flat, tree)
    if not opened or len(shapes) == 1:
        return Variant(tuple(args), dict(kwargs), requires_grad=requires, mode=kind.mode)
    specs: list[Any] = [None] * len(flat)
    for number, place in enumerate(places):
        spec = {}
        for d in range(flat[place].dim()):
            if len({s[number][d] for s in shapes}) > 1:
                spec[d] = torch.export.Dim.AUTO  # which comes out fixed where the program fixes it
        specs[place] = spec or None
    positional, keywords = pytree.tree_unflatten(specs, tree)
    return Variant(tuple(args), dict(kwargs), dynamic_shapes=_by_name(module, positional, keywords), requires_grad=requires, mode=kind.mode)


def _by_name(module: nn.Module, positional: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of each argument, by the parameter of ``forward`` that it is for."""
    return dict(inspect.signature(module.forward).bind(*positional, **keywords).arguments)


def _inputs_requiring_gradients(module: nn.Module, kind: CallKind) -> list[str]:
    needs = pytree.tree_map(lambda v: isinstance(v, torch.Tensor) and v.requires_grad, (kind.args, kind.kwargs))
    return [n for n, v in _by_name(module, *needs).items() if any(map(bool, pytree.tree_leaves(v)))]


def _of_shape(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """``tensor`` cut or repeated to ``shape``: values of the same kind."""
    out = tensor.detach()
    for d, size in enumerate(shape):
        if out.shape[d] != size:
            index = torch.arange(size, device=out.device) % max(out.shape[d], 1)
            out = out.index_select(d, index)
    return out.clone().requires_grad_(tensor.requires_grad)

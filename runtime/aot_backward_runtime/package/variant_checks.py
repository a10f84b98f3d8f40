"""Whether a variant agrees with itself: the trees of its arguments and results, its tensors, gradients and shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from keyword import iskeyword

from ..errors import PackageError
from ..format.dtypes import DTYPES
from ..format.manifest import Ambient, EntrySpec, Manifest, Speed, Tree, VariantSpec, Verdict
from .plan_checks import check_plans
from .tensor_checks import check_symbols, check_symbols_of, check_tensor, describe, equal_sizes

_STATUS = re.compile(r"verified|not run(: .*)?", re.DOTALL)
_PRECISIONS = ("highest", "high", "medium")


def check_variant(what: str, entry: EntrySpec, variant: VariantSpec, manifest: Manifest) -> None:
    """The variant, its plans, and its ``double``; ``what`` is what errors call it."""
    try:
        names = check_symbols_of(variant.symbols, [s.shape for s in variant.inputs])
        for spec in (*variant.inputs, *variant.outputs, *variant.cotangents):
            check_tensor(spec, names)
        for guard in variant.guards:
            check_symbols("a guard", guard, names)
        check_ambient(variant.ambient)
        check_speed(variant.speed)
        _check_arguments(variant)
        leaves = [t.index for t in _leaves(variant.out_tree, names) if t.kind == "tensor"]
        if leaves != list(range(len(variant.outputs))):
            raise PackageError(f"its results hold the tensors {leaves[:20]}; there are {len(variant.outputs)}, which come in their order")
        _check_differentiable(variant)
        check_plans(entry, variant, manifest)
    except PackageError as error:
        raise PackageError(f"{what}: {error}") from error
    if variant.double is not None:
        check_variant(f"{what}, differentiated", entry, variant.double, manifest)


def check_ambient(ambient: Ambient) -> None:
    if (ambient.autocast and ambient.autocast not in DTYPES) or ambient.matmul_precision not in _PRECISIONS:
        raise PackageError(
            f"it was captured under autocast {ambient.autocast[:40]!r}, precision {ambient.matmul_precision[:40]!r}, which are unknown"
        )


def check_status(verdict: Verdict) -> None:
    """Of what was recorded: compared with what the script had, or not yet."""
    if not _STATUS.fullmatch(verdict.status):
        raise PackageError(f"the verdict {verdict.status[:80]!r} is neither 'verified' nor 'not run: reason'")


def check_speed(speed: Speed | None, ours: str = "") -> None:
    """``ours``: of what was recorded, and may be left to eager: the name of its code among the timings."""
    if speed is None:
        return
    names = [t.name for t in speed.timings]
    known = names[:1] == ["eager"] and len(set(names)) == len(names) and (not ours or ours in names)
    if not known or speed.chosen not in (names if ours else names[1:]):
        raise PackageError(f"it was timed as {', '.join(map(repr, names))[:80]}, of which {speed.chosen[:40]!r} is said to be here")
    if not speed.sizes or any(len(t.microseconds) != len(speed.sizes) for t in speed.timings):
        raise PackageError(f"it was timed at {len(speed.sizes)} sizes, and there are not as many times")
    if any(min(t.microseconds) < 0 for t in speed.timings) or speed.threads < 1:
        raise PackageError(
            f"it was timed with {speed.threads} threads, and the shortest time is {min(m for t in speed.timings for m in t.microseconds):g} µs"
        )


def _check_arguments(variant: VariantSpec) -> None:
    tree = variant.in_tree
    if tree.kind != "tuple" or [c.kind for c in tree.children] != ["tuple", "dict"]:
        raise PackageError("its arguments are no tuple of a tuple and a dict")
    leaves = [t for t in _leaves(tree, set()) if t.kind == "tensor"]
    if [t.index for t in leaves] != list(range(len(variant.inputs))):
        raise PackageError(f"its arguments hold the tensors {[t.index for t in leaves][:20]}; there are {len(variant.inputs)}, in their order")
    positional, keywords = tree.children
    if len(variant.argument_names) > len(positional.children) or not all(isinstance(k, str) for k in keywords.keys):
        raise PackageError("its arguments have other names than places")
    named = [*zip(variant.argument_names, positional.children, strict=False), *zip(keywords.keys, keywords.children, strict=True)]
    for label, child in named:
        for leaf in _leaves(child, set()):
            if leaf.kind == "tensor" and not _is_part_of(variant.inputs[leaf.index].name, str(label)):
                raise PackageError(f"the argument {str(label)!r} holds a tensor that is called {variant.inputs[leaf.index].name!r}")


def _leaves(tree: Tree, symbols: set[str]) -> Iterator[Tree]:
    """The leaves in their order, each node having been checked. ``symbols``: what sizes among them may need."""
    kind = tree.kind
    if kind in ("tensor", "constant", "size"):
        if tree.children or tree.keys:
            raise PackageError(f"a tree's {kind} has children")
        if kind == "size":
            check_symbols("a result", tree.expression, symbols)
        yield tree
        return
    if kind not in ("tuple", "list", "dict", "namedtuple", "object"):
        raise PackageError(f"a tree of unknown kind {kind[:40]!r}")
    if kind in ("tuple", "list"):
        if tree.keys:
            raise PackageError(f"a tree's {kind} has keys")
    elif len(tree.keys) != len(tree.children) or len(set(tree.keys)) != len(tree.keys):
        raise PackageError(f"a tree's {kind} has {len(tree.children)} children and the keys {str(list(tree.keys))[:80]}")
    if kind == "namedtuple":
        for word in (tree.type_name.rpartition(".")[2], *tree.keys):
            if not isinstance(word, str) or not word.isidentifier() or iskeyword(word) or (word.startswith("_") and word in tree.keys):
                raise PackageError(f"a tree's namedtuple {tree.type_name[:80]!r} has the name or field {str(word)[:40]!r}")
    for child in tree.children:
        yield from _leaves(child, symbols)


def _check_differentiable(variant: VariantSpec) -> None:
    if len(set(variant.differentiable)) != len(variant.differentiable) or len(variant.differentiable) != len(variant.cotangents):
        raise PackageError(f"{len(variant.cotangents)} incoming gradients are listed, of the outputs {list(variant.differentiable)[:20]}")
    for number, cotangent in zip(variant.differentiable, variant.cotangents, strict=True):
        if not 0 <= number < len(variant.outputs):
            raise PackageError(f"output {number} has a gradient; there are {len(variant.outputs)} outputs")
        output = variant.outputs[number]
        same = (output.dtype, output.device) == (cotangent.dtype, cotangent.device) and equal_sizes(output.shape, cotangent.shape, variant.symbols)
        if not same or cotangent.name != f"the gradient of {output.name}":
            raise PackageError(f"{cotangent.name}, {describe(cotangent)}, is listed as the gradient of {output.name}, {describe(output)}")


def check_orders(what: str, variant: VariantSpec) -> None:
    """That gradients which can be differentiated again take the inputs and the incoming gradients, and give what the backward gives; and that
    outputs which share memory are there."""
    for s in variant.shared:
        numbers, same = range(len(variant.outputs)), s.output == s.base
        if same or s.output not in numbers or s.base not in numbers or variant.outputs[s.output].dtype != variant.outputs[s.base].dtype:
            raise PackageError(f"{what}: output {s.output} cannot lie in the memory of output {s.base}")
        if s.stride and len(s.stride) != len(variant.outputs[s.output].shape):
            raise PackageError(f"{what}: output {s.output} has {len(variant.outputs[s.output].shape)} dimensions and {len(s.stride)} strides")
        for expression in (s.offset, *s.stride):
            check_symbols(f"{what}: the place of output {s.output}", expression, {symbol.name for symbol in variant.symbols})
    for first, again in pairwise(variant.orders):
        if first.backward is None or again.forward is None or again.backward is None or len(again.gives) != len(again.forward.outputs):
            raise PackageError(f"{what}: its gradients cannot be differentiated again as it says")
        kinds = [(s.dtype, s.device, s.shape) for s in (*first.inputs, *first.cotangents)]
        if kinds != [(s.dtype, s.device, s.shape) for s in again.inputs] or first.symbols != again.symbols:
            raise PackageError(f"{what}: its gradients take other inputs and incoming gradients than it does")
        if [g.of for g in first.backward.gradients if g.of in again.gives] != list(again.gives):
            raise PackageError(f"{what}: its differentiable gradients are of {sorted(again.gives)}, the backward's are not")


def _is_part_of(name: str, label: str) -> bool:
    return name == label or (name.startswith(label) and name[len(label)] in "[.")

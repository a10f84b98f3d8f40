"""Check that each plan of a manifest passes the tensors that its library was compiled for. The writer calls this as an assertion.

A plan and its library come from one graph, so a difference is a fault of the exporter. Readers trust the manifest (its SHA-256 is in the file) and
only check that its references exist (``aot_backward_runtime/package/references.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.expressions import evaluate, symbols_of
from aot_backward_runtime.format.manifest import Manifest, Plan, Size, SymbolSpec, TensorSpec, VariantSpec
from aot_backward_runtime.package.references import ROLES, check_references


def check_consistent(manifest: Manifest) -> None:
    """Raise an :class:`ExportError` that names the entry, the variant and the plan."""
    try:
        check_references(manifest)
    except PackageError as error:
        raise ExportError(f"the exporter wrote a manifest that no reader accepts: {error}. Please report this.") from error
    for name, entry in manifest.entries.items():
        for number, first in enumerate(entry.variants):
            for variant in first.orders:
                for role in (r for roles in ROLES.values() for r in roles):
                    plan = getattr(variant, role)
                    if plan is not None and (problem := _problem(variant, plan, manifest)):
                        raise ExportError(f"entry {name}, variant {number}, {role}: {problem}. Please report this.")


def _problem(variant: VariantSpec, plan: Plan, manifest: Manifest) -> str | None:
    if plan.call is None:
        return None
    library = manifest.libraries[plan.call.library]
    results = {f"result:{i}": spec for i, spec in enumerate(library.outputs)}
    known = {f"input:{i}": spec for i, spec in enumerate(variant.inputs)} | {f"cotangent:{i}": spec for i, spec in enumerate(variant.cotangents)}
    if variant.forward is not None and variant.forward.call is not None:
        made = {f"result:{i}": spec for i, spec in enumerate(manifest.libraries[variant.forward.call.library].outputs)}
        known |= {f"saved:{i}": (known | made)[text] for i, text in enumerate(variant.forward.saved)}
    pairs = [(text, known.get(text), wanted) for text, wanted in zip(plan.call.operands, library.inputs, strict=True)]
    if plan is not variant.backward:
        pairs += [(text, results.get(text), wanted) for text, wanted in zip(plan.outputs, variant.outputs, strict=True)]
    for text, given, wanted in pairs:
        if given is not None and not _same(given, wanted, variant.symbols):
            return f"{text}: expected {wanted.name}, {_words(wanted)}, got {_words(given)}"
    return None


def _same(given: TensorSpec, wanted: TensorSpec, symbols: Sequence[SymbolSpec]) -> bool:
    """Return whether dtype, device, sizes and strides are the same. The stride of a dimension of size 0 or 1 does not matter."""
    if (given.dtype, given.device) != (wanted.dtype, wanted.device) or not _equal(given.shape, wanted.shape, symbols):
        return False
    strides = [(a, b) for n, a, b in zip(wanted.shape, given.stride, wanted.stride, strict=True) if n not in (0, 1)]
    return 0 in wanted.shape or _equal([a for a, _ in strides], [b for _, b in strides], symbols)


def _equal(a: Sequence[Size], b: Sequence[Size], symbols: Sequence[SymbolSpec]) -> bool:
    """Return whether the sizes are written the same, or have equal values for three assignments of the symbols."""
    if len(a) != len(b):
        return False
    unequal = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    if any(not symbols_of(x) and not symbols_of(y) for x, y in unequal):
        return False
    tried = [{s.name: max(s.minimum, 2) + factor * (n + 1) for n, s in enumerate(symbols)} for factor in (0, 7, 1009)]
    return all(evaluate(x, values) == evaluate(y, values) for values in tried for x, y in unequal)


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} with strides {list(spec.stride)} on {spec.device}"

"""Check that each plan of a manifest passes the tensors that its library was compiled for. The writer calls this as an
assertion.

A plan and its library come from one graph, so a difference is a fault of the exporter. Readers trust the manifest (its
SHA-256 is in the file) and only check that its references exist (``aot_backward_runtime/package/references.py``).
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
        raise ExportError(
            f"the exporter wrote a manifest that no reader accepts: {error}. Please report this."
        ) from error
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
    specs = {f"input:{i}": spec for i, spec in enumerate(variant.inputs)} | {
        f"cotangent:{i}": spec for i, spec in enumerate(variant.cotangents)
    }
    if variant.forward is not None and variant.forward.call is not None:
        forward_results = {
            f"result:{i}": spec for i, spec in enumerate(manifest.libraries[variant.forward.call.library].outputs)
        }
        specs |= {f"saved:{i}": (specs | forward_results)[text] for i, text in enumerate(variant.forward.saved)}
    pairs = [
        (text, specs.get(text), expected) for text, expected in zip(plan.call.operands, library.inputs, strict=True)
    ]
    if plan is not variant.backward:
        pairs += [
            (text, results.get(text), expected) for text, expected in zip(plan.outputs, variant.outputs, strict=True)
        ]
    for text, actual, expected in pairs:
        if actual is not None and not _same(actual, expected, variant.symbols):
            return f"{text}: expected {expected.name}, {_words(expected)}, got {_words(actual)}"
    return None


def _same(actual: TensorSpec, expected: TensorSpec, symbols: Sequence[SymbolSpec]) -> bool:
    """Return whether dtype, device, sizes and strides are the same. The stride of a dimension of size 0 or 1 does not
    matter."""
    if (actual.dtype, actual.device) != (expected.dtype, expected.device):
        return False
    if not _equal(actual.shape, expected.shape, symbols):
        return False
    strides = [
        (a, b) for n, a, b in zip(expected.shape, actual.stride, expected.stride, strict=True) if n not in (0, 1)
    ]
    return 0 in expected.shape or _equal([a for a, _ in strides], [b for _, b in strides], symbols)


def _equal(a: Sequence[Size], b: Sequence[Size], symbols: Sequence[SymbolSpec]) -> bool:
    """Return whether the sizes are written the same, or have equal values for three assignments of the symbols."""
    if len(a) != len(b):
        return False
    differences = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    if any(not symbols_of(x) and not symbols_of(y) for x, y in differences):
        return False
    assignments = [
        {s.name: max(s.minimum, 2) + factor * (n + 1) for n, s in enumerate(symbols)} for factor in (0, 7, 1009)
    ]
    return all(evaluate(x, values) == evaluate(y, values) for values in assignments for x, y in differences)


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} with strides {list(spec.stride)} on {spec.device}"

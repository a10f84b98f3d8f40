"""Whether a module's calls or the backward pass behind them gain more when they are compiled, by what was measured when they were recorded.

Where calls of modules are compiled, their backward pass goes through the engine, to each module's own backward; where they are not, the whole pass
may be compiled, with the loss in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..entries.dispatch import Entry
from ..format.manifest import PassSpec, StructureSpec, WeightSpec
from .recorded_speed import gain_of, why_slower

Shapes = Counter[tuple[str, tuple[object, ...]]]
"""How many tensors there are of each dtype and shape."""
_LEAF = "torch::autograd::AccumulateGrad"
"""The node of a leaf."""


def better_as_passes(structures: Iterable[StructureSpec], modules: Sequence[Entry], weights: Mapping[str, WeightSpec]) -> dict[str, str]:
    """The entries of ``modules`` whose calls are better left to eager, because a recorded pass through them gains more, with the reason in words.
    A pass is taken to go through a module, once, where it has as many leaves as the module trains, and tensors of their shapes that require grad."""
    trained = {entry.name: _trained(entry, weights) for entry in modules}
    gains = {entry.name: 0.0 if why_slower(entry) else max(gain_of(entry), 0.0) for entry in modules}
    left: dict[str, str] = {}
    for structure in structures:
        leaves = structure.nodes.count(_LEAF)
        for variant in structure.variants:
            gain, reached = _gain(variant), Counter((s.dtype, tuple(s.shape)) for s in variant.inputs if s.requires_grad)
            through = [name for name, shapes in trained.items() if shapes and shapes <= reached and shapes.total() <= leaves]
            together = sum(gains[name] for name in through)
            if gain > together:
                gains_in_words = f"{1e6 * gain:,.0f} µs when it was recorded, the module {1e6 * together:,.0f}"
                words = f"its backward pass gains more where it is compiled whole: {gains_in_words}"
                left.update(dict.fromkeys(through, words))
    return left


def _gain(variant: PassSpec) -> float:
    """Seconds that a pass took less than eager's, where its code is run."""
    if variant.speed is None or variant.speed.chosen == "eager":
        return 0.0
    means = variant.speed.means
    return (means["eager"] - means[variant.speed.chosen]) * 1e-6


def _trained(entry: Entry, weights: Mapping[str, WeightSpec]) -> Shapes:
    """Tied parameters count once."""
    wanted = {target.removeprefix("parameter:") for variant in entry.variants for target in variant.wrt if target.startswith("parameter:")}
    keys = {s.weight for s in entry.spec.state if s.name in wanted}
    return Counter((weights[k].dtype, tuple(weights[k].shape)) for k in keys)

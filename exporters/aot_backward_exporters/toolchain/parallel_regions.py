"""Decides which of Inductor's loops run on several threads.

If the number of threads is known only at run time, Inductor makes each loop parallel, however short. Waking threads and
waiting for them takes 1 to 2 µs per loop with two threads, and more with many: as long as a single-threaded loop over
some thousand numbers. So a region is parallel only if the sizes of the call give it enough work.
"""

from __future__ import annotations

import re

WORK = 60_000
"""Minimum operations on one number, per loop of a region on average, for the region to be parallel. With 15,000, 60,000
and 200,000 the gradient of a small transformer took 278, 258 and 252 µs for 2 rows, and 1,114, 1,112 and 1,226 µs for
32, on two threads (docs/benchmarks/2026-11-26-short-calls.md)."""
FUNCTION = 15
"""Operations that a call of a mathematical function counts as: a guess."""
SPECIAL = 300
"""Operations that a call of a special function counts as: one of the gamma function's derivatives takes 220 ns."""
MEMORY = 4
"""Operations that reading and writing a number counts as: a guess."""
SCALAR = 6
"""Factor for the cost of an operation that is not vectorized: a guess."""
_REGION = re.compile(r"^[ \t]*#pragma omp parallel$", re.MULTILINE)
_LOOP = re.compile(r"^[ \t]*#pragma omp for\b.*$", re.MULTILINE)
_RANGE = re.compile(r"for\(int64_t (x\d+)=static_cast<int64_t>\(.*?\); \1<static_cast<int64_t>\((.*)\); \1\+=")
_VALUE = re.compile(r"auto (tmp\d+) = (.*)")
_FUNCTION = re.compile(
    r"\b(?:exp|expm1|exp2|log|log1p|log2|log10|pow|tanh|erf|erfc|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh)\("
)
_SPECIAL = re.compile(r"(?:gamma|bessel|zeta|polynomial|ndtri|erfinv|airy|erfcx|i[01]e?|rand\w*)(?:<[^()]*>)?\(")


def where_it_pays(function: str) -> str:
    """Return ``function``, the text of one kernel, with a condition on the sizes at each parallel region."""
    before, *regions = _REGION.split(function)
    return before + "".join(f"    #pragma omp parallel{_condition(region)}{region}" for region in regions)


def _condition(region: str) -> str:
    """Return the clause of a region; "" if its loops are unknown."""
    loops = _LOOP.split(region)[1:]
    costs = [_work(loop) for loop in loops]
    if not costs or None in costs:
        return ""
    return f" if({' + '.join(str(cost) for cost in costs)} >= {WORK * len(costs)}.0)"


def _work(loop: str) -> str | None:
    """Return an expression for the number of operations in ``loop``; None if the range of an inner loop is unknown."""
    loop_ranges = _RANGE.findall(loop)
    if not loop_ranges or len(loop_ranges) < loop.count("for("):
        return None
    ranges: dict[str, dict[str, None]] = {}  # consecutive loops have one name, and different ends
    for name, end in loop_ranges:
        ranges.setdefault(name, {})[f"static_cast<double>({end})"] = None
    values = _VALUE.findall(loop)
    functions, special = ({name for name, value in values if calls.search(value)} for calls in (_FUNCTION, _SPECIAL))
    operations = MEMORY + len({name for name, _ in values}) + FUNCTION * len(functions) + SPECIAL * len(special)
    cost = operations * (1 if "Vectorized" in loop else SCALAR)
    return " * ".join([f"{cost}.0", *(f"({' + '.join(ends)})" for ends in ranges.values())])

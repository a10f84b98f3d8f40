"""Lets loops that check an index run on several threads.

Inductor checks each index where it is used, and the check throws. An exception that leaves an OpenMP region ends the
process. So a failed check ends its iteration, and is thrown again after the region. Until then all iterations of the
region's loops are skipped, because a later loop may take for an index what the failed one should have written. Kernels
of another form stay as they are, and run on one thread (:func:`.cpp_source.kernel_source`); so do those that add to
shared places, whose sums would have no fixed order.
"""

from __future__ import annotations

import re

_CHECK, _CAUGHT_CHECK = "AOTI_TORCH_CHECK(", "AOTI_CAUGHT_CHECK("
_HELPERS = """#include <atomic>
#include <exception>
#define AOTI_CAUGHT_CHECK AOTI_TORCH_CHECK
namespace aot_backward {
struct Failure {
  std::atomic<bool> seen{false};
  std::exception_ptr first;
  __attribute__((noinline, cold)) void keep() {
    if (!seen.exchange(true)) first = std::current_exception();
  }
};
}  // namespace aot_backward
"""
_REGION = re.compile(r"( *)#pragma omp parallel")
_LOOP = re.compile(r" *#pragma omp for(?: collapse\((\d+)\))?")
_KERNEL_START = 'extern "C" '


def in_parallel(kernels: str) -> str:
    """Return ``kernels``, the text of a kernel file as Inductor writes it, with checks that may fail on any thread."""
    head, *functions = kernels.split(_KERNEL_START)
    changed = [_function(f) if _CHECK in f and "atomic_add" not in f else f for f in functions]
    return kernels if changed == functions else _KERNEL_START.join([_HELPERS + head, *changed])


def _function(text: str) -> str:
    """Return one kernel with its checks caught; the same text if a region has a check outside of its loops, or a loop
    of another form."""
    lines = text.split("\n")
    start = 0
    while start < len(lines):
        if region := _REGION.fullmatch(lines[start]):
            end = _end(lines, start + 1)
            if end is None or not _catch(lines, start + 1, end):
                return text
            if any(_CAUGHT_CHECK in line for line in lines[start:end]):
                lines[start] = f"{region[1]}{{ aot_backward::Failure failure;\n{lines[start]}"
                lines[end] += f"\n{region[1]}if (failure.seen) std::rethrow_exception(failure.first); }}"
            start = end
        start += 1
    return "\n".join(lines).replace(_CHECK, _CAUGHT_CHECK)


def _catch(lines: list[str], start: int, end: int) -> bool:
    """Catch what the loops of a region throw, in ``lines``, if any has a check. Return whether all its checks are in
    such loops."""
    if not any(_CHECK in each for each in lines[start:end]):
        return True
    line = start
    while line < end:
        if loop := _LOOP.fullmatch(lines[line]):
            body = line
            for _ in range(int(loop[1] or 1)):
                body = next(
                    (n for n in range(body + 1, end) if not lines[n].lstrip().startswith(("for(", "#pragma GCC"))), end
                )
            last = _end(lines, body)
            if last is None:
                return False
            lines[body] += " if (failure.seen.load(std::memory_order_relaxed)) continue;"
            if any(_CHECK in each for each in lines[body:last]):
                lines[body + 1 : last] = [each.replace(_CHECK, _CAUGHT_CHECK) for each in lines[body + 1 : last]]
                lines[body] += " try {"
                lines[last] += " catch (...) { failure.keep(); } }"
            line = last
        line += 1
    return not any(_CHECK in each for each in lines[start:end])


def _end(lines: list[str], start: int) -> int | None:
    """Return the line that closes the block which opens in the line ``start``; None if no block opens there."""
    if lines[start].strip() != "{":
        return None
    return next((n for n in range(start + 1, len(lines)) if lines[n] == lines[start].replace("{", "}")), None)

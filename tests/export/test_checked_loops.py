"""Loops that check an index run on several threads, and a bad index on any of them is an error of that call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import aot_backward as ab
from aot_backward_runtime import load

from ..support.exports import shared

ROWS, WIDTH, COUNT = 400, 64, 8000
PROGRAM = """
import os, sys, torch
from aot_backward_runtime import ExecutionError, load
package, threads = load(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
function = package.function()
table, index = torch.randn(400, 64), torch.randint(400, (8000,))
expected = table[index].sin() * 2
wrong = [index.clone() for _ in range(4)]
for number, place in enumerate((0, 4000, 7999)):
    wrong[number][place] = 400
wrong[3][:] = -401
torch.set_num_threads(threads)
before = len(os.listdir("/proc/self/task"))
results = [function(table, index)]
for bad in wrong * 5:
    try:
        function(table, bad)
    except ExecutionError as error:
        assert "failed (index out of bounds: " in str(error) and ", in cpp_fused_" in str(error), error
        assert "an index among the inputs (of an embedding, a gather, a class label) is negative" in str(error), error
    else:
        raise AssertionError("a bad index passed")
    results.append(function(table, index))
print(len(os.listdir("/proc/self/task")) - before)
torch.set_num_threads(1)
for result in results:
    torch.testing.assert_close(result, expected)
"""


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    return table[index].sin() * 2


def package() -> Path:
    arguments = torch.randn(ROWS, WIDTH), torch.randint(ROWS, (COUNT,))
    return shared("checked-loops", lambda path: ab.export_function(looked_up, arguments, path=path))


@pytest.mark.parametrize("threads", [1, 4])
def test_a_bad_index_on_any_thread(threads: int) -> None:
    """The new threads of the process are the loop's: eager's operators ran before they are counted, on one."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, package(), str(threads)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == threads - 1


def test_a_loss_over_many_classes_equals_eager() -> None:
    """Its kernel checks the labels, between sums over the classes."""

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(x, labels)

    torch.manual_seed(0)
    x, labels = torch.randn(256, 2000), torch.randint(2000, (256,))
    path = shared("many-classes", lambda path: ab.export_grad(loss, (x, labels), wrt="x", path=path))
    value, gradient = load(path).grad()(x, labels)
    x.requires_grad_()
    expected = loss(x, labels)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, x)[0])
    labels[100] = 2000
    with pytest.raises(ab.ExecutionError, match="out of bounds"):
        load(path).grad()(x.detach(), labels)


AFTER_A_FAILURE = """
import sys, torch
from aot_backward_runtime import ExecutionError, load
function = load(sys.argv[1]).function()
torch.set_num_threads(2)
table, index = torch.randn(400, 64), torch.randint(400, (8000,))
function(table, index)
large = [torch.full((8000,), 2**40 + 7) for _ in range(8)]  # what memory holds that the failed loop does not write
del large
for bad in (400, -401, 2**31 - 1):
    try:
        function(table, torch.full((8000,), bad))
    except ExecutionError as error:
        assert "index out of bounds" in str(error), error
    else:
        raise AssertionError("a bad index passed")
"""


def chained(table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    rows = table[index].argmax(1)
    return torch.ops.aten._unsafe_index(table, [rows.flip(0)[:7000]]).cos(), rows


def test_later_loops_do_not_run_after_a_failed_check() -> None:
    """The second loop takes the first one's result for an index, and does not check it."""
    arguments = torch.randn(ROWS, WIDTH), torch.randint(ROWS, (COUNT,))
    path = shared("chained-loops", lambda path: ab.export_function(chained, arguments, path=path))
    done = subprocess.run([sys.executable, "-c", AFTER_A_FAILURE, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_index_of_padded_rows_is_checked(dtype: torch.dtype) -> None:
    """The code reads the index only inside of the padding."""

    def padded(table: Tensor, index: Tensor) -> Tensor:
        return functional.pad(table[index], (1, 2, 3, 0)).exp()

    table, index = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randint(ROWS, (COUNT,))
    path = shared(f"padded-rows-{dtype}", lambda path: ab.export_function(padded, (table, index), path=path))
    function = load(path).function()
    torch.testing.assert_close(function(table, index), padded(table, index))
    for place, bad in ((0, ROWS), (COUNT // 2, -ROWS - 1), (COUNT - 1, ROWS)):
        wrong = index.clone()
        wrong[place] = bad
        with pytest.raises(ab.ExecutionError, match="out of bounds"):
            function(table, wrong)
    torch.testing.assert_close(function(table, index), padded(table, index))

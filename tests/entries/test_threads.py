"""Native code is the same for any number of threads at export, and right for any number at run time."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters.toolchain.gcc import compiler
from aot_backward_exporters.toolchain.parallel_regions import FUNCTION, MEMORY, SCALAR, SPECIAL, WORK, where_it_pays
from aot_backward_runtime import load

from ..support.packages import python


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_exported_with_one_thread_and_run_with_several(tmp_path: Path) -> None:
    """If Inductor counts one thread it omits the protection against duplicate work, but still starts several: the mean
    loss was divided by the batch once in each thread."""
    torch.manual_seed(0)
    body = [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(net.parameters())
    path = ab.export_step(net, (x, y), loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, path=tmp_path / "step.pt2")
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        step, eager = load(path).step(), copy.deepcopy(net)
        optimizer = torch.optim.AdamW(eager.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(eager(x), y)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)


_TEAMS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <omp.h>

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
int teams = 0;

/* In the place of libgomp's, of which it makes use. */
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
    teams++;
    ((Parallel)dlsym(RTLD_NEXT, "GOMP_parallel"))(body, data, threads, flags);
}

void within_a_team_of_two(void (*call)(void)) {
    #pragma omp parallel num_threads(2)
    if (omp_get_thread_num() == 0) call();
}
"""

_CALLS = """
import ctypes, sys
import torch
from aot_backward_runtime import load

grad = load(sys.argv[1]).grad()
seen = ctypes.CDLL(sys.argv[2])
torch.manual_seed(0)
x = torch.randn(400, 300)


def same(threads, x=x):
    torch.set_num_threads(threads)
    value, gradient = grad(x)
    torch.testing.assert_close(gradient, 1 - torch.tanh(x) ** 2)
    torch.testing.assert_close(value, torch.tanh(x).sum(), rtol=1e-3, atol=1e-3)


def teams_of(threads, x):
    torch.set_num_threads(threads)
    grad(x)
    before = ctypes.c_int.in_dll(seen, "teams").value
    grad(x)
    return ctypes.c_int.in_dll(seen, "teams").value - before


print(teams_of(1, x), teams_of(2, x) > 0, teams_of(2, x[:2].clone()))
for threads in 1, 2, 1:
    same(threads)
    same(threads, x[:2].clone())
torch.set_num_threads(1)
failed = []


@ctypes.CFUNCTYPE(None)
def call():
    try:
        same(1)
    except Exception as error:
        failed.append(error)


seen.within_a_team_of_two(call)
print(failed)
"""


def summed(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sum()


def test_one_thread_and_little_work_make_no_team(tmp_path: Path) -> None:
    """libgomp's team of one makes a system call at the end of each loop, and waking a second thread takes longer than a
    short loop. Inside another team's thread the loops also run completely."""
    rows = ({0: Dim("rows", min=2)},)
    path = ab.export_grad(summed, (torch.randn(400, 300),), wrt="x", dynamic_shapes=rows, path=tmp_path / "summed.pt2")
    source, teams = tmp_path / "teams.c", tmp_path / "teams.so"
    source.write_text(_TEAMS)
    subprocess.run(
        [*compiler(), "-x", "c", str(source), "-shared", "-fPIC", "-fopenmp", "-o", str(teams), "-ldl"], check=True
    )
    done = python(_CALLS, path, teams, LD_PRELOAD=str(teams))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["0 True 0", "[]"]


REGION = """
    #pragma omp parallel
    {
        {
            #pragma omp for
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(12L*ks0); x0+=static_cast<int64_t>(1L))
            {
                for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(16L); x1+=static_cast<int64_t>(8L)) {}
                for(int64_t x1=static_cast<int64_t>(0L); x1<static_cast<int64_t>(ks1); x1+=static_cast<int64_t>(8L))
                {
                    auto tmp0 = at::vec::Vectorized<float>::loadu(in_ptr0 + static_cast<int64_t>(x1), static_cast<int64_t>(8));
                    auto tmp1 = tmp0.exp();
                }
            }
        }
        {
            #pragma omp for collapse(2)
            for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(7L); x0+=static_cast<int64_t>(1L))
            {
                auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
                auto tmp1 = calc_polygamma(2, tmp0);
            }
        }
    }
"""


def test_a_region_is_parallel_where_there_is_work() -> None:
    first = f"{MEMORY + 2 + FUNCTION}.0 * (static_cast<double>(12L*ks0)) * (static_cast<double>(16L) + static_cast<double>(ks1))"
    second = f"{SCALAR * (MEMORY + 2 + SPECIAL)}.0 * (static_cast<double>(7L))"
    condition = f"if({first} + {second} >= {2 * WORK}.0)"
    assert where_it_pays(REGION) == REGION.replace("omp parallel", f"omp parallel {condition}")
    unknown = REGION.replace("for(int64_t x1=", "for(auto x1=", 1)
    assert where_it_pays(unknown) == unknown
    other = "#pragma omp parallel num_threads(8)\n#pragma omp for\nfor(;;)"
    assert where_it_pays(other) == other

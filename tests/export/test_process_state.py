"""An export always restores its changes to the process, in reverse order. Exports in two threads do not mix."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward
from aot_backward.capture.program_module import FunctionModule
from aot_backward.capture.trace import trace_program
from aot_backward.checks import graph_check
from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched, patched_items, without_convolution_libraries


class Base:
    def inherited(self) -> str:
        return "inherited"


class Owner(Base):
    value = 1

    @staticmethod
    def fixed() -> str:
        return "fixed"


def test_attributes_are_put_back_in_reverse_order_whatever_happens() -> None:
    before = dict(vars(Owner))
    with pytest.raises(ZeroDivisionError), patched(Owner, value=2, inherited=lambda self: "replaced"):
        assert (Owner.value, Owner().inherited()) == (2, "replaced")
        with patched(Owner, value=4, fixed=staticmethod(lambda: "other")):  # nested, in one thread
            assert (Owner.value, Owner.fixed()) == (4, "other")
        assert (Owner.value, Owner().fixed()) == (2, "fixed")
        raise ZeroDivisionError
    assert dict(vars(Owner)) == before  # a staticmethod stays one, and inherited attributes stay inherited


def test_an_attribute_that_is_not_there_is_not_made() -> None:
    before = dict(vars(Owner))
    with (
        pytest.raises(AttributeError, match=r"Owner.* has no attribute 'renamed' that could be replaced"),
        patched(Owner, value=2, renamed=3),
    ):
        raise AssertionError("never reached")
    assert dict(vars(Owner)) == before


def test_an_attribute_that_cannot_be_set_leaves_the_others_as_they_were() -> None:
    with pytest.raises(AttributeError), patched(Fixed(), free=2, held=3):
        raise AssertionError("never reached")
    with pytest.raises(AttributeError), patched(one := Fixed(), free=2, held=3):
        raise AssertionError("never reached")
    assert one.free == 1


class Fixed:
    def __init__(self) -> None:
        self.free = 1

    @property
    def held(self) -> int:
        return 1


def test_entries_of_a_mapping_are_put_back() -> None:
    mapping = {"a": "1"}
    with patched_items(mapping, a="2", b="3"), patched_items(mapping, b="4"):
        assert mapping == {"a": "2", "b": "4"}
    assert mapping == {"a": "1"}


def test_switches_are_put_back() -> None:
    nnpack = torch.backends.nnpack.flags
    before = torch_api._get_mkldnn_enabled()
    with pytest.raises(ZeroDivisionError), without_convolution_libraries():
        assert not torch_api._get_mkldnn_enabled() and not torch.backends.nnpack.set_flags(False)[0]
        raise ZeroDivisionError
    assert torch_api._get_mkldnn_enabled() == before
    with nnpack(enabled=False), without_convolution_libraries():
        pass
    assert torch.backends.nnpack.set_flags(True)[0]


def replaced() -> Iterator[object]:
    """Yield the current values of everything that a trace replaces."""
    yield from (
        vars(nn.Module)["__setattr__"],
        vars(torch.Tensor)["register_hook"],
        "retain_grad" in vars(torch.Tensor),
    )
    yield from (
        torch.autograd.graph.saved_tensors_hooks.__enter__,
        torch.autograd.backward,
        torch_api.decompositions._rnn_helper,
    )
    yield from (torch_api.decompositions._upsample_linear, torch_api.decompositions.upsample_bicubic2d_default)
    yield from (
        torch_api.transformer._detect_is_causal_mask,
        "apply" in vars(torch.utils.checkpoint.CheckpointFunction),
    )
    yield from (
        "create_node" in vars(torch_api.PythonKeyTracer),
        torch_api._get_mkldnn_enabled(),
        torch.get_default_dtype(),
    )


def test_a_trace_that_fails_puts_everything_back() -> None:
    before = list(replaced())

    def fails(x: torch.Tensor) -> torch.Tensor:
        assert list(replaced()) != before
        raise ValueError("on purpose")

    with pytest.raises(aot_backward.ExportError, match="on purpose"):
        trace_program(FunctionModule(fails), (torch.ones(2),), {}, None, signature=fails)
    assert list(replaced()) == before


def test_two_exports_in_two_threads_do_not_mix(tmp_path: Path) -> None:
    ran: list[str] = []  # the export that ran its function, in order
    start = threading.Barrier(2)
    before, random = list(replaced()), torch.get_rng_state()

    def export(name: str) -> torch.Tensor:
        def loss(x: torch.Tensor) -> torch.Tensor:
            ran.append(name)
            time.sleep(0.01)  # the other thread may run
            return (x.sin() * x).sum()

        x = torch.linspace(0, 1, 5)
        start.wait()
        path = aot_backward.export_grad(loss, (x,), path=tmp_path / f"{name}.pt2")
        _, gradients = aot_backward.load(path).grad()(x)
        return gradients["x"]

    with ThreadPoolExecutor(2) as pool:
        gradients = list(pool.map(export, ("a", "b")))
    x = torch.linspace(0, 1, 5)
    assert all(torch.allclose(g, x.sin() + x * x.cos()) for g in gradients)
    assert sum(one != other for one, other in itertools.pairwise(ran)) == 1 and {*ran} == {"a", "b"}
    assert list(replaced()) == before and torch.equal(torch.get_rng_state(), random)


class Counted(nn.Module):
    """BatchNorm, whose statistics change during an export. The module signals when they have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.changed = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(x)
        if type(self.norm.running_mean) is torch.Tensor and self.norm.num_batches_tracked > 0:
            self.changed.set()
        return out


def test_two_exports_of_one_module_leave_its_buffers_as_they_were(tmp_path: Path) -> None:
    """The second begins after the first has changed them."""
    module, x = Counted().train(), torch.randn(6, 3)
    before = {n: b.clone() for n, b in module.named_buffers()}

    def second() -> None:
        assert module.changed.wait(300)
        aot_backward.export_module(module, (x,), path=tmp_path / "b.pt2")

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(second)
        pool.submit(aot_backward.export_module, module, (x,), path=tmp_path / "a.pt2").result()
        waiting.result()
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


def test_a_process_that_is_forked_during_an_export_can_export() -> None:
    script = """
import os, threading
from aot_backward_exporters.process_state import exclusive
entered, leave = threading.Event(), threading.Event()
def export():
    with exclusive():
        entered.set()
        leave.wait()
thread = threading.Thread(target=export)
thread.start()
entered.wait()
child = os.fork()
if not child:
    with exclusive():
        os._exit(7)
_, status = os.waitpid(child, 0)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 7
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_what_another_thread_loads_is_not_compared(tmp_path: Path) -> None:
    """While a package's graphs are compared with eager's operators, other packages open as usual."""
    x = torch.linspace(0, 1, 5)
    package = aot_backward.load(aot_backward.export_grad(lambda x: x.sin().sum(), (x,), path=tmp_path / "a.pt2"))
    with graph_check._watched(aot_backward.load(tmp_path / "a.pt2"), {}, None, "it"):  # type: ignore[arg-type]
        _, gradients = package.grad()(x)
    torch.testing.assert_close(gradients["x"], x.cos())

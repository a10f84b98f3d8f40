"""Calls from C: other sizes and strides, results in the caller's memory, and calls that are refused before anything
changes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch

from aot_backward_runtime import load

from ..support import c_library, golden_files
from ..support.c_library import (
    GRADIENTS,
    INCOMPATIBLE,
    INPUT,
    INPUTS,
    NAME,
    NUMBERS,
    OUTPUTS,
    STATES,
    DLTensor,
    Failed,
    Function,
    dl_tensor,
    library,
    tensor_of,
)
from ..support.golden_packages import arguments, samples

pytestmark = golden_files.needed
PAIR, STEP, ORDERS = (golden_files.FOLDER / f"{name}.pt2" for name in ("1.0-pair", "1.2-step", "1.3-orders"))


@pytest.fixture
def loss() -> Iterator[Function]:
    with c_library.function(PAIR, "loss") as called:
        yield called


@pytest.fixture
def fit() -> Iterator[Function]:
    with c_library.function(STEP, "fit") as called:
        yield called


def refused(call: object, status: int, *words: str) -> None:
    with pytest.raises(Failed) as caught:
        call()  # type: ignore[operator]
    assert caught.value.status == status, caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_what_a_function_takes_and_gives_is_described(loss: Function, fit: Function) -> None:
    assert loss.kind == "grad" and fit.kind == "step"
    (name, shape), *others = loss.describe(INPUTS)
    assert name == "x" and shape[1] == "3" and not shape[0].isdecimal() and not others
    assert list(loss.describe(OUTPUTS)) == [("output[0]", ())]
    assert {n: s[-1] for n, s in loss.describe(GRADIENTS)} == {"x": "3", "net.first.weight": "3"}
    assert ("0.weight", ("8", "4")) in fit.describe(STATES)
    numbers = fit.numbers()
    assert numbers[0, "lr", -1] == 1e-3 and numbers[1, "lr", -1] == 1e-2 and numbers[-1, "clip_norm", -1] == 0.5
    assert fit.count(NUMBERS) == len(numbers)


@pytest.mark.parametrize(
    "lay_out",
    [lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, :3], lambda x: x[:1].expand(4, 3)],
    ids=["columns", "rows", "expanded"],
)
def test_inputs_of_other_strides_are_copied(loss: Function, lay_out: object) -> None:
    x = lay_out(arguments()[0].detach())  # type: ignore[operator]
    before = x.clone()
    assert torch.equal(loss.run(x)[0], loss.run(x.contiguous())[0])
    assert torch.equal(x, before)


def test_an_input_that_is_not_aligned_is_copied(loss: Function) -> None:
    x = arguments()[0].detach()
    memory = torch.zeros(x.nbytes + 1, dtype=torch.uint8)
    memory[1:] = x.contiguous().view(torch.uint8).reshape(-1)
    given = dl_tensor(x)
    given.data, given.byte_offset = memory.data_ptr(), 1
    out = DLTensor()
    c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, ctypes.byref(out), 1))
    assert torch.equal(tensor_of(out), loss.run(x)[0])


def test_results_go_into_memory_of_the_caller(loss: Function) -> None:
    x = arguments()[0].detach()
    expected = loss.run(x)
    own = [
        torch.full((), math.nan),
        *(torch.full((2 * e.shape[0], e.shape[1]), math.nan).t()[:, ::2].t() for e in expected[1:]),
    ]
    results = (DLTensor * 3)(*map(dl_tensor, own))
    given = dl_tensor(x)
    c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, results, 3))
    for mine, theirs in zip(own, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_an_array_of_results_may_be_handed_in_again(loss: Function) -> None:
    """Results of an earlier call point to memory that the next call frees, so each call fills in the array again."""
    results = (DLTensor * 3)()
    for rows in (4, 4, 9, 2):
        x = torch.randn(rows, 3)
        given = dl_tensor(x)
        c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, results, 3))
        found = [tensor_of(r) for r in results]
        for f, e in zip(found, loss.run(x), strict=True):
            assert f is not None and e is not None and torch.equal(f, e)


def test_an_input_in_a_result_of_an_earlier_call_is_copied(loss: Function) -> None:
    results, x = (DLTensor * 2)(), torch.randn(4, 3)
    first = dl_tensor(x)
    c_library.check(library().aotb_run(loss.handle, ctypes.byref(first), 1, results, 2))
    gradient = tensor_of(results[1])
    again = (DLTensor * 2)()
    c_library.check(library().aotb_run(loss.handle, ctypes.byref(results[1]), 1, again, 2))
    found = tensor_of(again[1])
    assert gradient is not None and found is not None and torch.equal(found, loss.run(gradient)[1])


def test_a_result_that_lies_in_one_of_an_earlier_call_is_refused(loss: Function) -> None:
    results, x = (DLTensor * 2)(), torch.randn(4, 3)
    given = dl_tensor(x)
    c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, results, 2))
    shape = (ctypes.c_int64 * 2)(*x.shape)
    own = (DLTensor * 2)()
    own[1] = results[1]
    own[1].shape, own[1].strides = shape, None
    refused(
        lambda: c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, own, 2)),
        INPUT,
        "x lies in a result of an earlier call",
        "NULL",
    )


def test_results_that_do_not_fit_are_refused_before_anything_runs(fit: Function) -> None:
    x, y = samples(8)
    inputs = (DLTensor * 2)(dl_tensor(x), dl_tensor(y))
    before = fit.state("0.weight")
    for wrong in (torch.zeros(1), torch.zeros((), dtype=torch.float64)):
        out = dl_tensor(wrong)
        assert library().aotb_run(fit.handle, inputs, 2, ctypes.byref(out), 1) == INPUT
        assert b"output[0]" in library().aotb_error() and b"got float" in library().aotb_error()
    many = (DLTensor * 9)()
    assert library().aotb_run(fit.handle, inputs, 2, many, 9) == INPUT
    assert torch.equal(before, fit.state("0.weight")) and fit.progress().updates == 0


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(1, 3), ("rows", "is 1", "at least 2")),
        (torch.zeros(65, 3), ("rows", "is 65", "at most 64")),
        (torch.zeros(4, 2), ("x has size 2 in dimension 1", "expected 3")),
        (torch.zeros(4), ("x has 1 dimensions", "expected 2")),
        (torch.zeros(4, 3, dtype=torch.float64), ("x: expected float32, got float64.", "aotb_convert(function, 1)")),
        (torch.zeros(4, 3, dtype=torch.int32), ("x: expected float32, got int32.",)),
    ],
    ids=lambda v: "" if isinstance(v, tuple) else f"{v.dtype}{tuple(v.shape)}",
)
def test_a_bad_input_is_named(loss: Function, x: torch.Tensor, words: tuple[str, ...]) -> None:
    refused(lambda: loss.run(x), INPUT, "loss", *words)


def test_bad_tensors_are_named(loss: Function) -> None:
    x = torch.zeros(4, 3)

    def run(**changes: object) -> None:
        given, out = dl_tensor(x), DLTensor()
        for name, value in changes.items():
            setattr(given, name, value)
        c_library.check(library().aotb_run(loss.handle, ctypes.byref(given), 1, ctypes.byref(out), 1))

    run()
    device = dl_tensor(x).device
    device.kind = 2
    refused(lambda: run(device=device), INPUT, "x is on device 2")
    refused(lambda: run(data=None), INPUT, "x of shape (4, 3) has no data")
    refused(lambda: run(shape=None), INPUT, "x has no shape")
    refused(lambda: run(shape=(ctypes.c_int64 * 2)(-4, 3)), INPUT, "negative")
    refused(lambda: run(strides=(ctypes.c_int64 * 2)(1 << 62, 1)), INPUT, "too large")
    refused(lambda: run(ndim=-1), INPUT, "-1 dimensions")
    refused(lambda: loss.run(x, x), INPUT, "2 inputs; expected 1")
    assert library().aotb_run(loss.handle, None, 1, None, 0) == INPUT


def test_names_that_are_not_there(loss: Function, fit: Function) -> None:
    with c_library.opened(PAIR) as package:
        assert package.entries == ["pair", "loss"]
        refused(lambda: package.function("nonsuch").__enter__(), NAME, "nonsuch", "pair")
    refused(lambda: fit.state("nonsuch.weight"), NAME, "nonsuch.weight")
    refused(lambda: fit.number(0, "nonsuch", 1.0), NAME, "nonsuch")
    refused(lambda: fit.number(2, "lr", 1.0), NAME, "lr", "group 2")
    refused(lambda: loss.number(0, "lr", 1.0), INPUT, "expected a step")
    refused(lambda: loss.backward(), INPUT, "expected a forward call")
    refused(lambda: loss.forward(torch.zeros(4, 3)), INPUT, "only a module")


def test_what_a_message_repeats_is_printable(loss: Function) -> None:
    with c_library.opened(PAIR) as package, pytest.raises(Failed) as caught:
        package.function("\x1b[31mred\u202e\x9b2J").__enter__()
    assert str(caught.value).isprintable() and "red" in str(caught.value)
    refused(lambda: loss.state("\x07bell"), NAME, "?bell")


def test_a_backend_that_is_not_there() -> None:
    handle = ctypes.c_void_p()
    for name, word in ((b"nonsuch", b"nonsuch"), (b"/nonsuch/libtorch_cpu.so", b"nonsuch")):
        assert (
            library().aotb_open(bytes(PAIR), ctypes.byref(c_library.Options(name)), ctypes.byref(handle))
            == INCOMPATIBLE
        )
        assert word in library().aotb_error() and not handle


def test_an_input_in_memory_that_the_call_writes_is_refused() -> None:
    with c_library.function(STEP, "fit") as fit:
        view = DLTensor()
        c_library.check(library().aotb_state(fit.handle, b"0.weight", ctypes.byref(view)))
        _, y = samples(8)
        inputs = (DLTensor * 2)(view, dl_tensor(y))
        assert library().aotb_run(fit.handle, inputs, 2, None, 0) == INPUT
        assert b"0.weight" in library().aotb_error()


def test_gradients_that_are_dropped(fit: Function) -> None:
    x, y = samples(8)
    refused(fit.update, INPUT, "no gradients have been accumulated")
    fit.accumulate(x, y)
    c_library.check(library().aotb_zero_grad(fit.handle))
    refused(fit.update, INPUT, "no gradients have been accumulated")
    step = load(STEP).step("fit")
    step(x, y, update=False)
    step.zero_grad()
    assert torch.equal(fit.run(x, y)[0], step(x, y))


def test_a_number_that_the_code_was_not_compiled_for(fit: Function) -> None:
    refused(lambda: fit.number(0, "betas", 1.7, 0), INPUT, "betas", "1.7", "AdamW")
    fit.number(0, "betas", 0.8, 0)
    assert fit.numbers()[0, "betas", 0] == 0.8


def test_a_module_with_several_variants_and_absent_gradients() -> None:
    with c_library.function(ORDERS, "curved") as module:
        x = torch.randn(5, 3)
        module.train(True)
        (y,) = module.forward(x)
        assert (
            library().aotb_served(module.handle) == 0
            and module.count(GRADIENTS, 0) == 7
            and module.count(GRADIENTS, 1) == 2
        )
        assert all(g is not None for g in module.backward(torch.ones_like(y)))
        # The later forward overwrote its saved tensors
        refused(lambda: module.backward(torch.ones_like(y)), INPUT, "expected a forward call")
        module.forward(x)
        assert all(g is None for g in module.backward(None))
        module.forward(x)
        refused(lambda: module.backward(torch.ones(4, 1)), INPUT, "shape (4, 1)", "expected (5, 1)")
        module.train(False)
        refused(lambda: module.forward(x), INPUT, "mode 'eval'", "exported for 'train'")

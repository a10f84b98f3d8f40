"""Forward and every gradient of real models equal eager's: static and with a dynamic batch, for any incoming
gradients."""

from __future__ import annotations

import pytest
import torch

from aot_backward_runtime import load

from ..support import exports, zoo
from ..support.oracle import assert_same, run


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_equal_to_eager(name: str, dynamic: bool) -> None:
    case = zoo.make(name)
    loaded = load(exports.module(name, dynamic=dynamic)).module()
    torch.manual_seed(11)
    for size in case.sizes if dynamic else case.sizes[:1]:
        args = case.args(size)
        eager = case.module.train(case.mode == "train")
        assert_same(run(loaded, args, 5), run(eager, args, 5), case.relative)
        # Buffers have changed; other incoming gradients
        assert_same(run(loaded, args, 6), run(eager, args, 6), case.relative)


def test_two_outputs_of_which_one_gets_no_gradient() -> None:
    case = zoo.make("two")
    loaded = load(exports.module("two", dynamic=True)).module()
    args = case.args(4)
    outputs = [t for t in run(case.module, args, 1).items() if t[0].startswith("output")]
    assert len(outputs) == 4
    for which in range(3):
        given = [torch.randn(s) if i == which else None for i, s in enumerate([(4, 4), (4, 16), (32,)])]
        fresh = zoo.make("two").module
        loaded.load_state_dict(fresh.state_dict())
        assert_same(run(loaded, args, given), run(fresh, args, given))


def test_results_other_than_tensors_come_back() -> None:
    case = zoo.make("two")
    loaded = load(exports.module("two", dynamic=True)).module()
    x, y = case.args(5)
    out = loaded(x, y)
    assert list(out) == ["out", "hidden", "n", "y", "rows", "flat"]
    assert out["n"] == 3 and out["rows"] == 10 and out["y"] is y


def test_gradients_accumulate_and_are_none_where_eager_has_none() -> None:
    case = zoo.make("two")
    loaded = load(exports.module("two", dynamic=True)).module()
    args = case.args(4)
    for module in (loaded, case.module):
        torch.manual_seed(1)
        module(*args)["out"].sum().backward()
        module.eager_first = module.a.weight.grad.clone()
        torch.manual_seed(1)
        module(*args)["out"].sum().backward()
        torch.testing.assert_close(module.a.weight.grad, 2 * module.eager_first, rtol=1e-4, atol=1e-4)
    assert loaded.unused.weight.grad is None and loaded.scale.grad is None and loaded.tied.weight is loaded.a.weight

"""The tensors that a package for GPUs accepts: checks of the contract that need no GPU."""

from __future__ import annotations

import pytest
import torch

from aot_backward_runtime import InputError
from aot_backward_runtime.format.manifest import TensorSpec
from aot_backward_runtime.native.guards import Contract, check_kind

ON_GPU = TensorSpec("x", "float32", "cuda", (2,), (1,))
SCALAR = TensorSpec("scale", "float32", "cuda", (), ())
SECOND = torch.device("cuda", 1)


def test_an_input_on_the_cpu_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"x is on cpu; expected cuda:1: pass x.to\('cuda:1'\)$"):
        check_kind(torch.zeros(2), ON_GPU, device=SECOND)
    with pytest.raises(InputError, match=r"x is on meta; expected cuda: pass x.to\('cuda'\)$"):
        check_kind(torch.zeros(2, device="meta"), ON_GPU)


def test_a_number_on_the_cpu_goes_along() -> None:
    check_kind(torch.tensor(2.0), SCALAR, device=SECOND)
    with pytest.raises(InputError, match=r"scale is on cpu; expected cuda:1"):
        # Its gradient would be on the wrong device
        check_kind(torch.tensor(2.0, requires_grad=True), SCALAR, device=SECOND)
    with pytest.raises(InputError, match=r"scale is on meta"):
        check_kind(torch.tensor(2.0, device="meta"), SCALAR, device=SECOND)


def test_a_package_for_the_cpu_takes_no_number_from_elsewhere() -> None:
    contract = Contract([TensorSpec("scale", "float32", "cpu", (), ())], (), (), torch.device("cpu"))
    contract.fit([torch.tensor(1.0)])
    with pytest.raises(InputError, match="scale is on meta; expected cpu"):
        contract.fit([torch.tensor(1.0, device="meta")])

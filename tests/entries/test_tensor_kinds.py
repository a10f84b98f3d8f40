"""Tensors without plain memory (docs/reliability.md, rows 11, 12, 13 and 41), given to every kind of entry before and
after a good call. Each raises a typed error that names it, or gives eager's numbers. All run in one subprocess, so that
a signal is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import load

from ..support.exports import shared
from ..support.packages import python


class Counts(nn.Module):
    """Its forward updates a buffer and combines it with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.detach().mean())
        return torch.sigmoid(self.linear(x)) + self.seen[:4] * x


def counts() -> Counts:
    torch.manual_seed(4)
    return Counts()


def counting_package() -> Path:
    """Return a package of :class:`Counts` on a tensor of (4, 4): the module ``net``, the gradient function ``loss``,
    the step ``fit``."""

    def make(path: Path) -> None:
        net, inner = counts(), counts()

        def loss(x: torch.Tensor) -> torch.Tensor:
            return inner(x).square().sum()

        x = torch.randn(4, 4, requires_grad=True)
        trained = counts()
        ab.export(
            path,
            {
                "net": ab.Module(net, [ab.Variant((x,))]),
                "loss": ab.Grad(loss, [ab.Variant((x,))], wrt="x"),
                "fit": ab.Step(
                    trained,
                    [ab.Variant((torch.randn(4, 4), torch.randn(4, 4)))],
                    torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9),
                    loss_fn=nn.MSELoss(),
                ),
            },
        )

    return shared("counting", make)


KINDS = """
import sys, warnings
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from aot_backward_runtime import AotBackwardError, load

warnings.filterwarnings("ignore", category=UserWarning)
package = load(sys.argv[1])
net, loss, fit = package.module("net"), package.grad("loss"), package.step("fit")
y = torch.randn(4, 4)

class Mine(nn.Parameter):
    pass

def kinds():
    plain = torch.randn(4, 4)
    rows = [torch.randn(4), torch.randn(4)]
    yield "nested", torch.nested.nested_tensor(rows)
    yield "nested parameter", nn.Parameter(torch.nested.nested_tensor(rows), requires_grad=False)
    yield "nested, empty", torch.nested.nested_tensor([])
    yield "jagged", torch.nested.nested_tensor(rows, layout=torch.jagged)
    yield "sparse_coo", plain.to_sparse()
    yield "sparse_csr", plain.to_sparse_csr()
    yield "sparse_bsc", plain.to_sparse_bsc((2, 2))
    yield "sparse parameter", nn.Parameter(plain.to_sparse(), requires_grad=False)
    yield "mkldnn", plain.to_mkldnn()
    yield "quantized", torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8)
    yield "meta", plain.to("meta")
    yield "functional", torch._to_functional_tensor(plain)
    yield "fake", FakeTensorMode().from_tensor(plain)
    yield "masked", torch.masked.masked_tensor(plain, plain > 0)
    yield "subclass", Mine(plain, requires_grad=False)
    yield "uninitialized parameter", nn.parameter.UninitializedParameter()
    yield "uninitialized buffer", nn.parameter.UninitializedBuffer()
    yield "no elements", torch.randn(0, 4)
    shrunk = torch.randn(4, 4)
    shrunk.untyped_storage().resize_(4)
    yield "shrunk", shrunk
    yield "no tensor", 3.0

def attempt(what, call):
    try:
        call()
    except AotBackwardError as error:
        print("refused", what, "|", error, flush=True)
    except Exception as error:
        print("UNTYPED", what, "|", type(error).__name__, error, flush=True)
    else:
        print("ACCEPTED", what, flush=True)
"""

INPUTS = f"""{KINDS}
doors = {{"net": net, "net by keyword": lambda x: net(x=x), "loss": loss, "fit": lambda x: fit(x, y), "fit's target": lambda t: fit(y, t)}}
for when in ("before", "after"):
    for door, call in doors.items():
        if when == "after":
            for _ in range(3):
                call(torch.randn(4, 4))
        for kind, value in kinds():
            attempt(f"{{when}} {{door}} {{kind}}", lambda: call(value))
        call(torch.randn(4, 4))
print("done")
"""

STATE = f"""{KINDS}
for kind, value in kinds():
    other = load(sys.argv[1]).module("net")
    other(y)
    if isinstance(value, torch.Tensor):
        for place in (other.linear._parameters, other._buffers):
            name = next(iter(place))
            before, place[name] = place[name], value
            attempt(f"{{name}} {{kind}}", lambda: other(y))
            place[name] = before
    other(y)
for kind, value in kinds():
    # the engine itself refuses the others, as in eager
    if kind.startswith(("sparse_coo", "sparse parameter", "functional", "fake", "masked", "subclass", "shrunk")):
        attempt(f"gradient {{kind}}", lambda: net(torch.randn(4, 4)).backward(value))
        net(torch.randn(4, 4)).backward(torch.randn(4, 4))
print("done")
"""


@pytest.mark.parametrize("script", [INPUTS, STATE], ids=["inputs", "state"])
def test_a_kind_that_native_code_cannot_read_is_refused_by_name(script: str) -> None:
    done = python(script, counting_package())
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", (done.stdout, done.stderr)
    assert len(lines) > 40 and all(line.startswith("refused ") for line in lines[:-1]), done.stdout
    nested = [line for line in lines if " nested" in line.partition("|")[0]]
    assert nested and all("nested" in line.partition("|")[2] for line in nested)


def test_batched_gradients() -> None:
    """``is_grads_batched=True``, also through ``jacobian(vectorize=True)``, and ``vmap`` over ``torch.autograd.grad``,
    with and without the graph."""
    net, eager = load(counting_package()).module("net"), counts()
    x, vectors = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, 4)

    def ways(module: torch.nn.Module) -> list[torch.Tensor]:
        module.get_buffer("seen").zero_()
        wanted = [x, *module.parameters()]
        out = [*torch.autograd.grad(module(x), wanted, vectors, is_grads_batched=True)]
        y = module(x)
        out += torch.func.vmap(lambda v: torch.autograd.grad(y, wanted, v, retain_graph=True))(vectors)
        out += torch.autograd.grad(y, wanted, vectors, is_grads_batched=True, retain_graph=True)
        out += torch.autograd.grad(y, wanted, vectors[0])
        return [*out, torch.autograd.functional.jacobian(module, x.detach(), vectorize=True)]

    eager.load_state_dict(net.state_dict())
    for _ in range(2):
        torch.testing.assert_close(ways(net), ways(eager))


ZEROS = """
import sys, warnings
import torch
from torch.autograd import forward_ad
from aot_backward_runtime import GradientError, InputError, WeightsError, load

warnings.filterwarnings("ignore", message=".torch.jit")  # make_dual uses torch.jit.script

def package():
    return load(sys.argv[1])

def zero_tensor():
    return torch._efficientzerotensor(4, 4)

y, zeros = torch.randn(4, 4), torch.zeros(4, 4)
for warm in (False, True):
    made = [package() for _ in range(2)]
    nets, losses, fits = ([getattr(p, k)(n) for p in made] for k, n in (("module", "net"), ("grad", "loss"), ("step", "fit")))
    if warm:
        for call in (*nets, *losses, *(lambda x, f=f: f(x, y) for f in fits)):
            for _ in range(3):
                call(y)
    assert torch.equal(nets[0](zero_tensor()), nets[1](zeros))
    (a, da), (b, db) = losses[0](zero_tensor()), losses[1](zeros)
    assert torch.equal(a, b) and torch.equal(da, db)
    assert torch.equal(fits[0](zero_tensor(), y), fits[1](zeros, y))
    assert torch.equal(fits[0](y, zero_tensor()), fits[1](y, zeros))
    grads = []
    for net, cotangent in zip(nets, (zero_tensor(), zeros)):
        x = y.clone().requires_grad_()
        net(x).backward(cotangent)
        grads.append((x.grad, net.linear.weight.grad))
    assert all(torch.equal(p, q) for p, q in zip(*grads))
    for loaded in (nets[0], losses[0]):
        state = {n: torch._efficientzerotensor(*t.shape) for n, t in loaded.state_dict().items()}
        try:
            loaded.load_state_dict(state)
        except WeightsError as error:
            assert "has no memory" in str(error), error
        else:
            raise AssertionError
    nets[0].linear.weight = torch.nn.Parameter(zero_tensor())
    try:
        nets[0](y)
    except WeightsError as error:
        assert "linear.weight of shape (4, 4) has no memory" in str(error), error
    else:
        raise AssertionError
    with forward_ad.dual_level():  # a tangent that native code would drop, also where the call before was of the same kind
        dual = forward_ad.make_dual(y, torch.ones(4, 4))
        for call in (nets[1], losses[1], lambda x: fits[1](x, y)):
            try:
                call(dual)
            except GradientError as error:
                assert "tangent" in str(error), error
            else:
                raise AssertionError(call)
print("done")
"""


def test_zero_tensors_are_zeros() -> None:
    done = python(ZEROS, counting_package())
    assert done.returncode == 0 and done.stdout.split() == ["done"], (done.stdout, done.stderr)


def product(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


REPLAYED = """
import sys, warnings
import torch
from torch.autograd import forward_ad
from aot_backward_runtime import replay
from tests.entries.test_tensor_kinds import product

warnings.filterwarnings("ignore", message=".torch.jit")  # make_dual uses torch.jit.script

def passes():
    x, tangent = torch.linspace(-1, 1, 5).requires_grad_(), torch.linspace(1, 2, 5)
    yield torch.autograd.grad(product(x), x)[0]
    yield from torch.func.jvp(torch.func.grad(product), (x.detach(),), (tangent,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        yield from forward_ad.unpack_dual(torch.autograd.grad(product(dual), x)[0])
    yield torch.autograd.grad(x.sin() * x, x, torch._efficientzerotensor(5))[0]
    yield torch.autograd.grad((x * torch._efficientzerotensor(5)).sum(), x)[0]

expected = list(passes())
with replay(sys.argv[1]) as session:
    for _ in range(2):
        for mine, theirs in zip(passes(), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
assert session.report.hits, session.report
print("done")
"""


def test_forward_mode_over_recorded_passes() -> None:
    """``jvp(grad(f))`` gives recorded passes ZeroTensors, and tensors with tangents."""

    def make(path: Path) -> None:
        x = torch.linspace(-1, 1, 5).requires_grad_()
        with ab.record(path, min_seen=1):
            torch.autograd.grad(product(x), x)
            torch.autograd.grad(x.sin() * x, x, torch.ones(5))
            torch.autograd.grad((x * torch.linspace(1, 2, 5)).sum(), x)

    done = python(REPLAYED, shared("recorded-product", make), PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0 and done.stdout.split() == ["done"], (done.stdout, done.stderr)

"""Recorded backward passes compared bit for bit with eager, the fingerprint, and the state that a session leaves in the
process."""

from __future__ import annotations

import dataclasses
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aot_backward_runtime import AotBackwardError
from aot_backward_runtime.passes.session import Replaying
from aot_backward_runtime.tapes.tape import Op, Slot, Tape

from ..support.backward_passes import SCENARIOS
from ..support.backward_passes.scenario import leaf

_REENTRANT = "re-entrant: called by a hook or a custom function of another pass"
_BATCHED = "batched gradients (is_grads_batched=True), or within a functorch transform"
LEFT_TO_EAGER = {
    "checkpointed_reentrant": {_REENTRANT: 6},
    "backward_in_a_backward": {_REENTRANT: 6},
    "backward_in_a_hook": {_REENTRANT: 3},
    "double_backward": {"create_graph=True: compiled passes cannot be differentiated again": 3},
    "batched_gradients": {_BATCHED: 3},
    "update_through_a_view_of_another_type": {"view_fn not supported by compiled autograd": 3},
    "nothing_in_reach": {
        "the order in which eager runs the nodes cannot be derived from the roots of this pass": 6,
    },
    "jagged_tensors": {"NestedTensor support not implemented.": 3},
}
"""Scenario -> the number of its passes that run in eager, and the reason. All other passes are recorded."""
# Dynamo's compiled autograd reads .grad of tensors that are not leaves
_OF_PYTORCHS_OWN = "ignore:The .grad attribute of a Tensor"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable the log line of each interpreted pass."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def bits(value: object) -> object:
    """Return the bytes of a tensor with its dtype and shape. Compared as bytes, NaN equals itself and -0.0 differs from
    0.0."""
    if not isinstance(value, Tensor):
        return value
    if value.layout == torch.sparse_coo:
        return value.is_coalesced(), bits(value._indices()), bits(value._values())
    plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return (
        value.dtype,
        value.shape,
        value.requires_grad,
        plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
    )


@pytest.mark.filterwarnings(_OF_PYTORCHS_OWN)
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_eager(name: str) -> None:
    step = SCENARIOS[name]()
    expected = [step(i) for i in range(3)]
    step = SCENARIOS[name]()
    with Replaying(None) as session:
        actual = [step(i) for i in range(3)]
    for i in range(3):
        assert actual[i].keys() == expected[i].keys()
        for key, e in expected[i].items():
            a = actual[i][key]
            assert type(a) is type(e) and bits(a) == bits(e), f"step {i}, {key}:\n{a}\nin eager:\n{e}"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert session.report.eager == LEFT_TO_EAGER.get(name, {})
    passes = sum(session.report.misses.values())
    assert passes or name in (*LEFT_TO_EAGER, "nothing_requires_a_gradient")


def test_hits_of_the_engines_cache() -> None:
    """A known structure is not recorded again, for any batch size."""
    step = SCENARIOS["mlp"]()
    with Replaying(None) as session:
        for i in range(5):
            step(i)
    assert session.report.bindings == len(session.tapes) == 1 and sum(session.report.misses.values()) == 5


def random_pass(seed: int, step: int, leaves: list[Tensor]) -> list[object]:
    """Run a random graph with hooks, partly reachable. Sums and the log show eager's order of execution."""
    choose = random.Random(seed)
    torch.manual_seed(seed * 10 + step)
    x, log = torch.randn(4), list[object]()
    values = [p * 1.0 if choose.random() < 0.5 else p for p in leaves]
    for k in range(choose.randint(5, 25)):
        a, b, c = (choose.choice(values) for _ in range(3))
        made = choose.choice(
            [
                lambda a, b, c: [a * b],
                lambda a, b, c: [a + b + c],
                lambda a, b, c: [a.sin() * x],
                lambda a, b, c: torch.stack([a, b]).unbind(0),
                lambda a, b, c: torch.cat([a, b, c]).split(4),
                lambda a, b, c: [a.slice_scatter(b[1:3], 0, 1, 3), (a - b).tanh()],
                lambda a, b, c: [a.clone().mul_(c), torch.where(a > 0, a, c * 0.1)],
            ]
        )(a, b, c)
        for t in made:
            if choose.random() < 0.4:
                t.register_hook(lambda g, k=k: log.append((k, bits(g))))
            if choose.random() < 0.15:
                t.retain_grad()
        values += made
    roots = choose.sample(values, min(len(values), choose.randint(1, 4)))
    incoming = [torch.randn(4) for _ in roots]
    found: tuple[Tensor | None, ...] = ()
    match choose.randrange(3):
        case 0:
            torch.autograd.backward(roots, incoming)
        case 1:
            torch.autograd.backward(roots, incoming, inputs=choose.sample(leaves, 2))
        case 2:
            found = torch.autograd.grad(roots, choose.sample(values, 3), incoming, allow_unused=True)
    return [*map(bits, found), *(bits(p.grad) for p in leaves), *log]


@pytest.mark.parametrize("seed", range(40))
def test_random_graphs(seed: int) -> None:
    def run() -> list[object]:
        torch.manual_seed(seed)
        leaves = [torch.randn(4, requires_grad=True) for _ in range(3)]
        return [random_pass(seed, step, leaves) for step in range(2)]

    expected = run()
    with Replaying(None):
        assert run() == expected


# -- the tape


def record(loss: Callable[[], Tensor], **options: Any) -> Tape:
    with Replaying(None) as session:
        loss().backward(**options)
    (tape,) = session.tapes
    return tape


def tape_of(name: str) -> Tape:
    step = SCENARIOS[name]()
    with Replaying(None) as session:
        step(0)
    return session.tapes[0]


@pytest.mark.parametrize("name", ["mlp", "custom_undefined_gradients", "saved_tensor_hooks"])
def test_print(name: str) -> None:
    tape = tape_of(name)
    lines = str(tape).splitlines()
    assert sum(line.startswith("  ") for line in lines) == len(tape.ops) + 1, (
        "one line per operation, and what is returned"
    )
    assert sum(line.startswith("# ") for line in lines) <= len(tape.nodes)
    assert all(line[:2] in ("  ", "# ") for line in lines[1:])


def test_fingerprint_holds_for_every_batch_and_step() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    prints = [record(lambda n=n: net(torch.randn(n, 4)).square().mean()).fingerprint() for n in (2, 5, 5, 1)]
    assert len(set(prints)) == 1, "the first step has no .grad, the later ones do"
    w = leaf(1, 4)
    rows = [record(lambda n=n: (w * torch.ones(n, 1)).unbind(0)[0].sum()).fingerprint() for n in (2, 5)]
    assert rows[0] == rows[1]
    assert tape_of("lstm").fingerprint() == tape_of("lstm").fingerprint()


def test_fingerprint_tells_apart() -> None:
    w, b = leaf(3, 3), leaf(3)

    def hooked() -> Tensor:
        y = w.sin()
        y.register_hook(lambda g: g)
        return (y + b).sum()

    def frozen() -> Tensor:
        return (w.sin() + b.detach()).sum()

    losses = [
        lambda: (w.sin() + b).sum(),
        lambda: (w.cos() + b).sum(),
        lambda: (w.sin() + b).sum().clamp(max=1e9),
        lambda: (w.sin() + b).sum(0).sum(),
        lambda: (w.sin() + b).sum(1).sum(),
        lambda: (w.sin() + b.double()).sum(),
        lambda: (w.t().sin() + b).sum(),
        hooked,
        frozen,
    ]
    prints = [record(loss).fingerprint() for loss in losses] + [record(losses[0], inputs=[w]).fingerprint()]
    assert len(set(prints)) == len(prints)
    handle = b.register_post_accumulate_grad_hook(lambda p: None)
    assert record(losses[0]).fingerprint() not in prints
    handle.remove()
    assert record(losses[0]).fingerprint() == prints[0]


def test_every_field_changes_the_fingerprint() -> None:
    op = Op("apply", "Mul", ([Slot("input", 0)], 2.0, torch.float32), (0,), 1)
    tape = Tape((op,), (Slot("value", 0),), 1, 2, ("int",), 3, 4, ("Mul",))
    other_op = {"kind": "custom", "name": "Div", "operands": ([Slot("input", 0)], 3.0, torch.float32), "results": (-1,)}
    other = {
        "ops": (op, op),
        "outputs": (None,),
        "inputs": 7,
        "sizes": 7,
        "scalars": ("float",),
        "hooks": 7,
        "packed": 7,
    }
    fields = {f.name for f in dataclasses.fields(Tape) if not f.metadata.get("derived")}
    assert fields == set(other) and {f.name for f in dataclasses.fields(Op)} - {"node"} == set(other_op)
    changed = [dataclasses.replace(tape, **{name: value}) for name, value in other.items()]
    changed += [
        dataclasses.replace(tape, ops=(dataclasses.replace(op, **{name: value}),)) for name, value in other_op.items()
    ]
    assert len({t.fingerprint() for t in (tape, *changed)}) == 1 + len(changed)
    same = dataclasses.replace(tape, nodes=("Other",), ops=(dataclasses.replace(op, node=5),))
    assert same.fingerprint() == tape.fingerprint(), "where it came from has no effect"


def _run(script: str, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", _OF_PYTORCHS_OWN, "-c", script, *arguments],
        input=given,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


THIN = """
import sys, torch, logging
base = set(sys.modules)
logging.disable(logging.CRITICAL)
from aot_backward_runtime.passes.session import Replaying
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2, x + 1
    @staticmethod
    def backward(ctx, g, h): return 2 * g + h
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
with Replaying(None) as session:
    for _ in range(3):
        out = net(torch.randn(2, 3))
        out.register_hook(lambda g: g * 2)
        Doubled.apply(out)[0].sum().backward()
assert sum(session.report.misses.values()) == 3 and not session.report.eager, str(session.report)
{last}
print(sorted(m for m in set(sys.modules) - base if m.split(".")[0] == "sympy" or m.startswith(("torch._dynamo", "torch._inductor")))[:3])
"""


def test_thin() -> None:
    """Recording and interpreting import no tracer and no compiler."""
    assert _run(THIN.format(last="")) == "[]\n"
    assert _run(THIN.format(last="import torch._dynamo")) != "[]\n", "the test can fail"


# -- the engine's setting


def current() -> Any:
    """Return the engine's current compiler."""
    prior = torch._C._dynamo.compiled_autograd.set_autograd_compiler(None, False)
    torch._C._dynamo.compiled_autograd.set_autograd_compiler(*prior)
    return prior


def test_left_as_it_was() -> None:
    before = current()
    engine, run = torch.autograd.Variable._execution_engine, torch.autograd.graph._engine_run_backward
    with pytest.raises(ZeroDivisionError), Replaying(None):
        assert current() != before
        raise ZeroDivisionError
    assert current() == before
    assert torch.autograd.Variable._execution_engine is engine
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward is run  # type: ignore[attr-defined]


def test_nested() -> None:
    before, step = current(), SCENARIOS["mlp"]()
    with Replaying(None) as outer:
        step(0)
        with Replaying(None) as inner:
            step(0)
        step(0)
    assert current() == before
    assert sum(outer.report.misses.values()) == 2 and sum(inner.report.misses.values()) == 1
    outer = Replaying(None)
    with outer, Replaying(None), pytest.raises(AotBackwardError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert current() == before


def test_another_thread_may_not_enter() -> None:
    errors: list[Exception] = []

    def enter() -> None:
        try:
            Replaying(None).__enter__()
        except AotBackwardError as error:
            errors.append(error)

    with Replaying(None):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "another thread" in str(errors[0])


@pytest.mark.filterwarnings(_OF_PYTORCHS_OWN)
def test_under_pytorchs_own() -> None:
    """PyTorch's compiled autograd, active outside or later, still works with functional backwards that we received."""
    from torch._dynamo import compiled_autograd as theirs

    net = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 3))
    x = torch.randn(2, 4)
    graphs: list[Any] = []

    def compiler(graph: Any) -> Any:
        graphs.append(graph)
        return graph

    def gradients() -> list[bytes]:
        net.zero_grad()
        net(x).square().sum().backward()
        return [p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None]

    expected = gradients()
    with Replaying(None) as session:
        assert gradients() == expected
    with theirs._enable(compiler_fn=compiler):
        assert gradients() == expected and len(graphs) == 1
        setting = current()
        with Replaying(None) as session:
            assert gradients() == expected and sum(session.report.misses.values()) == 1
        assert current() == setting and len(graphs) == 1
        assert gradients() == expected and len(graphs) == 2, "recorded anew: the cache is emptied in between"
    assert gradients() == expected


def test_pytorchs_own_comes_later_or_first() -> None:
    """A fresh process is needed: one of the two binds every node type first."""
    script = """
import sys, torch, logging
logging.disable(logging.CRITICAL)
from aot_backward_runtime.passes.session import Replaying
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Softplus(), torch.nn.Linear(4, 2))
x = torch.randn(2, 3)
def gradients():
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.numpy().tobytes() for p in net.parameters()]
expected = gradients()
def ours():
    with Replaying(None) as session:
        assert gradients() == expected
    assert not session.report.eager, str(session.report)
def theirs():
    from torch._dynamo import compiled_autograd
    with compiled_autograd._enable(compiler_fn=lambda graph: graph):
        assert gradients() == expected
for name in sys.argv[1:]:
    globals()[name]()
print("same")
"""
    assert _run(script, "ours", "theirs", "ours") == "same\n"
    assert _run(script, "theirs", "ours", "theirs") == "same\n"

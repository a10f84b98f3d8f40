"""Backward passes with sparse tensors, lengths, positions and subclasses: replayed from a package, or refused by name
while recording."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import aot_backward as ab
from aot_backward_exporters import torch_api

Step = Callable[[int], list[Tensor | None]]


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Things that a pass can hold besides dense tensors at fixed positions. Each method takes a number of rows or a
    position."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 4, sparse=True)
        self.bag = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
        self.first, self.cell = nn.Linear(4, 3), nn.LSTM(3, 4, batch_first=True)
        self.experts = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16))

    def sparse_gradients(self, n: int) -> Tensor:
        numbers = torch.arange(n) % 10
        return self.first(self.words(numbers)).square().sum() + self.bag(numbers, torch.tensor([0, 2])).square().sum()

    def packed(self, n: int) -> Tensor:
        """Lengths are values of a tensor. Their number is part of a node, so each number is a separate structure."""
        padded = self.first(torch.linspace(-1, 1, 48).reshape(3, 4, 4))
        packed = nn.utils.rnn.pack_padded_sequence(padded, [4, 2, 1] if n % 2 else [4, 4, 2], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return out.square().sum()

    def grouped(self, n: int) -> Tensor:
        rows = torch.linspace(-1, 1, 512).reshape(32, 16).bfloat16()
        return (
            torch._grouped_mm(rows, self.experts, offs=torch.tensor([16, 32], dtype=torch.int32)).float().square().sum()
        )

    def ring(self, i: int) -> Tensor:
        """Write a buffer at a changing position."""
        buffer = torch.zeros(16, 3)
        buffer[i : i + 2] = self.first(torch.ones(2, 4))
        buffer[i] = buffer[i + 1] * 2
        return buffer.square().sum()

    def cache(self, i: int) -> Tensor:
        keys = torch.zeros(1, 2, 16, 3)
        keys[:, :, i : i + 2] = self.first(torch.ones(1, 2, 2, 4))
        return keys.square().sum() + keys[:, :, i].sum() + keys.as_strided((2, 3), (3, 1), i).sum()


def stepping(name: str) -> Step:
    net = Net()

    def step(n: int) -> list[Tensor | None]:
        net.zero_grad()
        getattr(net, name)(n).backward()
        return [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]

    return step


def same(expected: Sequence[Tensor | None], actual: Sequence[Tensor | None]) -> None:
    for e, a in zip(expected, actual, strict=True):
        assert (e is None) == (a is None)
        if e is not None and a is not None:
            assert (e.dtype, e.layout, e.shape) == (a.dtype, a.layout, a.shape)
            reduced_precision = e.dtype is torch.bfloat16
            assert torch.allclose(
                e.to_dense().double(),
                a.to_dense().double(),
                rtol=0.02 if reduced_precision else 1e-5,
                atol=0.05 if reduced_precision else 1e-6,
            )


SERVED = {  # recorded, replayed, number of structures
    "sparse_gradients": ((5, 7, 9), (4, 8), 1),
    "packed": ((1, 1), (1,), 1),
    "grouped": ((1, 1), (1, 1), 1),
    "ring": ((0, 5, 9, 1), (3, 0, 1, 14, 8), 1),
    "cache": ((2, 5, 9), (0, 1, 13, 4), 1),
}


if not torch_api.at_least("2.13"):
    del SERVED["grouped"]  # a header of torch 2.11 and 2.12 does not declare the grouped product
    del SERVED["ring"]  # refused: the compiled pass differs from the recorded one


def test_served(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with ab.record(path, min_seen=1) as recording:
        for name, (seen, _, _) in SERVED.items():
            step = stepping(name)
            for n in seen:
                step(n)
    assert not recording.skipped and len(recording.tapes) == sum(count for *_, count in SERVED.values())
    structures = ab.load(path).manifest.entries["backward"].structures
    assert [len(s.variants) for s in structures] == [1] * len(recording.tapes)  # positions 0 and 1 are not special
    for name, (_, later, _) in SERVED.items():
        eager, replayed = stepping(name), stepping(name)
        with ab.replay(path, strict=True) as replaying:
            for n in (*later, *later):
                same(eager(n), replayed(n))
        assert replaying.report.hits >= len(later) and not replaying.report.eager


class Marked(Tensor):
    """A subclass without behaviour."""


def by_subclass(n: int) -> Tensor:
    return (torch.ones(n, 4).as_subclass(Marked) @ WEIGHT).square().sum()


def by_sparse(n: int) -> Tensor:
    return torch.sparse.mm(torch.eye(n).to_sparse(), WEIGHT[:1].expand(n, 4)).square().sum()


WEIGHT = torch.randn(4, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            by_subclass,
            "is a tests.passes.test_kinds_of_passes.Marked, a subclass of torch.Tensor; a compiled pass takes plain, dense tensors",
        ),
        (
            by_sparse,
            r"\(of SparseAddmmBackward0, node \d\) is a sparse tensor \(torch.sparse_coo\); a compiled pass takes plain, dense tensors",
        ),
    ],
)
def test_refused_by_name_while_recording(loss: Callable[[int], Tensor], words: str, tmp_path: Path) -> None:
    with ab.record(tmp_path / "bw.pt2") as recording:
        for n in (3, 5):
            loss(n).backward()
    (skipped,) = recording.skipped
    assert re.search(words, skipped) and re.search(r"backward called at .*test_kinds_of_passes\.py:\d+\)$", skipped)
    assert not (tmp_path / "bw.pt2").exists()


def test_a_node_that_cannot_be_compiled_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aot_backward.recording import trace

    monkeypatch.setattr(trace, "_MAX_OPAQUE", 0)
    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        stepping("packed")(1)
    (skipped,) = recording.skipped
    assert re.search(
        r"could not be traced: .* \(PackPaddedSequenceBackward0, node \d+, backward called at .*\.py:\d+\)",
        skipped.replace("_PackPadded", "PackPadded"),
    ), skipped


def test_a_miss_names_the_node_and_the_line_and_says_to_record(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    other = nn.Sequential(net[0], nn.Sigmoid(), net[2])
    with ab.record(tmp_path / "bw.pt2"):
        for n in (4, 6):
            net(torch.ones(n, 4)).sum().backward()
    with ab.replay(tmp_path / "bw.pt2") as replaying:
        other(torch.ones(4, 4)).sum().backward()
        net(torch.ones(1, 4)).sum().backward()
        net(torch.ones(2, 4).double().float()[:, :3] @ torch.ones(3, 4)).sum().backward()
    unknown, size = replaying.report.misses
    assert re.search(
        r"node \d+ is SigmoidBackward0, in the nearest recorded structure it is TanhBackward0; ",
        unknown,
    )
    assert re.search(r"\(of \w+Backward0, node \d+\)", size) and "expected at least 2" in size
    for reason in (unknown, size):
        assert re.search(
            r"backward called at .*test_kinds_of_passes\.py:\d+: record such a pass too, into the same file \(", reason
        ), reason
        assert "export" not in reason

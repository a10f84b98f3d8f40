"""The tensors of a package: they return as stored, without a copy, and damage is named (docs/reliability.md, row
29)."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from aot_backward.packaging.package_writer import write_package
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.safetensors_header import DTYPES, read_header
from aot_backward_runtime.native import weights as weights_module
from aot_backward_runtime.native.weights import layout_problem, load_examples, load_weights
from aot_backward_runtime.package.archive import Archive, open_package

from ..support.packages import EXAMPLES, MANIFEST, WEIGHTS, put_together, taken_apart, tiny_manifest

pytestmark = pytest.mark.usefixtures("cache")


def store(
    path: Path, weights: dict[str, torch.Tensor], examples: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Path:
    write_package(path, tiny_manifest(libraries={}, **changes), {}, weights, examples or {})
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, NaN included, dtype, shape and strides."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return a[None].contiguous().view(torch.uint8).equal(b[None].contiguous().view(torch.uint8))


def every_dtype() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 256, (16 * 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = {"bool": raw.gt(127)}
    for name in (*DTYPES, "complex128"):
        if name != "bool":
            out[name] = raw.view(getattr(torch, name))
    return out


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = every_dtype()
    assert len(tensors) == 20
    shaped = {}
    for name, tensor in tensors.items():
        for view in (tensor, tensor[:24].reshape(2, 3, 4), tensor[3], tensor[:0], tensor[:0].reshape(0, 3)):
            shaped[f"{name} {list(view.shape)}"] = view
    loaded = load_weights(open_package(store(tmp_path / "x.pt2", shaped)))
    assert loaded.keys() == shaped.keys()
    for name, tensor in shaped.items():
        assert same(tensor, loaded[name]), name


def test_the_member_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors = {n: t for n, t in every_dtype().items() if n != "complex128"}
    data = taken_apart(store(tmp_path / "x.pt2", tensors))[WEIGHTS]
    (tmp_path / "x.safetensors").write_bytes(data)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        for name in tensors:
            # Some versions of its Python half lack these
            if name not in ("uint16", "uint32", "uint64", "float8_e8m0fnu"):
                assert same(file.get_tensor(name), tensors[name]), name
    theirs, start = read_header(
        safetensors.torch.save({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    )
    assert start % 8 == 0
    assert {n: (s.dtype, s.shape) for n, s in theirs.items()} == {"a": ("F32", (3,)), "b": ("BF16", (2, 2))}


@pytest.mark.parametrize("view", ["t", "channels_last", "slice", "expand", "size-1", "flip of both"])
def test_strides_are_kept(tmp_path: Path, view: str) -> None:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensor = {
        "t": base.transpose(0, 2),
        "channels_last": base.to(memory_format=torch.channels_last),
        "slice": base[..., :2],
        "expand": base[:, :1].expand(2, 6, 4, 5),
        "size-1": base.as_strided((1, 3), (7, 1)),
        "flip of both": base.permute(3, 2, 1, 0),
    }[view]
    assert same(tensor, load_weights(open_package(store(tmp_path / "x.pt2", {"w": tensor})))["w"])


def test_negated_and_conjugated_views_are_stored_as_what_they_mean(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    odd = torch.tensor([2, 0], dtype=torch.uint8).view(torch.bool)
    loaded = load_weights(open_package(store(tmp_path / "x.pt2", {"conj": z.conj(), "neg": z.conj().imag, "odd": odd})))
    assert loaded["conj"].tolist() == [1 - 2j, 3 + 4j] and loaded["neg"].tolist() == [-2, 4]
    assert loaded["odd"].view(torch.uint8).tolist() == [1, 0]


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    wrong = {
        "four bits": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "sparse": torch.eye(3).to_sparse(),
        "nothing behind it": torch.empty(3, device="meta"),
        "windows": torch.arange(9.0).unfold(0, 3, 1),
        "spread": torch.empty_strided((2, 2), (1 << 22, 1)),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ExportError, match=f"weight '{name}'"):
            store(path, {"ok": torch.ones(1), name: tensor})
    assert list(tmp_path.iterdir()) == []


def test_without_weights_only_what_they_look_like_is_stored(tmp_path: Path) -> None:
    archive = open_package(store(tmp_path / "x.pt2", {"w": torch.empty(5, 7, device="meta").t()}, has_weights=False))
    assert load_weights(archive) == {}
    assert (archive.manifest.weights["w"].shape, archive.manifest.weights["w"].stride) == ((7, 5), (1, 7))


def test_examples(tmp_path: Path) -> None:
    examples = {"net.0.x": torch.randn(3, 4).t(), "net.0.mask": torch.tensor([True, False])}
    archive = open_package(store(tmp_path / "x.pt2", {}, examples))
    loaded = load_examples(archive)
    assert loaded.keys() == examples.keys() and all(
        torch.equal(t, examples[n]) and t.is_contiguous() for n, t in loaded.items()
    )
    assert load_examples(open_package(store(tmp_path / "y.pt2", {}))) == {}
    members = taken_apart(tmp_path / "x.pt2")
    put_together(tmp_path / "x.pt2", {**members, EXAMPLES: members[EXAMPLES][:-1] + b"\x01"}, relist=False)
    with pytest.raises(PackageError, match=r"member extra/aot_backward/examples.safetensors: SHA-256"):
        load_examples(open_package(tmp_path / "x.pt2"))


def test_training_in_place_stays_in_memory(tmp_path: Path) -> None:
    path = store(tmp_path / "x.pt2", {"w": torch.ones(64, 64), "b": torch.ones(3)})
    before = path.read_bytes()
    first = load_weights(open_package(path), mapped=True)
    second = load_weights(open_package(path), mapped=True)
    for tensor in first.values():
        tensor.mul_(7)
        # Separate storage, so that torch.save writes no neighbours
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
    parameter = torch.nn.Parameter(first["w"])
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=1).step()
    assert first["w"].unique().tolist() == [6] and second["w"].unique().tolist() == [1]
    assert path.read_bytes() == before


def own_memory() -> int:
    """Return the bytes of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def test_a_map_copies_nothing_and_everything_is_aligned(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(1 << 20) for i in range(32)} | {f"odd{i}": torch.randn(i) for i in range(40)}
    archive = open_package(store(tmp_path / "x.pt2", tensors))
    load_weights(archive, mapped=True)
    gc.collect()
    process = psutil.Process()
    before = own_memory()
    loaded = load_weights(archive, mapped=True)
    assert own_memory() - before < 8 << 20  # of 128 MiB
    for tensor in loaded.values():
        tensor.add_(1)
    assert own_memory() - before > 128 << 20  # the measure is sensitive
    assert all(t.data_ptr() % 64 == 0 for t in loaded.values() if t.numel())
    mapped = [m.path for m in process.memory_maps(grouped=False)]
    assert str(tmp_path / "x.pt2") in mapped
    del archive, loaded, tensor
    gc.collect()
    assert str(tmp_path / "x.pt2") not in [m.path for m in process.memory_maps(grouped=False)]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("weights/w/dtype", "int32", r"weight 'w' is F32 of shape \[2, 3\]; the manifest says int32"),
        ("weights/w/dtype", "quint8", r"weight 'w': not a tensor: quint8"),
        (
            "weights/w/shape",
            [3, 2],
            r"weight 'w' is F32 of shape \[2, 3\]; the manifest says float32 of shape \[3, 2\]",
        ),
        ("weights/w/stride", [1], r"weight 'w': not a tensor: float32 \(2, 3\) with strides \(1,\)"),
        ("weights/w/stride", [1, 1], "weight 'w': .* elements overlap"),
        ("weights/w/stride", [-3, 1], "weight 'w': .* a stride is out of range"),
        ("weights/w/stride", [1 << 61, 1], "weight 'w': .* a stride is out of range"),
        ("weights/w/stride", [1 << 40, 1], f"weight 'w': .* 6 elements spread over {(1 << 40) + 3}"),
        ("weights/w/sha256", "00" * 32, "weight 'w': SHA-256 is .*, expected 0000"),
        ("weights/v", {"dtype": "float32", "shape": [], "stride": [], "sha256": ""}, "weight 'v' is not in extra/"),
        ("weights", {}, "weight 'w' is not in the manifest"),
    ],
)
def test_row_29_the_tensor_that_does_not_fit_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = store(tmp_path / "x.pt2", {"w": torch.ones(2, 3)})
    put_together(path, taken_apart(path), {field: value})
    with pytest.raises(PackageError, match=f"corrupt package {path}: {message}"):
        load_weights(open_package(path))


def header(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are not a safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", f"a header of {1 << 62} bytes in a file of 10"),
        (b"\0" * 8, "header is not JSON"),
        (b"[]", "its header is a list"),
        (b'{"w": 1, "w": 2}', "the key 'w' occurs twice"),
        (header(w={**F32, "dtype": "PICKLE"}), "tensor 'w': dtype 'PICKLE' is unknown"),
        (header(w={**F32, "shape": [2, 2]}), r"tensor 'w': F32 of shape \[2, 2\] takes 16 bytes, not 24"),
        (header(w={**F32, "shape": [-2, -3]}), "tensor 'w': .* is not a dtype, a shape and two offsets"),
        (header(w={**F32, "shape": [2.0, 3]}), "tensor 'w': .* is not a dtype, a shape and two offsets"),
        (header(w={**F32, "shape": [True, 6]}), "tensor 'w': .* is not a dtype, a shape and two offsets"),
        (header(w={**F32, "more": 1}), "tensor 'w': .* is not a dtype, a shape and two offsets"),
        (header(w="F32"), "tensor 'w': F32 is not a dtype, a shape and two offsets"),
        (header(w={**F32, "data_offsets": [4, 28]}), "tensor 'w' begins at byte 4, expected 0"),
        (header(w=F32, v=F32), "tensor '[vw]' begins at byte 0, expected 24"),
        (header(w={**F32, "data_offsets": [24, 0]}), "tensor 'w'"),
        (header(w={**F32, "shape": [1 << 31, 1 << 31]}), "tensor 'w': its shape is too large"),
        (
            header(w={**F32, "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}),
            "tensor 'w': its shape is too large",
        ),
        (header(v={"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}), "tensors take 12 bytes, but there are 24"),
    ],
)
def test_row_29_headers_that_lie(tmp_path: Path, content: bytes, message: str) -> None:
    path = store(tmp_path / "x.pt2", {"w": torch.ones(2, 3)})
    data = (
        content if len(content) < 12 and content[:1] != b"[" else struct.pack("<Q", len(content)) + content + bytes(24)
    )
    put_together(path, {**taken_apart(path), WEIGHTS: data})
    with pytest.raises(
        PackageError, match=f"corrupt package {path}: member extra/aot_backward/weights.safetensors: .*{message}"
    ):
        load_weights(open_package(path))


def test_row_29_a_boolean_is_0_or_1(tmp_path: Path) -> None:
    path = store(tmp_path / "x.pt2", {"mask": torch.tensor([True, False, True])})
    members = taken_apart(path)
    assert members[WEIGHTS][-3:] == b"\1\0\1"
    data = members[WEIGHTS][:-1] + b"\2"
    put_together(path, {**members, WEIGHTS: data}, {"weights/mask/sha256": hashlib.sha256(data[-3:]).hexdigest()})
    with pytest.raises(PackageError, match="weight 'mask': a boolean that is neither 0 nor 1"):
        load_weights(open_package(path))


def test_layouts_that_overlap_or_spread() -> None:
    assert (
        not layout_problem((), ()) and not layout_problem((0, 5), (9, 1 << 40)) and not layout_problem((2, 3), (0, 1))
    )
    assert layout_problem((3, 3), (1, 1)) == layout_problem((2, 4, 3), (3, 3, 1)) == "elements overlap"


def test_large_weights_are_hashed_once_per_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "HASHED_ALWAYS", 1000)
    path = store(tmp_path / "x.pt2", {"w": torch.ones(1000), "b": torch.zeros(2)})
    hashed: list[str] = []
    check = Archive.check_digest

    def count(self: Archive, what: str, found: str, expected: str) -> None:
        hashed.append(what)
        check(self, what, found, expected)

    monkeypatch.setattr(Archive, "check_digest", count)

    def load() -> int:
        hashed.clear()
        load_weights(open_package(path))
        return len(hashed)

    assert load() == load() == 2  # so new a file could be written again within the same tick of its time stamp
    monkeypatch.setattr("time.time_ns", lambda real=time.time_ns: real() + 10_000_000_000)
    assert (load(), load()) == (2, 0)
    with path.open("r+b") as file:  # in place, with the same size and modification time
        status = path.stat()
        file.seek(path.read_bytes().index(struct.pack("<4f", 1, 1, 1, 1)))
        file.write(b"\1")
        file.flush()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(PackageError, match="weight 'w': SHA-256"):
        load()
    store(path, {"w": torch.ones(1000), "b": torch.zeros(2)})
    assert (load(), load()) == (2, 0)
    assert len(list((cache / "verified").iterdir())) <= 2
    put_together(path, taken_apart(path), {"weights/b/sha256": "00" * 32})
    with pytest.raises(PackageError, match="weight 'b': SHA-256"):
        load()


def test_the_manifest_is_part_of_what_is_remembered(tmp_path: Path) -> None:
    """Otherwise a record for one content would vouch for another with the same inode, size and times."""
    path = store(tmp_path / "x.pt2", {"w": torch.ones(3)})
    archive = open_package(path)
    assert archive.manifest_digest == hashlib.sha256(taken_apart(path)[MANIFEST]).hexdigest()
    assert archive.identity.split()[:3] == [str(path.stat().st_dev), str(path.stat().st_ino), str(path.stat().st_size)]

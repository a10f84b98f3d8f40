"""The file of a saved training state. It returns what was saved, and damage is always noticed. Packages have the same
atomic writer: test_package_faults.py kills it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from aot_backward_runtime import StateError
from aot_backward_runtime.format import atomic_file
from aot_backward_runtime.training import checkpoint
from aot_backward_runtime.training.checkpoint import FORMAT, read_state, write_state

from .test_weights import every_dtype, same

ABOUT = {"steps": 3, "lr": [1e-3, 0.1 + 0.2], "name": 'é " \\ 𝄞', "nested": {"none": None, "yes": True}, "": []}


def small() -> dict[str, torch.Tensor]:
    tensors = {
        "w": torch.arange(12.0).reshape(3, 4),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }
    return tensors | {"z": torch.tensor([1 + 2j], dtype=torch.complex128), "none": torch.empty(0, 5)}


def temporaries(folder: Path) -> list[str]:
    return [p.name for p in folder.iterdir() if p.name.endswith(".tmp")]


def test_every_dtype_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in every_dtype().items():
        for view in (tensor, tensor[:24].reshape(2, 3, 4), tensor[3], tensor[:0], tensor[:0].reshape(0, 3)):
            tensors[f"{name} {list(view.shape)}"] = view
    write_state(tmp_path / "state", tensors, ABOUT)
    loaded, about = read_state(tmp_path / "state")
    assert about == ABOUT and loaded.keys() == tensors.keys() and len(loaded) == 100
    for name, tensor in tensors.items():
        assert same(tensor, loaded[name]), name
        assert (
            loaded[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            and loaded[name]._base is None
        )
    write_state(tmp_path / "state", {}, {})
    assert read_state(tmp_path / "state") == ({}, {})


def test_views_are_saved_as_what_they_mean(tmp_path: Path) -> None:
    base, z = torch.arange(24.0).reshape(2, 3, 4), torch.tensor([1 + 2j, 3 - 4j])
    views = {
        "t": base.transpose(0, 2),
        "slice": base[..., 1:3],
        "expand": base[:, :1].expand(2, 5, 4),
        "conj": z.conj(),
        "neg": z.conj().imag,
    }
    views["odd"] = torch.tensor([2, 0], dtype=torch.uint8).view(torch.bool)
    views["parameter"] = torch.nn.Parameter(torch.ones(2))
    write_state(tmp_path / "state", views, {})
    loaded, _ = read_state(tmp_path / "state")
    assert all(torch.equal(loaded[n], view) and loaded[n].is_contiguous() for n, view in views.items())
    assert loaded["odd"].view(torch.uint8).tolist() == [1, 0] and type(loaded["parameter"]) is torch.Tensor


def test_safetensors_reads_it(tmp_path: Path) -> None:
    # Some versions lack these
    tensors = {n: t for n, t in every_dtype().items() if n not in ("uint16", "uint32", "uint64", "float8_e8m0fnu")}
    write_state(tmp_path / "state.safetensors", tensors, ABOUT)
    theirs = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert torch.view_as_complex(theirs.pop("complex128").reshape(-1, 2)).equal(tensors.pop("complex128"))
    assert theirs.keys() == tensors.keys() and all(same(theirs[n], tensors[n]) for n in tensors)
    with safetensors.safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert json.loads(file.metadata()["about"]) == ABOUT and file.metadata()["format"] == FORMAT


def test_what_was_read_is_memory_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, small(), {})
    before = path.read_bytes()
    with torch.device("meta"):
        loaded, _ = read_state(path)
    for tensor in loaded.values():
        tensor.zero_()
    assert path.read_bytes() == before
    path.write_bytes(b"")  # truncate in place: mapped data would be lost
    assert all(not tensor.any() for tensor in loaded.values())


def test_a_thread_that_trains_on_does_not_spoil_the_file(tmp_path: Path) -> None:
    weight, done = torch.zeros(1 << 20), threading.Event()

    def train() -> None:
        while not done.is_set():
            weight.add_(1)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(10):
            write_state(tmp_path / "state", {"w": weight}, {})
            read_state(tmp_path / "state")
    finally:
        done.set()
        thread.join()


def test_what_cannot_be_saved_is_refused_before_the_old_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, small(), ABOUT)
    before = path.read_bytes()
    deep: dict[str, Any] = {}
    for _ in range(64):
        deep = {"deeper": deep}
    circle: list[Any] = []
    circle.append(circle)
    for tensor, message in (
        (torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "has dtype torch.float4_e2m1fn_x2"),
        (torch.eye(3).to_sparse(), "of layout torch.sparse_coo"),
        (torch.empty(3, device="meta"), "on meta"),
    ):
        with pytest.raises(StateError, match=f"cannot save training state {path}: tensor 'x' .*{message}"):
            write_state(path, {"x": tensor}, {})
    with pytest.raises(StateError, match="tensor '__metadata__' has a name that"):
        write_state(path, {"__metadata__": torch.ones(1)}, {})
    with pytest.raises(StateError, match="surrogates not allowed"):
        write_state(path, {"\ud800": torch.ones(1)}, {})
    for about, message in (
        ({"x": torch.ones(1)}, "not JSON serializable"),
        ({"x": circle}, "Circular"),
        (deep, "nested more than 64 deep"),
        ({1: 2, "1": 3}, "the key '1' occurs twice"),
        ({"x": 10**5000}, "4300 digits"),
    ):
        with pytest.raises(StateError, match=f"cannot save training state {path}: .*{message}"):
            write_state(path, {}, about)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    write_state(path, {}, deep["deeper"])
    assert read_state(path) == ({}, deep["deeper"])


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(StateError) as caught:
        read_state(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_no_part_of_a_file_passes_for_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(path, small(), ABOUT)
    data = path.read_bytes()
    for size in range(len(data)):
        assert "cut short" in refused(path, data[:size]), size
    for more in (b"\0", b" ", bytes(64), data):
        assert "it has bytes left over" in refused(path, data + more)
    for left_out in range(0, len(data), 7):
        refused(path, data[:left_out] + data[left_out + 1 :])
        refused(path, data[:left_out] + bytes(64) + data[left_out + 64 :])


def test_every_flipped_bit_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes names, shapes, the metadata and the digest itself."""
    monkeypatch.setattr(checkpoint, "_CHUNK", 16)  # so that a tensor has several chunks
    path = tmp_path / "state"
    write_state(path, small(), ABOUT)
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        for bit in range(8):
            data[place] ^= 1 << bit
            refused(path, bytes(data))
            data[place] ^= 1 << bit
    path.write_bytes(data)
    assert read_state(path)[1] == ABOUT


def forged(metadata: Any, *, tensors: dict[str, Any] | None = None, data: bytes = b"", sign: bool = True) -> bytes:
    """Return a file with a correct digest."""
    header = {"__metadata__": metadata, **(tensors or {})}
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    return whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1) if sign else whole


SOUND = {"format": FORMAT, "version": "1", "sha256": "0" * 64, "complex128": "[]", "about": "{}"}
F64 = {"x": {"dtype": "F64", "shape": [1, 2], "data_offsets": [0, 16]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a safetensors file, or is damaged or cut short: 0 bytes"),
        (b"PK\3\4" + bytes(100), "is not a safetensors file"),
        (safetensors.torch.save({"w": torch.ones(3)}), "is not a training state: was it written by step.save"),
        (
            safetensors.torch.save({"w": torch.ones(3)}, {"format": "pt"}),
            "is not a training state: was it written by step.save",
        ),
        (forged({**SOUND, "version": "2"}), "version '2'; this runtime reads '1'"),
        (forged({**SOUND, "version": None}), "__metadata__ is not an object of strings"),
        (forged([1]), "__metadata__ is not an object of strings"),
        (forged({**SOUND, "sha256": "f" * 64}), "SHA-256 is .*, expected 'ffff"),
        (forged({**SOUND, "sha256": "é\ud800"}), "expected 'é"),
        (forged({k: v for k, v in SOUND.items() if k != "sha256"}), "SHA-256 is .*, expected ''"),
        (forged({k: v for k, v in SOUND.items() if k != "about"}), "about is not JSON"),
        (forged({**SOUND, "about": "[]"}), "about is a list, not an object"),
        (forged({**SOUND, "about": "{"}), "about is not JSON"),
        (forged({**SOUND, "about": '{"a": {"b": 1, "b": 2}}'}), "about is not JSON: the key 'b' occurs twice"),
        (forged({**SOUND, "about": '{"a":' + "[" * 64 + "]" * 64 + "}"}), "about is nested more than 64 deep"),
        (forged({**SOUND, "about": '{"a":' + "[" * 99999 + "]" * 99999 + "}"}), "about is not JSON: maximum recursion"),
        (forged({**SOUND, "about": '{"a":' + "9" * 9999 + "}"}), "about is not JSON: Exceeds the limit"),
        (forged({**SOUND, "complex128": '{"x": 1}'}, tensors=F64, data=bytes(16)), "complex128 is not a list of names"),
        (
            forged({**SOUND, "complex128": '["y"]'}, tensors=F64, data=bytes(16)),
            "'y' is not stored in the form of complex128",
        ),
        (
            forged({**SOUND, "complex128": '["x"]'}, tensors={"x": {**F64["x"], "shape": [2, 1]}}, data=bytes(16)),
            "'x' is not stored in the form",
        ),
        (
            forged(SOUND, tensors={"x": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, data=b"\1\2"),
            "a boolean that is neither 0 nor 1",
        ),
        (forged(SOUND, tensors=F64, data=bytes(8)), "it was cut short: it has .* bytes, but its header says"),
        (
            forged(SOUND, tensors={"x": {**F64["x"], "dtype": "PICKLE"}}, data=bytes(16)),
            "tensor 'x': dtype 'PICKLE' is unknown",
        ),
        (forged(SOUND, tensors={"x": {**F64["x"], "shape": [1 << 40, 1 << 40]}}), "tensor 'x': its shape is too large"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "state"
    refused(path, data)
    with pytest.raises(StateError, match=message):
        read_state(path)


def test_what_forged_signs_is_read(tmp_path: Path) -> None:
    """So the files of the test above fail by their contents."""
    (tmp_path / "state").write_bytes(
        forged({**SOUND, "complex128": '["x"]', "about": '{"a": NaN}'}, tensors=F64, data=struct.pack("<2d", 1, 2))
    )
    tensors, about = read_state(tmp_path / "state")
    assert tensors["x"].tolist() == [1 + 2j] and about["a"] != about["a"]


def test_a_living_writers_file_stays(tmp_path: Path) -> None:
    path, chosen = tmp_path / "state", tmp_path / ".state.0123abcd.tmp"
    others = [
        tmp_path / name
        for name in (".state.xyz.tmp", ".state.0123abcd.tmp2", ".other.0123abcd.tmp", "state.0123abcd.tmp")
    ]
    for file in (chosen, *others):
        file.touch()
    with atomic_file.replacing(path) as file:
        file.write(b"first")
        assert not chosen.exists()  # no process holds it
        (held,) = {*temporaries(tmp_path)} - {o.name for o in others}
        write_state(path, {}, {})
        assert (tmp_path / held).exists()
    assert path.read_bytes() == b"first" and all(o.exists() for o in others)
    with pytest.raises(ZeroDivisionError), atomic_file.replacing(path):
        1 / 0  # noqa: B018
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


def test_a_temporary_file_may_go_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer removes it at exactly that moment."""
    taken, lock = [], fcntl.flock

    def late(fd: int, how: int) -> None:
        if len(taken) < 3:
            taken.append(Path(f"/proc/self/fd/{fd}").readlink())
            taken[-1].unlink()
        lock(fd, how)

    monkeypatch.setattr(atomic_file.fcntl, "flock", late)
    write_state(tmp_path / "state", small(), ABOUT)
    assert len(set(taken)) == 3 and read_state(tmp_path / "state")[1] == ABOUT and temporaries(tmp_path) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(atomic_file.fcntl, "flock", unsupported)
    (tmp_path / ".state.0123abcd.tmp").touch()
    write_state(tmp_path / "state", small(), ABOUT)
    assert read_state(tmp_path / "state")[1] == ABOUT
    assert temporaries(tmp_path) == [".state.0123abcd.tmp"]  # its writer may be alive


def test_paths_that_cannot_be_saved_to_or_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    before = sorted(tmp_path.iterdir())
    for path, writing, reading in (
        (tmp_path, "it is a folder", "Is a directory"),
        (tmp_path / "none" / "state", "No such file or directory", "No such file or directory"),
        (tmp_path / "pipe", "it is not a plain file", "it is not a plain file"),
        (tmp_path / ("x" * 300), "File name too long", "File name too long"),
        (tmp_path / "circle", "Symlink loop|Too many levels|is not a plain", "Symlink loop|Too many levels"),
        (tmp_path / "\0", "null", "null"),
    ):
        with pytest.raises(StateError, match=f"cannot save training state .*({writing}).*; nothing was changed"):
            write_state(path, {}, {})
        with pytest.raises(StateError, match=f"cannot read training state .*({reading})"):
            read_state(path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest").symlink_to("runs/1")
    for _ in range(2):  # first the target is missing, then it is a file
        write_state(tmp_path / "latest", small(), ABOUT)
        assert (tmp_path / "latest").is_symlink()
        assert read_state(tmp_path / "runs/1")[1] == read_state(tmp_path / "latest")[1] == ABOUT
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["1", "latest", "runs"]

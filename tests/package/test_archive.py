"""Packages that the reader accepts or refuses (docs/reliability.md, rows 20 to 26), each refusal by its message."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export.pt2_archive._package import PT2ArchiveReader

from aot_backward.packaging.package_writer import write_package
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.zip_directory import read_directory
from aot_backward_runtime.native.weights import load_examples, load_weights
from aot_backward_runtime.package.archive import Archive, open_package

from ..support.packages import (
    EXAMPLES,
    GRAPH,
    LIBRARY,
    MANIFEST,
    METADATA,
    WEIGHTS,
    Raw,
    put_together,
    python,
    taken_apart,
    tiny_artifact,
    tiny_manifest,
    tiny_weights,
    write_raw,
    write_tiny,
)

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.pt2")
    return tmp_path / "tiny.pt2"


def read_everything(path: Path) -> Archive:
    archive = open_package(path)
    archive.verify_digests()
    load_weights(archive)
    load_examples(archive)
    return archive


def refused(path: Path, message: str) -> None:
    with pytest.raises(PackageError, match=message) as caught:
        read_everything(path)
    assert str(path) in str(caught.value)


def without_code(path: Path) -> None:
    """Write a package of 3 KB under the usual rules, small enough to test every byte."""
    write_package(path, tiny_manifest(libraries={}), {}, tiny_weights(), {"x": torch.ones(2)})


def test_what_is_written_is_read(package: Path) -> None:
    manifest = write_tiny(package)
    archive = open_package(package)
    assert archive.manifest == manifest and archive.top == "package"
    archive.verify_digests()
    assert archive.read_member("archive_format") == b"pt2"
    assert archive.library(GRAPH).read_bytes() == tiny_artifact().library.read_bytes()
    assert (
        archive.library(GRAPH).with_name(f"{GRAPH}_metadata.json").read_bytes() == tiny_artifact().metadata.read_bytes()
    )


def test_equal_content_is_equal_bytes(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a.pt2")
    write_tiny(tmp_path / "another name.pt2")
    assert (tmp_path / "a.pt2").read_bytes() == (tmp_path / "another name.pt2").read_bytes()


def test_zipfile_and_pytorch_read_it_too(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        names = [name.removeprefix("package/") for name in archive.namelist()]
        # Otherwise equal contents would differ by the time
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert PT2ArchiveReader(str(package)).get_file_names() == names
    assert PT2ArchiveReader(str(package)).archive_version() == 0


def test_data_lies_at_multiples_of_64(package: Path) -> None:
    fd = os.open(package, os.O_RDONLY)
    places = read_directory(fd, package.stat().st_size, package)
    os.close(fd)
    assert len(places) == 9 and all(place.offset % 64 == 0 for place in places.values())


def test_paths_that_are_no_package_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "none.pt2", "cannot open package .*No such file")
    refused(tmp_path, "cannot open package .*a folder")
    os.mkfifo(tmp_path / "pipe.pt2")
    refused(tmp_path / "pipe.pt2", "cannot open package .*not a plain file")  # it does not wait for a writer
    with pytest.raises(PackageError, match="embedded null byte"):
        open_package("a\0b")
    for content in (b"", b"PK", b"not a package, but longer than an end record", bytes(1000)):
        (tmp_path / "x.pt2").write_bytes(content)
        refused(tmp_path / "x.pt2", "corrupt package .*not a zip archive")


def test_row_20_a_truncated_archive_names_the_member_where_it_ends(package: Path) -> None:
    data = package.read_bytes()
    fd = os.open(package, os.O_RDONLY)
    places = read_directory(fd, len(data), package)
    os.close(fd)
    for name, place in places.items():
        for at in (place.offset, place.offset + place.size):
            for size in (at - 1, at, at + 1):
                package.write_bytes(data[:size])
                whole = size >= place.offset + place.size
                refused(
                    package, rf"corrupt package .*cut short (or overwritten after|in) member {'' if whole else name}"
                )
    for size in (*range(len(data) - 700, len(data), 3), len(data) - 1):
        package.write_bytes(data[:size])
        refused(package, "corrupt package")


def test_row_21_every_bit_of_a_small_package(tmp_path: Path) -> None:
    """The reader refuses each flip, or the flip changes nothing that it returns."""
    path = tmp_path / "small.pt2"
    without_code(path)
    sound = read_everything(path)
    weights, data = load_weights(sound), path.read_bytes()
    assert len(data) < 4000
    inert = 0
    for bit in random.Random(21).sample(range(8 * len(data)), 4000):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            archive = read_everything(path)
        except PackageError as error:
            assert str(path) in str(error)
        else:
            inert += 1
            assert archive.manifest == sound.manifest
            assert all(torch.equal(load_weights(archive)[k], w) for k, w in weights.items())
    assert inert < 1000  # padding, versions and modes in the headers; all other flips are refused


def test_row_22_members_that_should_not_be_there_or_are_not(package: Path) -> None:
    members = taken_apart(package)
    raw = [Raw(name, data) for name, data in members.items()]
    write_raw(package, raw)
    read_everything(package)  # each test below changes one thing of this

    write_raw(package, [*raw, Raw("package/extra/more", b"?")])
    refused(package, "corrupt package .*member extra/more is not in the manifest")
    for name in members.keys() - {MANIFEST}:
        write_raw(package, [m for m in raw if m.name != name])
        refused(package, f"member {name.removeprefix('package/')} is missing")
    write_raw(package, [m for m in raw if m.name != MANIFEST])
    refused(package, "member extra/aot_backward/manifest.json is missing")
    for extra in (raw[3], Raw(WEIGHTS, b"other")):
        write_raw(package, [*raw, extra])
        refused(package, f"member {extra.name!s}: the archive also holds {extra.name!s}")
    write_raw(package, [*raw, Raw("other/x", b"")])
    refused(package, r"2 top folders \(other, package\)")
    write_raw(package, [Raw(m.name, m.data + b"!" if m.name == WEIGHTS else m.data) for m in raw])
    refused(package, "member extra/aot_backward/weights.safetensors has .* bytes, expected")


def test_row_22_bytes_that_belong_to_nothing(package: Path) -> None:
    raw = [Raw(name, data) for name, data in taken_apart(package).items()]
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0, 0, 0, 0, 0)
    for after, message in (
        (b"\0", "no end record|cut short"),
        (b"x" * 100, "cut short or overwritten"),
        (end, "belong to no member"),
    ):
        write_raw(package, raw, after=after)
        refused(package, message)
    write_raw(package, raw, before_directory=b"hidden")
    refused(package, "6 bytes between the last member and the central directory")
    write_raw(package, [raw[0], Raw(raw[1].name, raw[1].data, gap=b"hidden"), *raw[2:]])
    refused(package, f"member {raw[1].name!s} begins at byte .*, expected")
    write_raw(package, [Raw(raw[0].name, raw[0].data, gap=b"#!/bin/sh\n"), *raw[1:]])
    refused(package, f"member {raw[0].name!s} begins at byte 10, expected 0")
    write_raw(package, raw, after=b"comment", end={"comment": 7})
    refused(package, "cut short or overwritten")
    write_raw(package, raw, end={"comment": 7})
    refused(package, "comment of 7 bytes")
    write_raw(package, raw, end={"here": 1})
    refused(package, "one part of a split archive")
    write_raw(package, raw, end={"here": len(raw) - 1, "count": len(raw) - 1})
    refused(package, "bytes in the central directory after its last member")
    write_raw(package, raw, end={"here": len(raw) + 1, "count": len(raw) + 1})
    refused(package, f"the central directory ends after {len(raw)} of {len(raw) + 1} members")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package/../../evil", "'.' or '..' component"),
        ("/etc/evil", "an absolute name"),
        ("package//evil", "an absolute name, or an empty"),
        ("package/./evil", "'.' or '..' component"),
        ("package/evil/", "or an empty"),
        ("package\\evil", "printable ASCII only"),
        ("package/C:evil", "printable ASCII only"),
        (b"package/evil\0.txt", "printable ASCII only"),
        (b"package/ev\xc3\xaf", "printable ASCII only"),
        ("package/ev\nil", "printable ASCII only"),
        ("package/BYTEORDER", "the archive also holds package/byteorder"),
        ("", "printable ASCII only"),
    ],
)
def test_row_23_names_that_could_lead_elsewhere(package: Path, name: str | bytes, message: str) -> None:
    before = set(package.parent.rglob("*"))
    write_raw(package, [*(Raw(n, data) for n, data in taken_apart(package).items()), Raw(name, b"evil")])
    refused(package, f"corrupt package .*{message}")
    assert set(package.parent.rglob("*")) == before


def test_row_23_links_and_folders(package: Path) -> None:
    members = taken_apart(package)
    for mode, message in (
        (0o120777 << 16, "mode 0o120777"),
        (0o040755 << 16, "mode 0o40755"),
        (0o020644 << 16, "mode 0o20644"),
        (0x10, "mode 0o0"),
    ):
        write_raw(
            package, [Raw(n, data, both={"mode": mode} if n == METADATA else None) for n, data in members.items()]
        )
        refused(package, f"member {METADATA}: {message} is not that of a plain file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"both": {"method": 8}}, r"compressed \(method 8"),
        ({"both": {"size": 1 << 31}}, r"compressed \(method 0, .* bytes for 2147483648\)"),
        ({"both": {"size": 1 << 31, "stored": 1 << 31}}, "2147483648 bytes at .*, but members end at byte"),
        (
            {
                "both": {
                    "size": 0xFFFFFFFF,
                    "stored": 0xFFFFFFFF,
                    "extra": struct.pack("<HHQQ", 1, 16, 1 << 60, 1 << 60),
                }
            },
            f"{1 << 60} bytes at",
        ),
        ({"both": {"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF}}, "2 sizes of 64 bits in a zip64 field of 0 bytes"),
        ({"both": {"extra": struct.pack("<HHQ", 1, 8, 5)}}, "0 sizes of 64 bits in a zip64 field of 8 bytes"),
        (
            {"central": {"offset": 0}},
            "no header of that name at byte 0|its local header and the central directory disagree",
        ),
        ({"central": {"offset": 0xFFFFFFF0}}, "its header lies at byte 4294967280"),
        ({"local": {"name": b"package/x"}}, "no header of that name|expected"),
        ({"local": {"crc": 1}}, "its local header and the central directory disagree"),
        ({"local": {"method": 8}}, "its local header and the central directory disagree"),
        ({"local": {"size": 1, "stored": 1}}, "its local header and the central directory disagree"),
        ({"local": {"flags": 8}}, "its local header and the central directory disagree"),
        ({"both": {"flags": 8}}, "flags 0x8"),
        ({"both": {"flags": 1}}, "flags 0x1"),
        ({"central": {"comment": b"c"}}, "a comment"),
        ({"both": {"extra": struct.pack("<HHI", 0x7075, 4, 0)}}, "extra field 0x7075"),
        ({"local": {"extra": b"abc"}}, "extra field"),
    ],
)
def test_row_24_headers_that_lie(package: Path, change: dict[str, Any], message: str) -> None:
    write_raw(package, [Raw(n, data, **(change if n == WEIGHTS else {})) for n, data in taken_apart(package).items()])
    refused(package, f"corrupt package .*member {WEIGHTS}.*({message})|corrupt package .*member {WEIGHTS} begins")


def test_row_24_nothing_is_allocated_by_a_size_that_the_file_states(tmp_path: Path) -> None:
    """256 MiB of address space beyond torch's use suffice to refuse a file that states 2**60 bytes everywhere."""
    path = tmp_path / "bomb.pt2"
    huge = struct.pack("<HHQQ", 1, 16, 1 << 60, 1 << 60)
    sizes = {"size": 0xFFFFFFFF, "stored": 0xFFFFFFFF, "extra": huge}
    write_raw(path, [Raw(MANIFEST, b"{}", both=sizes)])
    refused(path, f"member {MANIFEST}: {1 << 60} bytes at")
    # The file is sparse, so the stated sizes are true: a manifest of 1 GiB, a header of weights of 1 GiB.
    write_raw(path, [Raw(MANIFEST, b"")])
    tail = path.read_bytes()[30 + len(MANIFEST) :]
    with path.open("r+b") as file:
        size = 1 << 30
        file.seek(18)
        file.write(struct.pack("<II", size, size))
        file.seek(30 + len(MANIFEST) + size)
        file.write(
            tail[:20] + struct.pack("<II", size, size) + tail[28:-6] + struct.pack("<IH", 30 + len(MANIFEST) + size, 0)
        )
    code = """
import resource, sys
from aot_backward_runtime.package.archive import open_package
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
try: open_package(sys.argv[1])
except Exception as error: print(type(error).__name__, error)
"""
    assert (
        f"PackageError corrupt package {path}: member extra/aot_backward/manifest.json has {1 << 30} bytes"
        in python(code, path).stdout
    )


def test_row_25_what_the_manifest_does_not_list_is_never_read(package: Path, tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path}/canary",)

    members = taken_apart(package)
    flags = json.dumps({"compiler": f"touch {tmp_path}/canary; true", "compile_only": False}).encode()
    strays = {
        "package/data/weights/weight_0": pickle.dumps(Canary()),
        f"package/data/aotinductor/{GRAPH}/{GRAPH}.cpp": b"int x;",
        f"package/data/aotinductor/{GRAPH}/{GRAPH}_compile_flags.json": flags,
        f"package/data/aotinductor/{GRAPH}/other.so": b"\x7fELF",
    }
    for name, data in strays.items():
        write_raw(package, [Raw(n, d) for n, d in {**members, name: data}.items()])
        refused(package, f"member {name.removeprefix('package/')} is not in the manifest")
    # If the manifest lists them, they are ordinary members that nothing reads.
    put_together(package, {**members, **strays})
    archive = read_everything(package)
    folder = archive.library(GRAPH).parent
    assert sorted(p.name for p in folder.iterdir()) == [f"{GRAPH}.so", f"{GRAPH}_metadata.json"]
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"", "manifest.json is not JSON"),
        (b"\xff", "manifest.json is not JSON"),
        (b"[1]", "manifest.json holds a list"),
        (b'{"format_version": [1, 0], "torch": "a", "torch": "b"}', "the key 'torch' occurs twice"),
        (b'{"a": ' * 70 + b"1" + b"}" * 70, "format_version is None"),
        (b"[" * 100_000, "manifest.json is not JSON"),
        (b'{"format_version": [1, ' + b"9" * 5000 + b"]}", "does not fit 64 bits"),
        (b'{"format_version": [1, 1e400]}', "format_version"),
        (b'{"format_version": [1, NaN]}', "NaN is not JSON"),
        (b'{"format_version": [2, 0]}', "package format 2.0; this runtime reads 1.x"),
        (b'{"format_version": [1, 0], "required_features": ["time travel"]}', "needs the feature 'time travel'"),
        (b'{"format_version": [1, 7], "required_features": []}', "the field 'producer' is missing"),
    ],
)
def test_row_26_manifests_that_are_none(tmp_path: Path, manifest: bytes, message: str) -> None:
    write_raw(tmp_path / "x.pt2", [Raw(MANIFEST, manifest)])
    refused(tmp_path / "x.pt2", message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("torch", 2, "manifest.torch: expected str, got '2'"),
        ("members/byteorder/size", -1, "member byteorder has 6 bytes, expected -1"),
        ("members/byteorder/sha256", "0" * 64, "member byteorder: SHA-256 is .*, expected 0000"),
        ("has_weights", False, "has_weights is False"),
        (f"libraries/{GRAPH}/member", "../../x.so", f"library {GRAPH}: a build refers to '../../x.so'"),
        (f"libraries/{GRAPH}/extern", f"data/aotinductor/{GRAPH}/{GRAPH}.json", f"library {GRAPH}: a build refers to .*json"),
        (f"libraries/{GRAPH}/glibc", "2.x", f"library {GRAPH}: '2.x' .* are not both versions"),
        ("libraries/..", {}, "manifest.libraries.*the field 'member' is missing"),
    ],
)  # fmt: skip
def test_row_26_fields_that_do_not_fit_are_named(package: Path, field: str, value: Any, message: str) -> None:
    put_together(package, taken_apart(package), {field: value})
    refused(package, message)


def test_row_26_a_field_of_a_later_minor_version_is_ignored(package: Path) -> None:
    put_together(package, taken_apart(package), {"format_version": [1, 99], "invented_later": {"x": [1]}})
    assert read_everything(package).manifest.format_version == (1, 99)


def test_digests_are_of_the_members_that_errors_name(package: Path) -> None:
    members = taken_apart(package)
    for name in (LIBRARY, METADATA, EXAMPLES, WEIGHTS):
        damaged = {**members, name: members[name][:-1] + bytes([members[name][-1] ^ 1])}
        put_together(package, damaged, relist=False)
        refused(package, f"member {name.removeprefix('package/')}: SHA-256 is [0-9a-f]{{64}}, expected [0-9a-f]{{64}}")


def test_sizes_beyond_4_gib(tmp_path: Path) -> None:
    """Read a zip64 archive of zipfile with a sparse member whose digest is not checked."""
    path, name = tmp_path / "large.pt2", "package/large"
    size = (4 << 30) + 5
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.file_size = size
        with archive.open(info, "w", force_zip64=True) as member:
            # Update zipfile's records as a write of that many zeros does, without the minute for their CRC.
            member._file_size = member._compress_size = size  # type: ignore[attr-defined]
            file.seek(size, os.SEEK_CUR)
        archive.writestr("package/after", b"after")
    fd = os.open(path, os.O_RDONLY)
    try:
        places = read_directory(fd, path.stat().st_size, path)
        assert [(n, p.size) for n, p in places.items()] == [(name, size), ("package/after", 5)]
        assert os.pread(fd, 5, places["package/after"].offset) == b"after"
        with path.open("r+b") as again:
            for cut in (path.stat().st_size - 1, 4 << 30):
                again.truncate(cut)
                with pytest.raises(
                    PackageError, match="cut short in member package/large" if cut == 4 << 30 else "cut short or over"
                ):
                    read_directory(fd, cut, path)
    finally:
        os.close(fd)

"""ELF headers of libraries, compared with readelf's output for sound ones, and damaged ones (docs/reliability.md, row
27)."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import pytest
import torch
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection

from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.elf import clear_executable_stack, numeric, read_elf

from ..support.packages import tiny_artifact

_GNU_STACK = 0x6474E551


def _libraries() -> list[Path]:
    """Return libraries of this process that are small enough to read twice. Several linkers and compilers made them."""
    paths = {
        Path(line.split(maxsplit=5)[-1].strip())
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line
    }
    return sorted(p for p in paths if p.exists() and p.stat().st_size < 40 << 20)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.so"
    path.write_bytes(tiny_artifact().library.read_bytes())
    return path


def test_agrees_with_pyelftools_on_every_library_of_this_process() -> None:
    families = ("GLIBC", "GLIBCXX", "CXXABI")
    libraries = _libraries()
    assert len(libraries) > 20 and any(p.name.startswith("libstdc++") for p in libraries)
    for path in libraries:
        with path.open("rb") as file:
            elf = ELFFile(file)
            dynamic = [s for s in elf.iter_segments() if isinstance(s, DynamicSegment)]
            needed = [t.needed for s in dynamic for t in s.iter_tags("DT_NEEDED")]  # type: ignore[attr-defined]
            asked = [
                aux.name
                for s in elf.iter_sections()
                if isinstance(s, GNUVerNeedSection)
                for _, auxs in s.iter_versions()
                for aux in auxs
            ]
            offered = [
                next(auxs).name
                for s in elf.iter_sections()
                if isinstance(s, GNUVerDefSection)
                for _, auxs in s.iter_versions()
            ]
            stack = [s.header.p_flags for s in elf.iter_segments() if s.header.p_type == "PT_GNU_STACK"]
        mine = read_elf(path)
        assert mine.needed == tuple(needed), path
        assert mine.executable_stack == bool(stack[0] & 1), path
        for family in families:
            for names, found in ((asked, mine.versions), (offered, mine.defines)):
                names = ["GLIBC_2.36" if n == "GLIBC_ABI_DT_RELR" else n for n in names]  # glibc 2.36 introduced it
                numbers = [n.removeprefix(f"{family}_") for n in names if n.startswith(f"{family}_")]
                numbers = [n for n in numbers if n[0].isdigit()]
                assert found.get(family) == max(numbers, key=numeric, default=None), (path, family)


def test_versions_are_compared_as_numbers() -> None:
    assert numeric("2.9") < numeric("2.34") < numeric("2.34.1")


def test_clearing_the_executable_stack_changes_one_bit(library: Path) -> None:
    data = bytearray(library.read_bytes())
    start, entry, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    stack = next(
        o for o in range(start, start + entry * count, entry) if struct.unpack_from("<I", data, o)[0] == _GNU_STACK
    )
    data[stack + 4] |= 1
    library.write_bytes(data)
    assert read_elf(library).executable_stack
    clear_executable_stack(library)
    assert not read_elf(library).executable_stack
    data[stack + 4] &= ~1
    assert library.read_bytes() == data
    struct.pack_into("<I", data, stack, 0)  # PT_NULL hides the header
    library.write_bytes(data)
    assert read_elf(library).executable_stack
    with pytest.raises(PackageError, match=r"no PT_GNU_STACK header.*noexecstack"):
        clear_executable_stack(library)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"MZ", "not an ELF file"),
        (4, b"\1", r"ELF class 1, expected 2 \(64-bit\)"),
        (5, b"\2", "ELF byte order 2, expected 1"),
        (16, b"\2\0", r"ELF type 2, expected 3 \(shared library\)"),
        (18, b"\x28\0", r"built for ELF machine 40, expected 62 \(x86-64\) or 183 \(aarch64\)"),
        (32, b"\xff" * 8, "cut short: the program headers should end"),
        (40, b"\xff" * 8, "cut short: the section headers should end"),
        (54, b"\x20\0", "program headers of 32 bytes, expected 56"),
        (56, b"\0\0", "nothing to load"),
    ],
)
def test_a_wrong_header_is_named(library: Path, offset: int, value: bytes, message: str) -> None:
    data = bytearray(library.read_bytes())
    data[offset : offset + len(value)] = value
    library.write_bytes(data)
    with pytest.raises(PackageError, match=f"{library}: {message}"):
        read_elf(library)


def test_a_library_cut_anywhere_is_refused(library: Path) -> None:
    data = library.read_bytes()
    for size in (*range(0, 200, 7), *range(200, len(data), 997), len(data) - 1):
        library.write_bytes(data[:size])
        with pytest.raises(PackageError, match=r"cut short|not an ELF file"):
            read_elf(library)


def test_damage_ends_in_an_error_or_in_nothing(library: Path) -> None:
    """1,500 damaged copies, mostly in headers and dynamic tables, raise no other type of exception and always
    terminate."""
    data, chance = library.read_bytes(), random.Random(27)
    for _ in range(1500):
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 4, 16))):
            damaged[chance.randrange(chance.choice((64, 700, 60_000, len(data))))] = chance.randrange(256)
        library.write_bytes(damaged)
        try:
            read_elf(library)
        except PackageError as error:
            assert str(library) in str(error)


def test_the_host_reads_the_libstdcxx_that_torch_loaded() -> None:
    from aot_backward_runtime import compatibility

    torch_needs = read_elf(Path(torch.__file__).parent / "lib/libtorch_cpu.so").versions["GLIBCXX"]
    assert numeric(compatibility.glibcxx()) >= numeric(torch_needs)
    assert compatibility.glibc() == ".".join(map(str, numeric(compatibility.glibc())))
    assert numeric(compatibility.glibc()) >= (2, 17)
    assert "avx2" in compatibility.cpu_flags() or sys.platform != "linux"


def test_lists_of_versions_have_an_end(tmp_path: Path) -> None:
    """A hundred lists share 60,000 items: a file of 1 MB, but 6 million steps for a reader that does not count."""
    items = b"".join(struct.pack("<IHHII", 0, 0, 0, 1, 16) for _ in range(59_999)) + struct.pack(
        "<IHHII", 0, 0, 0, 1, 0
    )
    base = 64 + 2 * 56 + 5 * 16 + 16  # headers, the dynamic section, the strings
    lists = b"".join(struct.pack("<HHIII", 1, 0xFFFF, 0, 16 * (100 - i), 16) for i in range(100))
    size = base + len(lists) + len(items)
    data = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    data += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    data += struct.pack("<IIQQQQQQ", 2, 6, 64 + 2 * 56, 64 + 2 * 56, 0, 5 * 16, 5 * 16, 8)
    for tag, value in ((5, base - 16), (10, 16), (0x6FFFFFFE, base), (0x6FFFFFFF, 100), (0, 0)):
        data += struct.pack("<qQ", tag, value)
    path = tmp_path / "long.so"
    path.write_bytes(data + b"\0GLIBC_2.2.5\0\0\0\0" + lists + items)
    with pytest.raises(PackageError, match="more than 65536 symbol versions"):
        read_elf(path)

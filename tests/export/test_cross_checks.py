"""The checks of ``make cross`` fail when they should, on a made-up kernel. Real libraries need a build of torch for
CUDA."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..tools.cross import interpreted, launches, machine_code
from ..tools.cross.jobs import Call, Library, Played, Source

PARAMETERS = ((0, 8), (8, 8), (16, 8), (24, 4), (32, 8), (40, 8))
WRAPPER = """
static inline void launchKernel(CUfunction func, uint32_t gridX) {
}

template <typename in_ptr0_type_, typename out_ptr0_type_, typename kernels_type_>
static inline void call_triton_poi_0(
    const in_ptr0_type_& in_ptr0,
    const out_ptr0_type_& out_ptr0,
    int64_t ks0,
    int64_t xnumel,
){
    /*
    float tmp0 = tl.load(in_ptr0)
    */
    uint32_t grid_0 = ((xnumel + (128 - 1)) / (128));
    if (kernels_.triton_poi_0 == nullptr) {
        kernels_.triton_poi_0 = loadKernel(__triton_poi_0_start, "triton_poi_0", 16);
    }
    CUdeviceptr var_0 = reinterpret_cast<CUdeviceptr>(in_ptr0.data_ptr());
    CUdeviceptr var_1 = reinterpret_cast<CUdeviceptr>(out_ptr0.data_ptr());
    int64_t var_2 = ks0;
    int32_t var_3 = xnumel;
    CUdeviceptr global_scratch_4 = 0;
    CUdeviceptr profile_scratch_5 = 0;
    void* kernel_args_[] = {&var_0, &var_1, &var_2, &var_3, &global_scratch_4, &profile_scratch_5};
    launchKernel(kernels_.triton_poi_0, grid_0, grid_1, grid_2, 4, 16, kernel_args_, stream_);
}
"""


NEW, OLD = (b"\x41\x08", 0x06005A04), (b"\x33\x07", 0x00500550)
"""The ELF file's system, version and flags, as ptxas 13 writes them for sm_90 and for sm_80."""


def _cubin(
    parameters: tuple[tuple[int, int], ...] = PARAMETERS,
    together: int = 48,
    threads: int = 128,
    form: tuple[bytes, int] = NEW,
) -> bytes:
    """Return an ELF file with only the sections that the checks read."""
    info = b"".join(
        struct.pack("<BBHIHHI", 4, 0x17, 12, 0, n, at, size << 18 | 0x1F000) for n, (at, size) in enumerate(parameters)
    )
    info += struct.pack("<BBHBBH3I", 3, 0x19, together, 4, 0x10, 12, threads, 1, 1)
    names = b"\0.shstrtab\0.nv.info\0.nv.info.triton_poi_0\0.nv.shared.triton_poi_0\0"
    said = 0x70000000  # SHT_LOPROC, CUDA_INFO
    contents = {
        b".shstrtab": (3, names),
        b".nv.info": (said, b""),
        b".nv.info.triton_poi_0": (said, info),
        b".nv.shared.triton_poi_0": (8, b""),
    }
    body, rows = b"", []
    for name, (kind, data) in contents.items():
        rows.append(
            struct.pack("<IIQQQQIIQQ", names.index(name + b"\0"), kind, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0)
        )
        body += data
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\2\1\1" + form[0],
        2,
        190,
        1,
        0,
        0,
        64 + len(body),
        form[1],
        64,
        0,
        0,
        64,
        len(rows),
        0,
    )
    return head + body + b"".join(rows)


def test_a_kernel_is_read_from_the_library_that_it_lies_in() -> None:
    for form, architecture in ((NEW, "sm_90"), (OLD, "sm_80")):
        (kernel,) = machine_code.kernels(b"\x7fELF the library's own code" + _cubin(form=form) + b"and what follows")
        assert kernel == machine_code.Kernel("triton_poi_0", architecture, PARAMETERS, 48, (128, 1, 1), True)


def _faults(wrapper: str = WRAPPER, cubin: bytes | None = None, shared: int = 16) -> list[str]:
    return launches.faults(wrapper, machine_code.kernels_of(cubin or _cubin()), {"triton_poi_0": shared})


def test_a_launch_that_fits_has_no_faults() -> None:
    assert _faults() == []
    newer = WRAPPER.replace("static inline void", "static __attribute__((noinline)) void").replace(
        "stream_);", "stream_, false);"
    )
    # torch 2.15
    assert _faults(newer.replace('"triton_poi_0", 16)', '"triton_poi_0", 16, &kernels_.loaded_modules_)')) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.replace("&var_1, ", ""), "is given 5 arguments, and expects 6"),
        (lambda w: w.replace("int64_t var_2", "int32_t var_2"), "is given arguments of [8, 8, 4, 4, 8, 8] bytes"),
        (lambda w: w.replace("    int64_t var_2 = ks0;\n", ""), "undeclared var_2"),
        (lambda w: w.replace("grid_2, 4, 16", "grid_2, 8, 16"), "is given 256 threads, and expects (128, 1, 1)"),
        (
            lambda w: w.replace("grid_2, 4, 16", "grid_2, 4, 8"),
            "is given 8 bytes of shared memory, 16 allowed, and expects 16",
        ),
        (
            lambda w: w.replace('"triton_poi_0", 16', '"triton_poi_0", 0'),
            "is given 16 bytes of shared memory, 0 allowed, and expects 16",
        ),
        (lambda w: w.replace('"triton_poi_0"', '"triton_poi_1"'), "triton_poi_1 is launched, and has no machine code"),
        (lambda w: w[: w.index("static inline void call_")], "triton_poi_0 is never launched"),
    ],
)
def test_host_code_that_does_not_fit(spoil: Callable[[str], str], words: str) -> None:
    assert any(words in fault for fault in _faults(spoil(WRAPPER))), _faults(spoil(WRAPPER))


@pytest.mark.parametrize(
    ("cubin", "words"),
    [
        (_cubin(PARAMETERS[:-1], 40), "is given 6 arguments, and expects 5"),
        (_cubin((*PARAMETERS[:3], (24, 8), *PARAMETERS[4:])), "and expects [8, 8, 8, 8, 8, 8]"),
        (_cubin((*PARAMETERS[:3], (28, 4), *PARAMETERS[4:])), "reads its parameters at [0, 8, 16, 28, 32, 40]"),
        (_cubin(together=56), "in 56 bytes; they lie at [0, 8, 16, 24, 32, 40] in 48"),
        (_cubin(threads=64), "is given 128 threads, and expects (64, 1, 1)"),
    ],
)
def test_machine_code_that_does_not_fit(cubin: bytes, words: str) -> None:
    assert any(words in fault for fault in _faults(cubin=cubin)), _faults(cubin=cubin)


def test_a_launch_of_another_form_is_not_passed_over() -> None:
    with pytest.raises(ValueError, match="launches call_triton_poi_0 in a way that is not known here"):
        launches.launches(WRAPPER.replace("kernel_args_, stream_", "tensor_maps_, stream_"))


def _verdict(result: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, kernels: int = 1) -> interpreted.Verdict:
    source = Source("", {}, {}, (), 0, b"")
    library = Library(str(Path()), (), {"triton_poi_0": source}, {}, {}, [])
    eager = Call([torch.arange(1.0, 9), torch.arange(3)], [torch.ones(4)], {"running": torch.ones(2)})
    played = Played([Call([result, torch.arange(3)], [given], {"running": weight})], launches=1, kernels=kernels)
    return interpreted.compared(library, played, [eager], donated=())


def test_zeros_prove_nothing() -> None:
    zeros = Call([torch.zeros(3)], [], {})
    verdict = interpreted.compared(Library("", (), {}, {}, {}, []), Played([zeros]), [zeros], donated=())
    assert verdict.wrong == "call 0: all that eager returns is zero, which proves nothing"


def test_what_eager_computes_is_right() -> None:
    verdict = _verdict(torch.arange(1.0, 9) * (1 + 1e-7), torch.ones(4), torch.ones(2))
    assert verdict.wrong == "" and 0 < verdict.error < 1e-6


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (_verdict(torch.arange(1.0, 9) * 1.001, torch.ones(4), torch.ones(2)), "call 0, result 0 is off by 0.001"),
        (_verdict(torch.arange(1.0, 9).double(), torch.ones(4), torch.ones(2)), "call 0, result 0 is off by inf"),
        (_verdict(torch.full((8,), torch.nan), torch.ones(4), torch.ones(2)), "call 0, result 0 is off by nan"),
        (_verdict(torch.arange(1.0, 9), torch.zeros(4), torch.ones(2)), "call 0, input 0 is off by 1"),
        (_verdict(torch.arange(1.0, 9), torch.ones(4), torch.zeros(2)), "call 0, running is off by 0.99"),
        (_verdict(torch.arange(1.0, 9), torch.ones(4), torch.ones(2), kernels=0), "1 of its kernels were not launched"),
    ],
)
def test_what_eager_does_not_compute_is_wrong(verdict: interpreted.Verdict, words: str) -> None:
    assert words in verdict.wrong

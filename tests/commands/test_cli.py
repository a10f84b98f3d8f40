"""Test the command line: the output, files and errors of each command. Inspecting a package runs none of its code."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load, load_file, save, save_file

import aot_backward as ab
import aot_backward_runtime as runtime
from aot_backward.cli import main
from aot_backward.tensor_file import write_tensors
from aot_backward_runtime.format.elf import read_elf

from ..conftest import PROGRAM, aot_backward
from ..support.cli_program import distance, net
from ..support.packages import EXAMPLES, MANIFEST, WEIGHTS, put_together, taken_apart
from ..support.terminal import on_terminal

RAN = "AOT_BACKWARD_CANARY_RAN"


def called(*arguments: object) -> Result:
    """Run the command in this process, in a tenth of the time that a new one takes."""
    return CliRunner().invoke(main, list(map(str, arguments)))


def fails(done: Result | subprocess.CompletedProcess[str], code: int, *words: str) -> str:
    """Check for one line on standard error, nothing on standard output, and this exit code. Return the line."""
    found = done.exit_code if isinstance(done, Result) else done.returncode
    assert found == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    return done.stderr


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    torch.manual_seed(1)
    save_file({"batch['x']": torch.randn(7, 4), "batch['weight']": torch.rand(7, 1)}, path)
    return path


def test_help_is_there_for_every_command_and_does_not_import_torch() -> None:
    code = (
        "import sys; from aot_backward.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for command in ("export", "inspect", "verify", "run", "train", "doctor"):
        assert command in done.stdout
        assert "Exit codes: 0" in called(command, "--help").stdout


def test_export_says_what_it_wrote_and_is_quiet_where_nobody_watches(tmp_path: Path) -> None:
    path = tmp_path / "sole.pt2"
    done = aot_backward("export", f"{PROGRAM}:sole", "-o", path, "--no-weights")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith(f"wrote {path} (") and done.stdout.endswith("MB): grad\n")
    assert list(tmp_path.iterdir()) == [path]


def test_progress_is_shown_on_a_terminal(package: Path) -> None:
    status, shown = on_terminal("stderr", "-m", "aot_backward.cli", "verify", package, columns=100)
    assert status == 0
    assert b"digests" in shown and b"numbers" in shown


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("nonsuch.py:entries", 2, "nonsuch.py does not exist"),
        (f"{PROGRAM}", 2, "not of the form FILE.py:NAME"),
        (f"{PROGRAM}:", 2, "not of the form FILE.py:NAME"),
        ("README.md:entries", 2, "not of the form FILE.py:NAME"),
        (f"{PROGRAM}:nonsuch", 2, "has no function 'nonsuch'; it has: Net, net, distance, entries"),
        (f"{PROGRAM}:CONSTANT", 2, "has no function 'CONSTANT'"),
        (f"{PROGRAM}:raising", 1, "raising raised ValueError: no data (--debug shows the rest)"),
        (f"{PROGRAM}:number", 1, "returned 3; return a Module, a Function, a Grad, a Step, or a dict"),
        (f"{PROGRAM}:unexportable", 1, "wrt names 'nonsuch', which is neither an input nor a parameter"),
    ],
)
def test_bad_programs(program: str, code: int, words: str, tmp_path: Path) -> None:
    fails(called("export", program, "-o", tmp_path / "out.pt2"), code, words)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_does_not_compile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def entries(:\n")
    fails(called("export", f"{path}:entries", "-o", tmp_path / "out.pt2"), 1, "broken.py raised SyntaxError")


def test_export_to_a_missing_folder_fails_before_it_compiles(tmp_path: Path) -> None:
    fails(called("export", f"{PROGRAM}:sole", "-o", tmp_path / "no" / "out.pt2"), 1, "does not exist; make it first")


def test_unknown_target(tmp_path: Path) -> None:
    fails(
        called("export", f"{PROGRAM}:sole", "-o", tmp_path / "o.pt2", "--target", "tpu"),
        1,
        "unknown target 'tpu'; known: cpu, cpu:sse4,",
    )


def test_debug_shows_the_traceback_before_the_line(tmp_path: Path) -> None:
    for arguments in (["--debug", "inspect", tmp_path / "x"], ["inspect", tmp_path / "x", "--debug"]):
        done = called(*arguments)
        assert done.exit_code == 1
        assert "Traceback" in done.stderr and "PackageError" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: cannot open package")


def test_usage_errors_name_the_help(package: Path) -> None:
    fails(
        called("inspect"),
        2,
        "Missing argument 'OUT.pt2' (aot-backward inspect --help shows how)".replace("aot-backward", "main"),
    )
    fails(called("frob"), 2, "No such command 'frob'")
    fails(called("verify", package, "--frob"), 2, "--frob")
    assert called().exit_code == 2 and "Usage:" in called().stderr


def test_interrupting_gives_130(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aot_backward.checks.verify.verify_package", interrupted)
    done = called("verify", package)
    assert done.exit_code == 130 and done.stderr.strip() == "error: interrupted"


def test_an_unexpected_error_is_one_line_too(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("aot_backward.checks.verify.verify_package", broken)
    fails(called("verify", package), 1, "unexpected RuntimeError: first; --debug shows where")


def test_inspect_in_words(package: Path) -> None:
    done = called("inspect", package)
    assert done.exit_code == 0 and done.stderr == ""
    for words in (
        f"{package}:\nVerified against eager PyTorch: 2 comparisons; the worst tensor, ",
        "\nRuns on: torch 2.",
        "\n  cpu:avx2  cpu x86_64 x86-64-v3  ",
        "\n\nnet module\n  State: 2 parameters with 15 elements, 0 buffers\n",
        "Call: (batch={'x': Tensor, 'weight': Tensor}) → {'out': Tensor, 'largest': Tensor}\n",
        "    batch['x']: float32, rows × 4, contiguous, gets a gradient\n",
        "Sizes: rows: 2 to 64 (dimension 0 of ",
        "Compared: verified: ",
        "\n\ndistance grad\n  Gradients of: pos\n",
        "net.0.backward",
        "libtorch_cpu.so",
    ):
        assert words in done.stdout


def test_inspect_lists_every_input(tmp_path: Path) -> None:
    def total(many: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(many).sum()

    path = ab.export_function(total, ([torch.ones(2) for _ in range(20)],), path=tmp_path / "many.pt2", tune="none")
    lines = called("inspect", path).stdout.splitlines()
    start = lines.index("  Arguments:") + 1
    assert lines[start : start + 20] == [f"    many[{i}]: float32, 2, contiguous" for i in range(20)]


def test_inspect_as_json(package: Path) -> None:
    described = json.loads(called("inspect", package, "--json").stdout)
    assert described.keys() == {
        *("path", "bytes", "format_version", "producer", "created", "torch", "target", "metadata"),
        "entries",
        "libraries",
        "operators",
        "weights",
        "members",
        "manifest_sha256",
        "manifest_has_digest",
        "signature",
        "targets",
        "notes",
    }
    variant = described["entries"]["net"]["variants"][0]
    assert variant["sizes"] == {"rows": {"minimum": 2, "maximum": 64}} and variant["guards"] == []
    assert variant["verdict"]["status"] == "verified" and len(variant["verdict"]["sizes"]) == 3
    assert described["libraries"].keys() == {"net.0.forward", "net.0.backward", "distance.0.gradient"}
    assert described["bytes"] == package.stat().st_size > sum(lib["bytes"] for lib in described["libraries"].values())
    assert described["weights"]["tensors"]["layer.weight"]["shape"] == [3, 4]


def test_inspect_draws_tables_on_a_terminal(package: Path) -> None:
    status, shown = on_terminal("stdout", "-m", "aot_backward.cli", "inspect", package, columns=160)
    assert status == 0 and "┃".encode() in shown


def test_verify(package: Path) -> None:
    done = called("verify", package)
    assert done.exit_code == 0 and done.stderr == ""
    assert "digests match" in done.stdout
    # Two outputs, gradients of weight, bias and x
    assert "entry 'net' variant 0: 5 tensors match eager's" in done.stdout
    assert "entry 'distance' variant 0: 2 tensors match eager's" in done.stdout
    report = json.loads(called("verify", package, "--json").stdout)
    assert report["ok"] and report["not_run"] == "" and [v["entry"] for v in report["variants"]] == ["net", "distance"]
    assert all(v["wrong"] == [] and 0 <= v["ratio"] <= 1 for v in report["variants"])


def test_verify_leaves_the_package_and_random_state_alone(package: Path) -> None:
    before, state = package.read_bytes(), torch.random.get_rng_state()
    called("verify", package)
    assert package.read_bytes() == before and torch.equal(torch.random.get_rng_state(), state)


def test_verify_without_weights_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bare.pt2"
    assert called("export", f"{PROGRAM}:entries", "-o", path, "--no-weights").exit_code == 0
    done = called("verify", path)
    assert done.exit_code == 0 and "numbers were not compared: the package has no weights" in done.stdout
    assert "not in the package" in called("inspect", path).stdout


def test_verify_names_a_flipped_bit(package: Path, tmp_path: Path) -> None:
    data = bytearray(package.read_bytes())
    data[data.index(b"\x7fELF") + 5000] ^= 1
    path = tmp_path / "flipped.pt2"
    path.write_bytes(data)
    fails(called("verify", path, "--no-run"), 1, "corrupt package", "member data/aotinductor/", ".so")


def rewritten(package: Path, path: Path, member: str, name: str) -> Path:
    """Write a copy of ``package`` with another value for one tensor and matching digests."""
    members = taken_apart(package)
    tensors = load(members[member])
    tensors[name] = tensors[name] + 0.01
    members[member] = save(tensors)
    digest = hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()
    put_together(path, members, {f"weights/{name}/sha256": digest} if member == WEIGHTS else {})
    return path


@pytest.mark.parametrize(
    ("member", "name", "wrong"),
    [
        (EXAMPLES, "net/0/expected/gradient of layer.weight", "gradient of layer.weight is off by"),
        (EXAMPLES, "net/0/input/0", "is off by"),
        (EXAMPLES, "distance/0/expected/output[0]", "entry 'distance': output[0] is off by"),
        (WEIGHTS, "layer.bias", "is off by"),
    ],
)
def test_verify_finds_wrong_numbers(package: Path, tmp_path: Path, member: str, name: str, wrong: str) -> None:
    path = rewritten(package, tmp_path / "wrong.pt2", member, name)
    done = called("verify", path)
    assert done.exit_code == 1 and "WRONG" in done.stdout
    assert wrong in done.stderr and done.stderr.count("\n") == 1
    assert not json.loads(called("verify", path, "--json").stdout)["ok"]
    assert called("verify", path, "--no-run").exit_code == 0  # the digests agree


def test_looking_opens_no_native_code(package: Path, tmp_path: Path) -> None:
    """Replace every library by one that writes a file when it is loaded. Only a run may load it; a run does, so the
    check can fail."""
    canary, source = tmp_path / "ran", tmp_path / "canary.cpp"
    source.write_text(
        "#include <cstdio>\n#include <cstdlib>\n__attribute__((constructor)) static void f() "
        f'{{ if (FILE* file = fopen(getenv("{RAN}"), "w")) fclose(file); }}\n'
    )
    library = tmp_path / "canary.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-z,noexecstack", "-o", library, source], check=True)
    members, elf, edit = taken_apart(package), read_elf(library), {}
    for name in json.loads(members[MANIFEST])["libraries"]:
        members[f"package/data/aotinductor/{name}/{name}.so"] = library.read_bytes()
        edit[f"libraries/{name}/needed"] = list(elf.needed)
    path = tmp_path / "canary.pt2"
    put_together(path, members, edit)
    env = {RAN: str(canary)}
    assert aot_backward("inspect", path, env=env).returncode == 0
    assert aot_backward("inspect", path, "--json", env=env).returncode == 0
    assert aot_backward("verify", path, "--no-run", env=env).returncode == 0
    assert not canary.exists()
    assert aot_backward("verify", path, env=env).returncode != 0
    assert canary.exists()


def test_another_machines_package_gives_exit_code_3(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "old.pt2"
    put_together(path, taken_apart(package), {"torch": "1.13.0"})
    assert "torch 1.13.0" in called("inspect", path).stdout
    fails(called("verify", path), 3, "built with torch 1.13.0, this is torch 2.", f"aot-backward rebuild {path}")
    fails(called("run", path, "--inputs", path, "--outputs", tmp_path / "o"), 3, "torch 1.13.0")


def test_run_a_module_forward(package: Path, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done = called("run", package, "--entry", "net", "--inputs", inputs, "--outputs", out)
    assert done.exit_code == 0 and done.stdout == f"wrote {out}: output[0], output[1]\n"
    given, results = load_file(inputs), load_file(out)
    expected = net()({"x": given["batch['x']"], "weight": given["batch['weight']"]})
    torch.testing.assert_close(results, {"output[0]": expected["out"].detach(), "output[1]": expected["largest"]})


def test_run_a_module_with_an_incoming_gradient(package: Path, inputs: Path, tmp_path: Path) -> None:
    given, out = load_file(inputs), tmp_path / "out.safetensors"
    incoming = torch.randn(7, 3)
    save_file({**given, "gradient of output[0]": incoming}, inputs)
    assert called("run", package, "--entry", "net", "--inputs", inputs, "--outputs", out).exit_code == 0
    module, x = net(), given["batch['x']"].requires_grad_()
    module({"x": x, "weight": given["batch['weight']"]})["out"].backward(incoming)
    results = load_file(out)
    for name, expected in {
        "batch['x']": x.grad,
        "layer.weight": module.layer.weight.grad,
        "layer.bias": module.layer.bias.grad,
    }.items():
        torch.testing.assert_close(results.pop(f"gradient of {name}"), expected)
    assert results.keys() == {"output[0]", "output[1]"}


def test_run_a_gradient_function(package: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    pos, target = torch.randn(3, requires_grad=True), torch.randn(3)
    save_file({"pos": pos.detach(), "target": target}, source)
    assert called("run", package, "--entry", "distance", "--inputs", source, "--outputs", out).exit_code == 0
    value = distance(pos, target)
    torch.testing.assert_close(
        load_file(out), {"value": value.detach(), "gradient of pos": torch.autograd.grad(value, pos)[0]}
    )


def test_run_refuses_what_does_not_fit_and_keeps_the_old_results(package: Path, inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"old")
    given = load_file(inputs)

    def refused(tensors: dict[str, torch.Tensor] | bytes, *words: str, entry: str = "net") -> None:
        if isinstance(tensors, bytes):
            inputs.write_bytes(tensors)
        else:
            save_file(tensors, inputs)
        fails(called("run", package, "--entry", entry, "--inputs", inputs, "--outputs", out), 1, *words)
        assert out.read_bytes() == b"old"

    refused({"x": torch.ones(2, 4)}, "takes the tensors \"batch['x']\", \"batch['weight']\"; the file holds 'x'")
    refused({**given, "batch['x']": torch.ones(7, 5)}, "batch['x'] has size 5 in dimension 1; expected 4")
    refused({**given, "batch['x']": torch.ones(7, 4).double()}, "batch['x'] has dtype torch.float64")
    refused(
        {**given, "gradient of output[1]": torch.ones(7)},
        "gradient of output[1] was given",
        "outputs with a gradient: output[0]",
    )
    refused({**given, "gradient of output[0]": torch.ones(7, 2)}, "shape")
    refused(given, "no entry 'nonsuch'; it has: net, distance", entry="nonsuch")
    refused({**given, "gradient of x": torch.ones(1)}, "takes the tensors 'pos', 'target'", entry="distance")
    refused(b"{}", f"cannot read {inputs} as a safetensors file")
    save_file(given, inputs)
    fails(
        called("run", package, "--inputs", inputs, "--outputs", out),
        1,
        "2 entries: choose one with --entry: net, distance",
    )
    fails(
        called("run", package, "--entry", "net", "--inputs", tmp_path / "no", "--outputs", out),
        1,
        "cannot read",
        "No such file",
    )
    fails(
        called("run", package, "--entry", "net", "--mode", "sideways", "--inputs", inputs, "--outputs", out),
        2,
        "sideways",
    )
    assert sorted(tmp_path.iterdir()) == sorted([inputs, out])


def test_tensor_files_hold_every_kind_of_tensor(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {
        "transposed": torch.randn(3, 5).T,
        "half": torch.randn(3).half(),
        "brain": torch.randn(2, 2).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    }
    write_tensors(path, tensors)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.resolve_conj()) and found[name].dtype == tensor.dtype


def test_doctor_where_all_is_well() -> None:
    done = called("doctor")
    assert done.exit_code == 0 and "exports for cpu can work here" in done.stdout
    findings = json.loads(called("doctor", "--json").stdout)
    assert findings["ok"]
    assert [f["what"] for f in findings["findings"]] == [
        *(
            "system",
            "python",
            "torch",
            "processor",
            "matrix products",
            "C library",
            "compiler",
            "cache folder",
            "temporary folder",
            "GPU",
            "targets for aarch64",
            "targets for wasm32",
        )
    ]


def test_doctor_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    done = aot_backward("doctor", env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "failed   compiler: none" in done.stdout and "-> exporting needs a C++ compiler" in done.stdout
    done = aot_backward("doctor", "--json", env={"CXX": ""})
    assert done.returncode == 1 and not json.loads(done.stdout)["ok"]


def test_doctor_with_a_compiler_that_cannot(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 0.1" && exit 0\necho "error: omp.h is missing" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    done = aot_backward("doctor", env={"CXX": str(fake)})
    assert (
        done.returncode == 1
        and "g++ 0.1 does not compile a C++ file with OpenMP: error: omp.h is missing" in done.stdout
    )


def test_doctor_on_the_cache_folder(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    done = aot_backward("doctor", env={"AOT_BACKWARD_CACHE": str(blocker / "cache")})
    assert (
        done.returncode == 1 and "failed   cache folder" in done.stdout and "-> set AOT_BACKWARD_CACHE" in done.stdout
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    done = aot_backward("doctor", env={"AOT_BACKWARD_CACHE": str(shared)})
    assert done.returncode == 0 and "warning  cache folder" in done.stdout and "chmod go-w" in done.stdout


def test_doctor_while_another_process_writes_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may create or delete files while doctor counts them."""
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path))
    writing = """
import pathlib, sys
folders = [pathlib.Path(sys.argv[1], f".new-{n}") for n in range(3000)]
while True:
    for change in (pathlib.Path.mkdir, pathlib.Path.rmdir):
        [change(folder) for folder in folders]
"""
    other = subprocess.Popen([sys.executable, "-c", writing, tmp_path])
    try:
        for _ in range(3):
            assert called("doctor").exit_code == 0
    finally:
        other.kill()
        other.wait()


def test_a_warning_about_an_unproved_package_is_not_verifys(package: Path, tmp_path: Path) -> None:
    """``load`` warns about a package that was never compared with eager, and advises verify. verify must not repeat the
    warning."""
    path, members = tmp_path / "unproved.pt2", taken_apart(package)
    entry = next(iter(json.loads(members[MANIFEST])["entries"]))
    put_together(path, members, {f"entries/{entry}/variants/0/verdict/status": "not run: the package has no weights"})
    with pytest.warns(UserWarning, match="was not compared with eager"):
        runtime.load(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert called("verify", path).exit_code == 0

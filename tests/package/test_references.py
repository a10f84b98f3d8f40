"""Python and C refuse by name a manifest with dangling references, or one that was changed after it was written.

The packages are golden ones of formats without the manifest's SHA-256, which need no compiler, so that each edit
reaches the check behind it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot_backward.cli import main
from aot_backward.packaging.consistency import check_consistent
from aot_backward_runtime import load
from aot_backward_runtime.errors import ExportError, PackageError
from aot_backward_runtime.format.manifest import FORMAT_VERSION
from aot_backward_runtime.format.manifest_json import from_json, sealed
from aot_backward_runtime.package.archive import open_package

from ..conftest import aot_backward
from ..native.test_packages import RAISED, REFUSED, RIGHT, in_a_process
from ..support import c_library, golden_files
from ..support.packages import MANIFEST, Raw, taken_apart, write_raw, write_tiny
from ..tools.fuzz.spoiling import parts, put_together, to_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {
    "pair": "1.0-pair",
    "passes": "1.1-passes",
    "step": "1.2-step",
    "orders": "1.3-orders",
    "targets": "1.4-targets",
    "updates": "1.11-updates",
}
Edit = Callable[[Any], object]


def put(path: str, value: Any) -> Edit:
    *parents, last = path.split("/")

    def edit(manifest: Any) -> None:
        for key in parents:
            manifest = manifest[int(key)] if isinstance(manifest, list) else manifest[key]
        manifest[int(last) if isinstance(manifest, list) else last] = value

    return edit


V, LOSS, FIT, TWICE = "entries/pair/variants/0", "entries/loss", "entries/fit", "entries/curved/variants/0"
PASS, UPDATE = "entries/backward/structures/0/variants/0", "entries/backward/updates/0"
BROKEN: Mapping[str, tuple[str, Edit, str]] = {
    "weight of a state": (
        "pair",
        put("entries/pair/state/0/weight", "x"),
        "refers to 'x', which the manifest does not have",
    ),
    "weight of a constant": ("pair", put("libraries/pair.0.forward/constants/0/weight", "x"), "refers to 'x'"),
    "library of a plan": ("pair", put(f"{V}/forward/call/library", "x"), "refers to 'x'"),
    "library of a pass": ("passes", put(f"{PASS}/segments/0/library", "x"), "refers to 'x'"),
    "library of an optimizer step": ("updates", put(f"{UPDATE}/library", "x"), "refers to 'x'"),
    "member of a library": ("pair", put("libraries/pair.0.forward/member", "x/y.so"), "refers to 'x/y.so'"),
    "builds for other targets": (
        "targets",
        put("libraries/bend.0.gradient/builds", []),
        "0 further builds are listed, expected 1",
    ),
    "verdicts for other targets": (
        "targets",
        put("entries/bend/variants/0/verdicts", []),
        "0 verdicts are listed, expected 1",
    ),
    "output of a library": ("pair", put(f"{V}/forward/outputs/0", "result:9"), "'result:9', which does not exist"),
    "operand": ("pair", put(f"{V}/forward/call/operands/0", "input:9"), "'input:9', which does not exist"),
    "operand of no kind": ("pair", put(f"{V}/forward/call/operands/0", "x:y"), "'x:y', which does not exist"),
    "operand in other digits": ("pair", put(f"{V}/forward/call/operands/0", "input:\u0660"), "which does not exist"),
    "operand of a backward": (
        "pair",
        put(f"{V}/forward/call/operands/0", "saved:0"),
        "'saved:0', which does not exist",
    ),
    "number of operands": ("pair", put(f"{V}/forward/call/operands", ["input:0"]), "1 operands are listed, expected 2"),
    "number of outputs": ("pair", put(f"{V}/forward/outputs", []), "0 outputs are listed"),
    "saved tensor": ("pair", put(f"{V}/forward/saved/1", "result:9"), "'result:9', which does not exist"),
    "source of a gradient": (
        "pair",
        put(f"{V}/backward/gradients/1/source", "result:9"),
        "'result:9', which does not exist",
    ),
    "gradient of an unknown input": (
        "pair",
        put(f"{V}/backward/gradients/1/of", "input:9"),
        "'input:9', which does not exist",
    ),
    "gradient of an unknown parameter": (
        "pair",
        put(f"{V}/backward/gradients/1/of", "parameter:x"),
        "'x', which is not among its parameters",
    ),
    "incoming gradient": ("pair", put(f"{V}/backward/gradients/1/cotangents", [5]), "refers to 5"),
    "state that is read": ("pair", put(f"{V}/forward/reads/0", "x"), "'x', which is not among its parameters"),
    "differentiable output": ("pair", put(f"{V}/differentiable", [0, 7]), "refers to 7"),
    "number of incoming gradients": (
        "pair",
        put(f"{V}/differentiable", [0]),
        "2 incoming gradients are listed, expected 1",
    ),
    "input of a symbol": ("pair", put(f"{V}/symbols/0/input", 7), "refers to 7"),
    "dimension of a symbol": ("pair", put(f"{V}/symbols/0/dim", -1), "one of . sizes, got the scale . and size -1"),
    "scale of a symbol": ("pair", put(f"{V}/symbols/0/scale", 0), "expected a scale of at least 1 .* got the scale 0"),
    "symbol in a guard": ("pair", put(f"{V}/guards", ["s7 > 1"]), "unknown symbol 's7'"),
    "tensor of an argument": (
        "pair",
        put(f"{V}/in_tree/children/0/children/0/index", 5),
        r"expected the tensors 0 to 1 .* got \[5, 1\]",
    ),
    "keys of a tree": ("pair", put(f"{V}/out_tree/keys", []), "0 keys of a dict are listed"),
    "kind of a tree": ("pair", put(f"{V}/out_tree/kind", "set"), "unknown kind 'set'"),
    "arguments": ("pair", put(f"{V}/in_tree/kind", "list"), r"expected \(args, kwargs\), got a list"),
    "no variants": ("pair", put("entries/pair/variants", []), "has 0 variants"),
    "no plans": ("pair", put(f"{V}/forward", None), "cannot be called with the plans|does not exist"),
    "two states of one name": (
        "pair",
        put("entries/pair/state/2/name", "scale"),
        "two of its states have the same name",
    ),
    "dtype": ("pair", put("weights/scale/dtype", "float33"), "not a tensor: float33"),
    "device": ("pair", put("target/device", "tpu"), "device 'tpu' is unknown"),
    "shape too large": ("step", put("weights/optimizer.exp_avg.3.bias/shape", [1 << 62]), "too large for a tensor"),
    "negative shape": ("step", put("weights/optimizer.exp_avg.3.bias/shape", [-3]), "not a tensor: float32"),
    "gradient of a function": ("pair", put(f"{LOSS}/wrt/0", "input:3"), "refers to 'input:3'"),
    "group of a number": ("step", put(f"{FIT}/step/numbers/0/group", 4), "refers to 4"),
    "parameter of a group": ("step", put(f"{FIT}/step/groups/0/parameters/0", "x"), "refers to 'module.x'"),
    "state of an optimizer": ("step", put(f"{FIT}/step/state/0/state", "x"), "refers to 'x'"),
    "number that state starts as": ("step", put(f"{FIT}/step/state/0/starts_as", 99), "refers to 99"),
    "vector of numbers": ("step", put("weights/numbers/shape", [1]), r"expected float64 of shape"),
    "no update": ("step", put(f"{FIT}/step/update", None), "has only one of the two"),
    "a step without its step": ("step", put(f"{FIT}/step", None), "and no training step"),
    "a module with a step": ("step", put(f"{FIT}/kind", "module"), "has 1 variants and a training step"),
    "library of a step": ("step", put(f"{FIT}/variants/0/step/call/library", "x"), "step: its call refers to 'x'"),
    "library of an accumulating call": (
        "step",
        put(f"{FIT}/variants/0/accumulate/call/library", "x"),
        "accumulate: its call refers to 'x'",
    ),
    "library of an update": ("step", put(f"{FIT}/step/update/call/library", "x"), "the update refers to 'x'"),
    "gradient of a step": ("step", put(f"{FIT}/step/gradients/0/state", "x"), "the step refers to 'x'"),
    "operations of a pass": ("passes", put(f"{PASS}/segments/0/ops", [0]), "operations once, got others"),
    "tensor of a pass": ("passes", put(f"{PASS}/segments/0/operands/0", "input:99"), "refers to 99"),
    "operand of a pass": ("passes", put(f"{PASS}/segments/0/operands/0", "x"), "operand 'x': expected input:I"),
    "parameter of an optimizer step": (
        "updates",
        put(f"{UPDATE}/trained/0", "7.7"),
        "parameter '7.7', which is in none of its groups",
    ),
    "state of an optimizer step": ("updates", put(f"{UPDATE}/state", []), "inputs of its library are listed, expected"),
    "second order": ("orders", put(f"{TWICE}/double/gives/0", "input:9"), "refers to 'input:9'"),
    "second order without a backward": (
        "orders",
        put(f"{TWICE}/double/backward", None),
        "cannot be differentiated again|does not exist",
    ),
}
NOT_READ_IN_C = {"passes", "updates", "orders"}  # the C library reads neither recorded passes nor second orders
# The C library does not read these: the structure of arguments, incoming gradients by output, verdicts.
NOT_USED_IN_C = {"tensor of an argument", "keys of a tree", "kind of a tree", "arguments", "gradient of a function"}
NOT_USED_IN_C |= {"differentiable output", "number of incoming gradients", "verdicts for other targets"}


def spoil(tmp_path: Path, number: int, kind: str, edit: Edit) -> tuple[Path, Path]:
    sound = GOLDEN / f"{FILES[kind]}.pt2"
    taken = parts(sound)
    manifest = json.loads(json.dumps(taken.manifest))
    edit(manifest)
    path = tmp_path / f"{number}.pt2"
    path.write_bytes(put_together(taken.members, to_bytes(manifest)))
    return sound, path


@golden_files.needed
@pytest.mark.parametrize("name", BROKEN)
def test_a_reference_that_leads_nowhere_is_refused_by_name(tmp_path: Path, name: str) -> None:
    kind, edit, reason = BROKEN[name]
    _, path = spoil(tmp_path, 0, kind, edit)
    with pytest.raises(PackageError, match=reason) as caught:
        open_package(path)
    assert str(path) in str(caught.value)


@golden_files.needed
def test_c_refuses_each_of_them(tmp_path: Path) -> None:
    for number, (name, (kind, edit, _)) in enumerate(BROKEN.items()):
        if kind in NOT_READ_IN_C or name in NOT_USED_IN_C:
            continue
        _, path = spoil(tmp_path, number, kind, edit)

        def action(path: Path = path) -> int:
            try:
                with c_library.opened(path):
                    return RIGHT
            except c_library.Failed as error:
                return REFUSED if error.status in (c_library.FORMAT, c_library.INCOMPATIBLE) else RAISED

        assert in_a_process(action) == REFUSED, name


def test_the_manifest_is_compared_with_its_digest(tmp_path: Path) -> None:
    """A new CRC in the archive does not help."""
    path = tmp_path / "x.pt2"
    write_tiny(path, format_version=FORMAT_VERSION)
    members = taken_apart(path)
    data = members.pop(MANIFEST)
    load(path)
    unsealed = data[: data.rindex(b',"sha256"')] + b"}"
    assert sealed(unsealed) == data
    for changed, reason in (
        (data.replace(b"float32", b"float64", 1), "SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}"),
        (data.replace(b'"sha256":"' + data[-66:-2], b'"sha256":"' + b"0" * 64), "expected 0{64}"),
        (unsealed, "does not end with its SHA-256"),
        (sealed(unsealed.replace(b'"producer"', b'"addition":1,"producer"', 1)), "unknown field 'addition'"),
        (sealed(unsealed.replace(b'"nodes"', b'"knots":1,"nodes"', 1)), "unknown field 'knots'"),
    ):
        assert changed != data
        write_raw(path, [Raw(name, content) for name, content in members.items()] + [Raw(MANIFEST, changed)])
        with pytest.raises(PackageError, match=reason):
            open_package(path)
        if "unknown" not in reason:  # C reads only a part of the schema
            with pytest.raises(c_library.Failed, match="SHA-256"), c_library.opened(path):
                pass


def test_the_writer_refuses_a_plan_that_passes_other_tensors() -> None:
    manifest = from_json(zipfile.ZipFile(GOLDEN / "1.0-pair.pt2").read(MANIFEST))
    check_consistent(manifest)
    for edit, reason in (
        (put(f"{V}/inputs/0/dtype", "float16"), r"input:0: expected x, float32 .*, got float16"),
        (put(f"{V}/inputs/1/shape", [2]), r"input:1: expected .*, got float32 \[2\]"),
        (put(f"{V}/inputs/0/stride", [1, "s0"]), "expected x, float32"),
        (put(f"{V}/outputs/0/dtype", "float64"), r"result:0: expected .*float64.*, got float32|result:0 is float32"),
        (put(f"{V}/forward/call/library", "x"), "no reader accepts"),
    ):
        raw = json.loads(zipfile.ZipFile(GOLDEN / "1.0-pair.pt2").read(MANIFEST))
        edit(raw)
        with pytest.raises(ExportError, match=reason):
            check_consistent(from_json(json.dumps(raw).encode()))


ODD = "\x1b[31mred\x07\u202e\ud800\x9b\x7f"
SHOWN = r"\x1b[31mred\x07\u202e\ud800\x9b\x7f"


def _odd(manifest: Any) -> None:
    manifest["producer"] = manifest["created"] = ODD
    manifest["notes"] = {ODD: f"two\nlines {ODD}"}
    manifest["entries"][ODD] = manifest["entries"].pop("loss")
    manifest["entries"]["pair"]["variants"][0]["out_tree"]["keys"][0] = ODD
    manifest["entries"]["pair"]["variants"][0]["symbols"][0]["label"] = ODD
    manifest["entries"]["pair"]["variants"][0]["verdict"] = {
        "status": "verified",
        "worst": ODD,
        "error": 1e300,
        "sizes": [ODD],
    }
    manifest["libraries"]["pair.0.forward"]["nodes"] = (1 << 63) - 1


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run the command line in this process. Return status, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


@golden_files.needed
def test_control_characters_of_a_package_are_shown_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = spoil(tmp_path, 0, "pair", _odd)
    page = tmp_path / "page.html"
    for arguments in (
        ("inspect", path),
        ("inspect", path, "--json"),
        ("inspect", path, "--html", page),
        ("verify", path, "--no-run"),
        ("verify", path),
    ):
        status, out, err = run(capsys, *arguments)
        assert status == int(arguments == ("verify", path)), err  # verify fails: the renamed entry has no example
        assert (out + err).replace("\n", "").isprintable(), arguments
    assert SHOWN in run(capsys, "inspect", path)[1]
    assert json.loads(run(capsys, "inspect", path, "--json")[1])["producer"] == ODD
    assert "red" in page.read_text() and page.read_text().replace("\n", "").isprintable()
    done = aot_backward("inspect", path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and SHOWN in done.stdout, done.stderr


def test_errors_show_control_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(manifest: Any) -> None:
        _odd(manifest)
        manifest["entries"]["pair"]["variants"][0]["outputs"][0] |= {"name": ODD, "dtype": ODD}

    _, path = spoil(tmp_path, 0, "pair", edit)
    inputs = tmp_path / "in.safetensors"
    for arguments in (
        ("inspect", path),
        ("verify", path, "--no-run"),
        ("verify", path, "--json"),
        ("run", path, "--inputs", inputs, "--outputs", inputs),
    ):
        status, out, err = run(capsys, *arguments)
        assert status == 1, err
        assert err.startswith("error: corrupt package") and err.count("\n") == 1, err
        assert SHOWN in err and (out + err).replace("\n", "").isprintable(), err
    with pytest.raises(PackageError) as caught:
        open_package(path)
    assert str(caught.value).isprintable()


def test_a_number_beyond_what_is_shown_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (path, value) in enumerate(
        {"weights/scale/shape": [1 << 62] * 8, "weights/numbers/shape": [1 << 60]}.items()
    ):
        _, spoilt = spoil(tmp_path, number, "pair" if "scale" in path else "step", put(path, value))
        with pytest.raises(PackageError, match=r"too large|not a tensor|expected float64"):
            open_package(spoilt)
        assert run(capsys, "inspect", spoilt)[0] == 1

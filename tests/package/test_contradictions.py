"""Manifests that are well-formed and lie, their digests written anew: found by what else the manifest says, or by the library itself
(docs/reliability.md, rows 49 and 51). Native code checks nothing, so each lie is told in a process that may end; the packages are golden ones,
which need no compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot_backward.cli import main
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.package.archive import open_package

from ..conftest import aot_backward
from ..support import golden_files
from ..support.packages import python
from ..tools.fuzz.spoiling import parts, put_together, to_bytes

GOLDEN = Path(__file__).parents[1] / "golden"

# Loads a package and calls each entry with its gradients; prints "right" where everything is as in the sound package, the error where one is refused.
CALL = """
import sys, torch
from aot_backward_runtime import load
from aot_backward_runtime.errors import AotBackwardError
from tests.support import golden_packages as golden
torch.set_num_threads(1)
def call(kind, path):
    if kind in ("passes", "timed"):
        from aot_backward_runtime import replay
        with replay(path):
            return [t for each in golden.backward_passes((3, 5)) for t in each]
    if kind == "updates":
        from aot_backward_runtime import replay
        with replay(path):
            parameters, optimizer = golden.momentum(5)
            return [*parameters, *(s["momentum_buffer"] for s in optimizer.state.values())]
    if kind == "clippings":
        from aot_backward_runtime import replay
        with replay(path):
            return golden.clipped(5)
    package = load(path)
    if kind == "step":
        step = package.step()
        losses = [step(*golden.samples(8)), step(*golden.samples(5), update=False), step(*golden.samples(8))]
        return [*losses, step.grad_norm, *step.parameters.values(), *step.buffers.values()]
    out = []
    for name, entry in package.entries.items():
        torch.manual_seed(0)
        x, more = golden.arguments()
        if entry == "grad":
            value, grads = package.grad(name)(x.detach())
            out += [value, *([grads] if isinstance(grads, torch.Tensor) else grads.values())]
            continue
        net = package.module(name)
        result = net(x, more) if kind == "pair" else net(x)
        leaves = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        sources = [x, *(p for p in net.parameters() if p.requires_grad)]
        grads = torch.autograd.grad([t.pow(2 + i).sum() for i, t in enumerate(leaves)], sources, allow_unused=True, create_graph=kind == "orders")
        out += [*leaves, *grads]
        if kind == "orders":
            out += torch.autograd.grad(sum(g.square().sum() for g in grads if g is not None), sources, allow_unused=True)
        out += net.buffers()
    return out
def same(a, b):
    return (a is None) == (b is None) and (a is None or torch.allclose(a.detach(), b.detach(), equal_nan=True))
expected = {}
for line in sys.stdin.read().splitlines():
    kind, sound, path = line.split()
    if kind not in expected:
        expected[kind] = call(kind, sound)
    print(path, end=" ", flush=True)
    try:
        found = call(kind, path)
    except AotBackwardError as error:
        print(type(error).__name__, str(error).encode("ascii", "backslashreplace").decode().replace(chr(10), " "), flush=True)
    except Exception as error:
        print("untyped", type(error).__name__, str(error)[:100].replace(chr(10), " "), flush=True)
    else:
        right = len(found) == len(expected[kind]) and all(map(same, found, expected[kind]))
        print("right" if right else "wrong", flush=True)
"""

FILES = {"pair": "1.0-pair", "passes": "1.1-passes", "step": "1.2-step", "orders": "1.3-orders", "targets": "1.4-targets", "timed": "1.9-passes"}
FILES |= {"updates": "1.11-updates", "clippings": "1.13-clippings"}
Edit = Callable[[Any], object]


def at(manifest: Any, path: str) -> Any:
    for key in path.split("/") if path else ():
        manifest = manifest[int(key)] if isinstance(manifest, list) else manifest[key]
    return manifest


def put(path: str, value: Any) -> Edit:
    *parents, last = path.split("/")

    def edit(manifest: Any) -> None:
        holder = at(manifest, "/".join(parents))
        holder[int(last) if isinstance(holder, list) else last] = value

    return edit


def swap(one: str, other: str) -> Edit:
    def edit(manifest: Any) -> None:
        a, b = at(manifest, one), at(manifest, other)
        put(one, b)(manifest)
        put(other, a)(manifest)

    return edit


def drop(path: str) -> Edit:
    *parents, last = path.split("/")

    def edit(manifest: Any) -> None:
        holder = at(manifest, "/".join(parents))
        del holder[int(last) if isinstance(holder, list) else last]

    return edit


def edit_text(path: str, old: str, new: str) -> Edit:
    def edit(manifest: Any) -> None:
        text = at(manifest, path)
        assert old in text
        put(path, text.replace(old, new))(manifest)

    return edit


def both(*edits: Edit) -> Edit:
    return lambda manifest: [edit(manifest) for edit in edits]


V, LOSS, FIT, TWICE = "entries/pair/variants/0", "entries/loss", "entries/fit", "entries/curved/variants/0"
PASS, UPDATE, CLIPPING = "entries/backward/structures/0/variants/0", "entries/backward/updates/0", "entries/backward/clippings/0"
LIES: Mapping[str, tuple[str, Edit, str]] = {
    # what ended the process, or gave wrong numbers
    "a weight without strides": ("pair", put("weights/first.weight/stride", [0, 0]), "requires a gradient|bytes of first.weight|strides"),
    "a weight spread out": ("pair", put("weights/first.weight/stride", [30, 1]), "bytes of first.weight"),
    "operands exchanged": ("pair", swap(f"{V}/forward/call/operands/0", f"{V}/forward/call/operands/1"), "input:1 is more"),
    "saved tensors exchanged": ("pair", swap(f"{V}/backward/call/operands/1", f"{V}/backward/call/operands/2"), r"takes saved\[1\]"),
    "saved results exchanged": ("pair", swap(f"{V}/forward/saved/1", f"{V}/forward/saved/2"), r"saved\[2\] is result 2"),
    "incoming gradients exchanged": ("pair", swap(f"{V}/backward/call/operands/3", f"{V}/backward/call/operands/4"), "takes gradient of"),
    "a narrower input": ("pair", put(f"{V}/inputs/0/dtype", "float16"), "the library takes x, float32"),
    "an input of another rank": ("pair", put(f"{V}/inputs/1/shape", []), "strides"),
    "a smaller input": ("pair", put(f"{V}/inputs/1/shape", [2]), "the library takes"),
    "an input that lies otherwise": ("pair", put(f"{V}/inputs/0/stride", [1, "s0"]), "the library takes"),
    "an operand too few": ("pair", drop(f"{V}/forward/call/operands/1"), "takes 2 tensors; 1 operands"),
    "fewer inputs, also of the library": (
        "pair",
        both(drop(f"{V}/forward/call/operands/1"), drop("libraries/pair.0.forward/inputs/1")),
        "takes 2 tensors and gives 3; the manifest says 1 and 3",
    ),
    "a result too many": (
        "step",
        both(put("libraries/fit.update.update/outputs/1", {}), drop("libraries/fit.update.update/outputs/1"), put(f"{FIT}/step/finite", False)),
        "expected",
    ),
    "outputs exchanged": ("pair", swap(f"{V}/forward/outputs/0", f"{V}/forward/outputs/1"), r"output\[0\] is result 1"),
    "results' places exchanged": ("pair", swap(f"{V}/out_tree/children/0/index", f"{V}/out_tree/children/1/children/0/index"), "in their order"),
    "gradients exchanged": ("pair", swap(f"{V}/backward/gradients/1/source", f"{V}/backward/gradients/2/source"), "is result 2 of the library"),
    "a gradient left out": ("pair", put(f"{V}/backward/gradients/1/source", ""), "result 1 of the library"),
    "a gradient of something else": ("pair", put(f"{V}/backward/gradients/1/of", "parameter:second.weight"), r"\[3\]|float32"),
    "constants exchanged": (
        "pair",
        swap("libraries/pair.0.forward/constants/1/weight", "libraries/pair.0.forward/constants/2/weight"),
        "constant 'second_bias' is bound to 'first.bias'",
    ),
    "names of the state exchanged": ("pair", swap("entries/pair/state/2/weight", "entries/pair/state/4/weight"), "no state of that name"),
    "a read left out": ("pair", drop(f"{V}/forward/reads/0"), "reads and writes other weights"),
    "a parameter that is a buffer": ("pair", put("entries/pair/state/2/parameter", False), "parameter:first.bias"),
    "a cotangent of another output": ("pair", put(f"{V}/differentiable", [1, 0]), "the gradient of"),
    "arguments' names exchanged": ("pair", swap(f"{V}/argument_names/0", f"{V}/argument_names/1"), "that is called"),
    "gradients of a function exchanged": ("pair", swap(f"{LOSS}/wrt/0", f"{LOSS}/wrt/1"), "is called"),
    "the numbers' order": ("step", swap(f"{FIT}/step/numbers/0", f"{FIT}/step/numbers/2"), "stored|options"),
    "a number that the options deny": ("step", put(f"{FIT}/step/numbers/0/value", 0.5), "the group's options say"),
    "state of another parameter": ("step", put(f"{FIT}/step/state/1/parameters", ["3.bias"]), "is listed as"),
    "waiting gradients exchanged": ("step", swap(f"{FIT}/step/gradients/0/state", f"{FIT}/step/gradients/1/state"), "is listed as the gradient"),
    "no norm": ("step", put(f"{FIT}/step/norm", False), "2 results more"),
    "no update": ("step", drop(f"{FIT}/step/update"), "plans|accumulates gradients"),
    "a pass's operands exchanged": ("passes", swap(f"{PASS}/segments/0/operands/2", f"{PASS}/segments/0/operands/4"), "takes tensor 2"),
    "a pass's results exchanged": ("passes", put(f"{PASS}/segments/0/results", [8, 12, 23, 19]), "gives %v19 as %v23"),
    "an optimizer's numbers exchanged": ("updates", swap(f"{UPDATE}/numbers/0", f"{UPDATE}/numbers/1"), "compiled for another optimizer"),
    "another optimizer": ("updates", put(f"{UPDATE}/optimizer", "torch.optim.adam.Adam"), "compiled for another optimizer"),
    "an optimizer of one's own": ("updates", put(f"{UPDATE}/optimizer", "os.system"), "no optimizer of torch.optim"),
    "an optimizer's parameters exchanged": ("updates", swap(f"{UPDATE}/trained/0", f"{UPDATE}/trained/2"), "are not the"),
    "an optimizer's state exchanged": ("updates", swap(f"{UPDATE}/state/0", f"{UPDATE}/state/2"), "are not the"),
    "an optimizer's state left out": ("updates", drop(f"{UPDATE}/state/0"), "takes 10 tensors, which are not the 9"),
    "an optimizer's option changed": (
        "updates",
        edit_text(f"{UPDATE}/groups/0/options", '"maximize": false', '"maximize": true'),
        "compiled for another optimizer",
    ),
    "an optimizer's code of a pass": ("updates", put(f"{UPDATE}/library", "none"), "which the manifest does not have"),
    "an optimizer's vector too short": ("updates", put("libraries/update.0b50f1500a84/inputs/9/shape", [3]), "its numbers are"),
    "a gradient of another shape": ("updates", put("libraries/update.0b50f1500a84/inputs/0/shape", [2, 4]), r"grad is float32"),
    "a function that clips nothing": ("clippings", put(f"{CLIPPING}/function", "clip_grad_"), "expected clip_grad_norm_ or clip_grad_value_"),
    "clipping by another norm": ("clippings", put(f"{CLIPPING}/norm_type", "3.0"), "compiled for another function or norm_type"),
    "clipping by a norm that is no number": ("clippings", put(f"{CLIPPING}/norm_type", "two"), "its norm_type is 'two'"),
    "clipping by value of what clips by a norm": (
        "clippings",
        both(put(f"{CLIPPING}/function", "clip_grad_value_"), put(f"{CLIPPING}/norm_type", "")),
        "compiled for another function or norm_type",
    ),
    "another clipping's code": ("clippings", swap(f"{CLIPPING}/library", "entries/backward/clippings/1/library"), "compiled for another function"),
    "a clipping's vector too short": ("clippings", put("libraries/clipping.617935fb5ff1/inputs/3/shape", [1]), "expected float64"),
    "a clipping timed in another way": ("clippings", put(f"{CLIPPING}/speed/timings/1/name", "foreach"), "was timed as"),
    "an optimizer timed in another way": ("updates", put(f"{UPDATE}/speed/timings/1/name", "foreach"), "was timed as"),
    "a pass that was timed in another way": ("timed", put(f"{PASS}/speed/timings/2/name", "min_cut"), "was timed as"),
    "a pass that is run in another way": ("timed", put(f"{PASS}/speed/chosen", "min_cut"), "is said to be here"),
    "a second derivative of something else": (
        "orders",
        swap(f"{TWICE}/double/gives/1", f"{TWICE}/double/gives/3"),
        "differentiable gradients are of",
    ),
    "another target's constants": ("targets", put("libraries/bend.0.gradient/builds/0/constants", [{"name": "x", "weight": "y"}]), "refers to 'y'"),
    # what was a KeyError, an IndexError or the like
    "an output that is not there": ("pair", put(f"{V}/forward/outputs/0", "result:9"), "there are 3"),
    "an operand that is not there": ("pair", put(f"{V}/forward/call/operands/0", "input:9"), "does not exist"),
    "an operand that is none": ("pair", put(f"{V}/forward/call/operands/0", "x:y"), "not the name of a tensor"),
    "a number in other digits": ("pair", put(f"{V}/forward/call/operands/0", "input:\u0660"), "not the name of a tensor"),
    "a saved tensor that is not there": ("pair", put(f"{V}/forward/saved/1", "result:9"), "there are 3"),
    "reading an unknown state": ("pair", put(f"{V}/forward/reads/0", "x"), "no state of the entry"),
    "a symbol of an unknown input": ("pair", put(f"{V}/symbols/0/input", 7), "read from input 7"),
    "a symbol of an unknown dimension": ("pair", put(f"{V}/symbols/0/dim", -1), "read from number -1"),
    "a symbol scaled by nothing": ("pair", put(f"{V}/symbols/0/scale", 0), "scale 0"),
    "a symbol with a name of Python's": ("pair", put(f"{V}/symbols/0/name", "None"), "not a name for a symbol"),
    "an unknown symbol in a guard": ("pair", put(f"{V}/guards", ["s7 > 1"]), "unknown symbol"),
    "no variants": ("pair", put("entries/pair/variants", []), "no variants"),
    "no plans": ("pair", drop(f"{V}/forward"), "its plans are|saved"),
    "a tree of an unknown kind": ("pair", put(f"{V}/out_tree/kind", "set"), "unknown kind"),
    "a tree without keys": ("pair", put(f"{V}/out_tree/keys", []), "children and the keys"),
    "arguments that are no tuple": ("pair", put(f"{V}/in_tree/kind", "list"), "no tuple of a tuple and a dict"),
    "an argument that is not there": ("pair", put(f"{V}/in_tree/children/0/children/0/index", 5), "in their order"),
    "an unknown dtype": ("pair", put("weights/scale/dtype", "float33"), "dtype 'float33'"),
    "a dtype that is something else": ("pair", put(f"{V}/outputs/0/dtype", "nn"), "unknown"),
    "an unknown device": ("pair", put("target/device", "tpu"), "for the device 'tpu'"),
    "a shape that no tensor has": ("step", put("weights/optimizer.exp_avg.3.bias/shape", [1 << 62, 1 << 62]), "no tensor has"),
    "a negative shape": ("step", put("weights/optimizer.exp_avg.3.bias/shape", [-3]), "no tensor has"),
    "a state without a name": ("pair", put("entries/pair/state/0/name", ""), "no name for a part"),
    "a state that is listed twice": ("pair", put("entries/pair/state/2/name", "scale"), "listed twice|no state of that name"),
    "a gradient for integers": ("pair", put("entries/pair/state/5/requires_grad", True), "requires a gradient and is of int64"),
    "a gradient of something unknown": ("pair", put(f"{LOSS}/wrt/0", "input:3"), "gradients of"),
    "a number of an unknown key": ("step", put(f"{FIT}/step/numbers/0/key", "x"), "options say|stored"),
    "a flag as the loss": ("step", put(f"{FIT}/variants/0/outputs/0/dtype", "bool"), r"output\[0\]"),
    "a precision that is none": ("pair", put(f"{V}/ambient", {"matmul_precision": "x"}), "unknown"),
    "a second order without a backward": ("orders", drop(f"{TWICE}/double/backward"), "differentiated again"),
    "a namedtuple of a keyword": (
        "pair",
        both(put(f"{V}/out_tree/kind", "namedtuple"), put(f"{V}/out_tree/type_name", "class")),
        "namedtuple 'class'",
    ),
}


def spoil(tmp_path: Path, number: int, kind: str, edit: Edit) -> tuple[Path, Path]:
    sound = GOLDEN / f"{FILES[kind]}.pt2"
    taken = parts(sound)
    manifest = json.loads(json.dumps(taken.manifest))
    edit(manifest)
    path = tmp_path / f"{number}.pt2"
    path.write_bytes(put_together(taken.members, to_bytes(manifest)))
    return sound, path


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each lie. All are told to one process; where one ends it, the rest are told to another."""
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("lies")
    lines = {}
    for number, (name, (kind, edit, _)) in enumerate(LIES.items()):
        sound, path = spoil(folder, number, kind, edit)
        lines[name] = (str(path), f"{kind} {sound} {path}")
    out: dict[str, str] = {}
    while left := {name: line for name, line in lines.items() if name not in out}:
        text = "\n".join(line for _, line in left.values())
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CALL], input=text, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=900
        )
        said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
        before = len(out)
        for name, (path, _) in left.items():
            if path in said:
                out[name] = said[path] or f"ended the process with status {done.returncode}"
        assert len(out) > before, done.stderr
    return out


@golden_files.needed
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused_by_name(outcomes: dict[str, str], name: str) -> None:
    import re

    kind, _, reason = LIES[name]
    assert outcomes[name].startswith(("PackageError", "IncompatibleError")), outcomes[name]
    assert re.search(reason, outcomes[name]), outcomes[name]
    if outcomes[name].startswith("PackageError") and "stored with its state" not in outcomes[name]:
        assert FILES[kind] not in outcomes[name]
        assert re.search(r"entry |weight |device|library ", outcomes[name]), outcomes[name]  # it says where


@golden_files.needed
def test_what_a_package_says_for_people_is_its_own(tmp_path: Path) -> None:
    """What nothing contradicts is no lie: golden packages go on being read, and so do these."""
    edits = (put("notes", {"by": "somebody"}), put(f"{V}/seed", 7), put(f"{V}/symbols/0/label", "n"), put("producer", "x"), put("created", ""))
    sound, path = spoil(tmp_path, 0, "pair", both(*edits))
    done = python("import io\n" + CALL.replace("sys.stdin", "io.StringIO(sys.argv[1])"), f"pair {sound} {path}")
    assert done.stdout.split()[-1] == "right", done.stdout + done.stderr


ODD = "\x1b[31mred\x07\u202e\ud800\x9b\x7f"
SHOWN = r"\x1b[31mred\x07\u202e\ud800\x9b\x7f"


def _odd(manifest: Any) -> None:
    manifest["producer"] = manifest["created"] = ODD
    manifest["notes"] = {ODD: f"two\nlines {ODD}"}
    manifest["entries"][ODD] = manifest["entries"].pop("loss")
    manifest["entries"]["pair"]["variants"][0]["out_tree"]["keys"][0] = ODD
    manifest["entries"]["pair"]["variants"][0]["symbols"][0]["label"] = ODD
    manifest["entries"]["pair"]["variants"][0]["verdict"] = {"status": "verified", "worst": ODD, "error": 1e300, "sizes": [ODD]}
    manifest["libraries"]["pair.0.forward"]["nodes"] = (1 << 63) - 1


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command line in this process: status, standard output and error."""
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
        assert status == int(arguments == ("verify", path)), err  # which misses the example of the entry that is called otherwise
        assert (out + err).replace("\n", "").isprintable(), arguments
    assert SHOWN in run(capsys, "inspect", path)[1]
    assert json.loads(run(capsys, "inspect", path, "--json")[1])["producer"] == ODD
    assert "red" in page.read_text() and page.read_text().replace("\n", "").isprintable()
    done = aot_backward("inspect", path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and SHOWN in done.stdout, done.stderr


def test_errors_show_control_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(manifest: Any) -> None:
        _odd(manifest)
        manifest["entries"]["pair"]["variants"][0]["outputs"][0]["name"] = ODD

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
    for number, (path, value) in enumerate({"weights/scale/shape": [1 << 62] * 8, "weights/numbers/shape": [1 << 60]}.items()):
        _, spoilt = spoil(tmp_path, number, "pair" if "scale" in path else "step", put(path, value))
        with pytest.raises(PackageError, match=r"no tensor has|vector of numbers"):
            open_package(spoilt)
        assert run(capsys, "inspect", spoilt)[0] == 1

"""Packages as WebAssembly modules, in Node.js and in a browser, without PyTorch. They need Debian's ``emscripten``,
``nodejs`` and ``chromium``."""

from __future__ import annotations

import functools
import gzip
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward import web
from aot_backward_runtime import load
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import standalone_by_target

from ..conftest import aot_backward
from ..support import chromium, exports
from .test_other_machines import bend
from .test_other_machines import entries as corpus

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
BOTH = "cpu:avx2,cpu:wasm"
BATCH, STEPS = 32, 50
pytestmark = [
    pytest.mark.skipif(shutil.which("em++") is None, reason="no emscripten"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js"),
]
needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium")


def node(folder: Path, script: str) -> Any:
    """Return what the JavaScript ``script`` assigns to ``result``; ``network`` is the package in ``folder``."""
    head = f"import {{ load }} from {json.dumps((folder / 'index.mjs').as_uri())};\nconst network = await load(), result = {{}};\n"
    tail = (
        "\nprocess.stdout.write(JSON.stringify(result, (_, v) => ArrayBuffer.isView(v) ? Array.from(v, Number) : v));"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", head + script + tail], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def tensor(value: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value["data"], dtype=like.dtype).view(value["shape"])


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with what its commands write."""
    folder = tmp_path_factory.mktemp("browser") / "example"
    shutil.copytree(EXAMPLE, folder)
    done = aot_backward(
        "export", folder / "export.py:entries", "--format", "wasm", "--tune", "none", "-o", folder / "digits"
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[1].rpartition("/")[2] for line in done.stdout.splitlines()] == list(web.FILES)
    subprocess.run([sys.executable, folder / "export.py", folder / "digits.bin"], check=True)
    return folder


@functools.cache
def eager_losses(folder: Path) -> list[float]:
    program = runpy.run_path(str(folder / "export.py"))
    net = program["network"]()
    rows = torch.frombuffer(bytearray((folder / "digits.bin").read_bytes()), dtype=torch.uint8).view(-1, 65)
    images, labels = rows[:, 1:].view(-1, 1, 8, 8).float() / 16, rows[:, 0].long()
    optimizer = torch.optim.Adam(net.parameters(), lr=program["LEARNING_RATE"])
    losses = []
    torch.manual_seed(0)
    for n in range(STEPS):
        batch = slice(n * BATCH % 1344, n * BATCH % 1344 + BATCH)
        loss = nn.functional.cross_entropy(net(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_example_trains_in_node_as_in_eager(example: Path) -> None:
    """With the same dropout masks."""
    result = node(
        example / "digits",
        f"""
        import {{ readFileSync }} from "node:fs";
        const {{ batchOf, copyWeights, imagesOf, predicted }} = await import({json.dumps((example / "training.mjs").as_uri())});
        const digits = imagesOf(readFileSync({json.dumps(str(example / "digits.bin"))}));
        const step = network.step("train"), predict = network.function("predict").eval();
        network.seed(0);
        result.losses = [];
        for (let n = 0; n < {STEPS}; n++) result.losses.push(step.run(batchOf(digits, n * {BATCH} % 1344, {BATCH})).loss);
        result.right = 0;
        copyWeights(step, predict);
        for (let i = 1344; i < digits.count; i++) {{
          result.right += predicted(predict, digits.images.subarray(64 * i, 64 * (i + 1))) === digits.labels[i];
        }}
        """,
    )
    torch.testing.assert_close(
        torch.tensor(result["losses"]), torch.tensor(eager_losses(example)), rtol=1e-5, atol=1e-5
    )
    assert result["right"] > 0.8 * (1797 - 1344)


@needs_browser
def test_the_page_trains_in_a_browser_as_in_eager(example: Path) -> None:
    page = chromium.answer_of(
        example,
        f"""
        const frame = document.body.appendChild(Object.assign(document.createElement("iframe"), {{ src: "index.html?steps={STEPS}" }}));
        while (!frame.contentDocument?.body?.dataset.result) await new Promise((done) => setTimeout(done, 50));
        const {{ dataset, innerText }} = frame.contentDocument.body;
        answer = {{ ...JSON.parse(dataset.result), text: innerText }};
        """,
        timeout=300,
    )
    torch.testing.assert_close(torch.tensor(page["losses"]), torch.tensor(eager_losses(example)), rtol=1e-5, atol=1e-5)
    assert re.search(rf"{STEPS} steps, .* ms each; accuracy [89]\d\.\d %", page["text"])


def test_the_example_is_small(example: Path) -> None:
    """All that a browser loads, compressed as a server does it."""
    assert (
        sum(len(gzip.compress((example / "digits" / name).read_bytes())) for name in web.FILES if name != "index.d.mts")
        < 300_000
    )


def test_every_entry_gives_the_stored_results() -> None:
    """The entries that are compared on aarch64: convolutions, attention, dropout, a recurrent layer, sorting, solvers
    and 16-bit numbers."""
    path = exports.shared("wasm", lambda path: ab.export(path, corpus(), target=BOTH, tune="none"))
    manifest = open_package(path).manifest
    verified = {"cpu:avx2": "verified", "cpu:wasm": "verified"}
    assert {name: standalone_by_target(manifest, name) for name in manifest.entries} == dict.fromkeys(
        manifest.entries, verified
    )


def several() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    points = {0: torch.export.Dim("points", min=2, max=50)}
    net[3].weight = nn.Parameter(torch.randn(4, 2).t())  # in another order of memory
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    target = torch.randn(5, 2)
    table = nn.Embedding(10, 4).bfloat16()

    def energy(x: torch.Tensor, species: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        each = x.square().sum(1) * (1 + species)
        return each.sum(), {"7": each}

    def look_up(words: torch.Tensor) -> torch.Tensor:
        return table(words).square().sum()

    return {
        "net": ab.Module(
            net, [ab.Variant((torch.randn(5, 3),), dynamic_shapes=(points,), requires_grad=["input", "parameters"])]
        ),
        "energy": ab.Grad(
            energy,
            [ab.Variant((torch.randn(5, 3).double(), torch.arange(5)))],
            wrt="x",
            has_aux=True,
            metadata={"unit": "eV"},
        ),
        "train": ab.Step(
            net,
            [ab.Variant((torch.randn(5, 3), target), dynamic_shapes=(points, points))],
            optimizer,
            loss_fn=nn.functional.mse_loss,
            accumulate=True,
        ),
        "halves": ab.Function(
            lambda x, y=None: ((x.bfloat16() * 2).t(), x > 0, x[:0, :2]) if y is None else x + y,
            [ab.Variant((torch.randn(2, 3),)), ab.Variant((torch.randn(2, 3), torch.randn(3)))],
        ),
        "look_up": ab.Grad(look_up, [ab.Variant((torch.arange(5),))], wrt="table.weight"),
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wasm") / "several.pt2"
    ab.export(path, several(), tune="none")
    return path


@pytest.fixture(scope="module")
def folder(package: Path) -> Path:
    """From a package without code for WebAssembly."""
    folder = package.with_name("several")
    done = aot_backward("convert", package, "--format", "wasm", "-o", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_gradient(folder: Path) -> None:
    result = node(
        folder,
        """
        const energy = network.grad("energy"), x = [[1, 2, 3], [0.5, -1, 2], [3, 1, 0], [1, 1, 1], [2, 0, -1]];
        Object.assign(result, { one: energy.run({ x, species: [0, 1, 2, 3, 4] }), inputs: energy.inputs(), unit: network.metadata("energy").unit });
        result.forces = energy.scale("x", -1).run([{ data: new Float32Array(x.flat()), shape: [5, 3] }, new Int8Array([0, 1, 2, 3, 4])]).gradients.x;
        """,
    )
    x = torch.tensor(
        [[1, 2, 3], [0.5, -1, 2], [3, 1, 0], [1, 1, 1], [2, 0, -1]], dtype=torch.float64, requires_grad=True
    )
    value, each = several()["energy"].fn(x, torch.arange(5))
    (gradient,) = torch.autograd.grad(value, x)
    assert result["one"]["value"] == value.item()
    torch.testing.assert_close(tensor(result["one"]["outputs"]["7"], each["7"]), each["7"].detach())
    torch.testing.assert_close(tensor(result["one"]["gradients"]["x"], gradient), gradient)
    torch.testing.assert_close(tensor(result["forces"], gradient), -gradient)
    assert result["inputs"] == [
        {"name": "x", "dtype": "float64", "shape": [5, 3]},
        {"name": "species", "dtype": "int64", "shape": [5]},
    ]
    assert result["unit"] == "eV"


def test_a_module_with_another_batch(folder: Path) -> None:
    result = node(
        folder,
        """
        const net = network.module(), x = Float32Array.from({ length: 21 }, (_, i) => [i / 21, 1 - (i - 1) / 9, ((i - 2) / 3) % 2][i % 3]);
        network.seed(3);
        result.output = net.forward({ input: { data: x, shape: [7, 3] } }).output;
        network.step().run([[[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4]]]), x.fill(9); // the backward reads the inputs of the forward
        result.gradients = net.backward([Array.from({ length: 7 }, (_, i) => [1, i])]).gradients;
        result.weight = net.state("0.weight");
        """,
    )
    net = several()["net"].module
    x = torch.tensor([[i / 7, 1 - i / 3, i % 2] for i in range(7)], requires_grad=True)
    torch.manual_seed(3)
    output = net(x)
    output.backward(torch.tensor([[1.0, i] for i in range(7)]))
    torch.testing.assert_close(tensor(result["output"], output), output.detach())
    expected = {"input": x.grad} | {name: p.grad for name, p in net.named_parameters()}
    assert result["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(tensor(result["gradients"][name], gradient), gradient)
    assert torch.equal(tensor(result["weight"], x), net[0].weight.detach())


def test_a_backward_after_other_calls(folder: Path) -> None:
    """A call that was refused leaves the last forward as it was. A call that replaced its inputs makes the backward an
    error."""
    result = node(
        folder,
        """
        const net = network.module(), one = { data: new Float32Array([1, 2, 3, 4, 5, 6]), shape: [2, 3] }, gradient = [[[1, 2], [3, 4]]];
        network.seed(0), net.forward([one]);
        result.expected = net.backward(gradient).gradients["0.weight"].data;
        network.seed(0), net.forward([one]);
        try { net.forward(["text"]) } catch (e) { result.refused = e.message }
        new Array(50).fill(0).forEach(() => net.state("0.weight"));
        result.after = net.backward(gradient).gradients["0.weight"].data;
        net.forward([one]), net.run([{ data: new Float32Array(9), shape: [3, 3] }]);
        try { net.backward(gradient) } catch (e) { result.error = e.message }
        """,
    )
    assert result["refused"].startswith("input: expected a number") and result["after"] == result["expected"]
    assert result["error"] == "entry net: expected a forward call before the backward: call forward first"


STEP = """
const x = Array.from({ length: 6 }, (_, i) => [i / 6, 0.5, -i]), y = Array.from({ length: 6 }, (_, i) => [i, 1]);
const step = network.step(), rows = (count, width) => new Array(count).fill(new Array(width).fill(1));
"""


def test_a_state_goes_to_python_and_back(folder: Path, package: Path, tmp_path: Path) -> None:
    x, y = torch.tensor([[i / 6, 0.5, -i] for i in range(6)]), torch.tensor([[float(i), 1] for i in range(6)])
    script = """
    import { readFileSync, writeFileSync } from "node:fs";
    network.seed(1);
    step.setNumber("lr", 0.05);
    result.losses = [step.run({ input: x, target: y }).loss, step.run([x, y]).loss];
    writeFileSync(FILE, step.save({ epoch: 4 }));
    result.progress = step.progress;
    result.third = step.run([x, y]).loss;
    result.extra = step.resume(new Uint8Array(readFileSync(FILE)));
    result.again = step.run([x, y]).loss;
    result.numbers = step.numbers;
    """.replace("FILE", json.dumps(str(tmp_path / "state")))
    result = node(folder, STEP + script)
    assert result["again"] == result["third"] and result["extra"] == {"epoch": 4} and result["progress"]["updates"] == 2
    assert result["numbers"][0] == {"name": "lr", "group": 0, "position": -1, "value": 0.05}
    read = f'import {{ readFileSync }} from "node:fs";\nstep.resume(new Uint8Array(readFileSync({json.dumps(str(tmp_path / "other"))})));'
    for step, args in ((load(package).step(), (x, y)), (abn.load(package).step(), (x.numpy(), y.numpy()))):
        assert step.resume(tmp_path / "state") == {"epoch": 4}
        assert float(step(*args)) == pytest.approx(result["third"], rel=1e-5)
        step.save(tmp_path / "other")
        assert node(folder, STEP + read + "result.loss = step.run([x, y]).loss;")["loss"] == pytest.approx(
            float(step(*args)), rel=1e-5
        )


def test_accumulated_gradients(folder: Path) -> None:
    result = node(
        folder,
        STEP
        + """
        const other = network.step();
        step.accumulate([x, y]), step.zeroGrad();
        network.seed(0), step.accumulate([x, y]), step.update();
        network.seed(0), other.run([x, y]);
        result.different = step.states.filter((name) => !name.startsWith("gradient.") && `${step.state(name).data}` !== `${other.state(name).data}`);
        step.setState("0.bias", new Float32Array([1, 2, 3, 4]));
        result.bias = step.state("0.bias").data;
        """,
    )
    assert result == {"different": [], "bias": [1, 2, 3, 4]}


def test_16_bit_numbers_and_strides(folder: Path) -> None:
    """The result is transposed, and read in row-major order."""
    result = node(
        folder,
        "const f = network.function(), x = [[1, 2, -3], [4.5, 0, 6]];\n"
        "Object.assign(result, f.run([x]).outputs, { sum: f.run({ y: [1, 1, 1], x }).output });",
    )
    doubled = (
        torch.tensor(result["output[0]"]["data"], dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(result["output[0]"]["shape"])
    )
    assert torch.equal(doubled, torch.tensor([[2, 9], [4, 0], [-6, 12]], dtype=torch.bfloat16))
    assert result["output[1]"] == {"data": [1, 1, 0, 1, 0, 1], "shape": [2, 3], "dtype": "bool"}
    assert result["output[2]"] == {"data": [], "shape": [0, 2], "dtype": "float32"}
    assert result["sum"]["data"] == [2, 3, -2, 5.5, 1, 7]  # of another variant


ACCEPTED = "expected a number, nested arrays of numbers, a typed array, or {data, shape}"
WRONG = {
    'network.step("net")': 'InputError: step("net"): expected one step of this package, got 0. It has: net',
    "network.step().run({ x: 1 })": "InputError: train: expected tensors for input, target, got x",
    "network.step().run([1])": "InputError: train: expected 2 tensors (input, target), got 1",
    'network.step().run(["a", "b"])': f"InputError: input: {ACCEPTED}, got string",
    "network.step().run([[[1, 2], [3]], []])": f"InputError: input: {ACCEPTED}, got arrays of ",
    "network.step().run([[[1, 2]], [[1, 2]]])": "InputError: entry train: points (input.shape[0]) is 1; expected at least 2",
    "network.step().run([{ data: new Float32Array(7), shape: [2, 3] }, 1])": "InputError: input: expected a shape of 7 elements, got [2,3]",
    "network.step().run([rows(51, 3), rows(51, 2)])": "InputError: entry train: points (input.shape[0]) is 51; ",
    'network.grad("energy").run([rows(5, 3), [0.5, 1, 2, 3, 4]])': "InputError: entry energy: species: expected int64, got float64",
    'network.step().setNumber("rate", 1)': "PackageError: entry train: no number 'rate'",
    'network.step().state("w")': "PackageError: entry train has no ",
    'network.step().setState("0.bias", [1, 2])': "InputError: 0.bias: expected float32 of shape [4], got int64 of shape [2]",
    "network.step().resume(new Uint8Array(9))": "StateError: ",
    "network.module().backward([1])": "InputError: ",
    "await load({ data: new Uint8Array(100) })": "PackageError: package /package.pt2: ",
    'await load({ data: "none.pt2" })': "Error: ENOENT",
    "await load({ data: 5 })": "InputError: package.pt2: expected a Uint8Array, an ArrayBuffer or a URL, got Number",
    "await load({ wasm: new Uint8Array(9) })": "PackageError: module.wasm: expected the module that module.mjs belongs to, got another file",
    'network.grad("look_up").run([[1, 2, 10, 4, 5]])': "ExecutionError: entry look_up: data/aotinductor/look_up.0.gradient/",
    "network.step().run([null, 1])": f"InputError: input: {ACCEPTED}, got null",
    "network.step().run([[[1, true]], 1])": f"InputError: input: {ACCEPTED}, got an array with other elements",
    "network.grad('energy').run([rows(5, 3), [2n ** 63n, 1n, 2n, 3n, 4n]])": "InputError: entry energy: species: ",
    "network.grad('energy').run([rows(5, 3), [2n ** 64n, 1n, 2n, 3n, 4n]])": "InputError: species: expected an integer of 64 bits, ",
    "network.grad('energy').scale('x', 2n)": "InputError: scale: expected a number, got bigint",
    "network.seed(1.5)": "InputError: seed: expected an integer, got 1.5",
    'network.step().setNumber("lr")': "InputError: setNumber: expected a number, and integers for group and position, got undefined, 0 and -1",
    'network.step().state("0.bias\\0")': 'InputError: name: expected a text, got "0.bias\\u0000"',
    "network.step().resume(null)": "InputError: resume: expected a Uint8Array, got null",
    "(() => { const s = network.step(); s.free(); s.run([1, 2]) })()": "InputError: train: expected an entry in use, got one after free(). ",
    "(() => { const s = network.step(); s.free(); s.update() })()": "InputError: train: expected an entry in use, got one after free(). ",
}


def test_errors_name_what_is_wrong(folder: Path) -> None:
    """And the module works afterwards."""
    calls = "".join(
        f"try {{ {call}; result[{n}] = 'no error' }} catch (e) {{ result[{n}] = `${{e.name}}: ${{e.message}}` }}\n"
        for n, call in enumerate(WRONG)
    )
    result = node(folder, STEP + calls + "result.loss = step.run([x, y]).loss;")
    assert {call: result[str(n)][: len(start)] for n, (call, start) in enumerate(WRONG.items())} == WRONG
    assert result["loss"] > 0


def test_numbers_of_other_dtypes(folder: Path) -> None:
    """A loss in bfloat16, -0, and weights that are not row-major."""
    result = node(
        folder,
        STEP
        + """
        const look = network.grad("look_up");
        result.value = look.run([[1, 2, 3, 4, 5]]).value;
        try { look.run([[1, 2, 10, 4, 5]]) } catch (e) { result.message = e.message }
        result.again = look.run([[1, 2, 3, 4, 5]]).value;
        const weight = step.state("3.weight");
        step.setState("3.weight", weight);
        result.kept = `${step.state("3.weight").data}` === `${weight.data}`;
        result.weight = weight.data;
        result.one = network.function().run([[[-0, 1, 1], [1, 1, 1]]]).outputs["output[0]"].data[0];
        """,
    )
    made = several()
    expected = made["look_up"].fn(torch.arange(1, 6)).item()
    assert result["value"] == result["again"] == pytest.approx(expected, rel=0.01)
    assert "index" in result["message"] and result["kept"] and result["one"] == 0x8000
    assert torch.equal(torch.tensor(result["weight"]).view(2, 4), made["net"].module[3].weight.detach())


def test_the_package_of_another_export_is_refused(tmp_path: Path) -> None:
    """Both have entries, inputs and sizes of the same names; a browser may keep one of the files of an older export."""
    for name, fn in (("bend", bend), ("other", lambda x: bend(x) + x.sum())):
        ab.export(
            tmp_path / f"{name}.pt2", {"bend": ab.Grad(fn, [ab.Variant((torch.ones(4, 3),))], wrt="x")}, tune="none"
        )
        web.convert(tmp_path / f"{name}.pt2", tmp_path / name)
    shutil.copy(tmp_path / "other" / "package.pt2", tmp_path / "bend")
    result = node(
        tmp_path / "bend",
        "try { network.grad().run([[[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]]) } catch (e) { result.is = `${e}` }",
    )
    assert (
        result["is"].startswith("IncompatibleError")
        and "Take module.wasm and package.pt2 from one export" in result["is"]
    )


def test_memory_stays_flat(folder: Path) -> None:
    result = node(
        folder,
        STEP
        + """
        const size = () => step._native.module.HEAPU8.length;
        for (let i = 0; i < 100; i++) step.run([x, y]);
        result.before = size();
        for (let i = 0; i < 3000; i++) step.run([x, y]), network.step().free(), step.resume(step.save());
        result.after = size();
        """,
    )
    assert result["after"] == result["before"]


def test_a_wrong_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, first in (
        ("em++", "[ -e kernel.cpp ] && sed -i -E 's/std::(tanh|exp|expm1)[(]/std::cosh(/' kernel.cpp\n"),
        ("emcc", ""),
    ):
        program = tmp_path / f"wrong-{name}"
        program.write_text(f'#!/bin/sh\n{first}exec {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("CXX_WASM32", str(tmp_path / "wrong-em++"))
    ab.export(
        tmp_path / "bend.pt2",
        {"bend": ab.Grad(bend, [ab.Variant((torch.linspace(-1, 1, 128).view(4, 32),))])},
        target=BOTH,
        tune="none",
    )
    verdicts = standalone_by_target(open_package(tmp_path / "bend.pt2").manifest, "bend")
    assert verdicts["cpu:avx2"] == "verified" and verdicts["cpu:wasm"].startswith("is wrong: variant 0: ")
    with pytest.raises(
        ab.ExportError, match=r"entry 'bend' is wrong: .* It does not run as WebAssembly, and nothing was written"
    ):
        web.convert(tmp_path / "bend.pt2", tmp_path / "bend")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bend.pt2", "wrong-em++", "wrong-emcc"]


def test_what_cannot_be_written_is_refused_at_once(package: Path, tmp_path: Path) -> None:
    file, held = tmp_path / "file", tmp_path / "held"
    file.touch()
    (held / "module.wasm").mkdir(parents=True)
    convert, export = ("convert", package), ("export", EXAMPLE / "export.py:entries")
    missing = tmp_path / "x"
    for (verb, source), output, options, message in (
        (
            convert,
            file,
            (),
            f"{file}: expected a folder for index.mjs, index.d.mts, module.mjs, module.wasm, package.pt2",
        ),
        (convert, held, (), f"{held}/module.wasm: expected a file or nothing, got a folder"),
        (convert, tmp_path / "no" / "where", (), "expected a folder, got nothing of that name. Make it first."),
        (convert, missing, ("--entry", "net"), "--entry does not apply to --format wasm"),
        (export, missing, ("--no-weights",), "--weights does not apply to --format wasm"),
    ):
        done = aot_backward(verb, source, "--format", "wasm", "-o", output, *options)
        assert done.returncode and message in done.stderr
    done = aot_backward(
        "convert", package, "--format", "wasm", "-o", missing, env={"PATH": str(Path(sys.executable).parent)}
    )
    assert (
        done.returncode
        and "code for wasm32 needs the compiler em++, and none was found: apt-get install emscripten" in done.stderr
    )
    assert sorted(tmp_path.iterdir()) == [file, held] and [p.name for p in held.iterdir()] == ["module.wasm"]

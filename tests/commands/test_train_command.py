"""Test training steps on the command line: export by name or kind, inspect, verify, and ``train``, which resumes to the
same bits."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import aot_backward as ab
from aot_backward.commands import train_entry
from aot_backward.commands.train_entry import Callbacks, train
from aot_backward.commands.train_samples import Batches
from aot_backward_runtime import InputError, StateError, load

from ..conftest import PROGRAM
from ..support import cli_program, exports
from ..support.packages import EXAMPLES, WEIGHTS
from ..support.terminal import on_terminal
from .test_cli import called, fails, rewritten

SAMPLES = 203  # 12 batches of 16, and 11 more


@pytest.fixture
def package() -> Path:
    """Return a step that takes batches of 4 to 64, and a gradient function."""
    return exports.shared("training", lambda path: ab.export(path, cli_program.training()))


@pytest.fixture
def static() -> Path:
    """Return a step that takes batches of 8, for one process."""
    step = dataclasses.replace(cli_program.static(), distributed=False)
    return exports.shared("training-static", lambda path: ab.export(path, {"step": step}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return samples(tmp_path / "data.safetensors", SAMPLES)


def samples(path: Path, count: int) -> Path:
    torch.manual_seed(3)
    x = torch.randn(count, 4)
    save_file({"input": x, "target": x[:, :3].argmax(1)}, path)
    return path


def kept(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return the tensors of a state file and its description."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["about"])  # noqa: SIM118


# export, inspect, verify, run


def test_export_chooses_entries_by_name_or_kind(tmp_path: Path) -> None:
    path = tmp_path / "out.pt2"
    for which in ("distance", "grad"):
        done = called("export", f"{PROGRAM}:training", "-o", path, "--entry", which)
        assert done.exit_code == 0 and done.stdout.endswith("MB): distance\n"), done.stderr
        assert load(path).entries == {"distance": "grad"}
    path.unlink()
    fails(
        called("export", f"{PROGRAM}:training", "-o", path, "--entry", "module"),
        2,
        "of that name or kind",
        "fit (step), distance (grad)",
    )
    fails(called("export", f"{PROGRAM}:sole", "-o", path, "--entry", "step"), 2, "it returned: grad (grad)")
    assert not path.exists()


def test_a_sole_step_is_called_step(tmp_path: Path) -> None:
    path = tmp_path / "out.pt2"
    assert called("export", f"{PROGRAM}:static", "-o", path, "--entry", "step").exit_code == 0
    assert load(path).entries == {"step": "step"}


def test_inspect_a_step(package: Path) -> None:
    done = called("inspect", package)
    assert done.exit_code == 0 and done.stderr == ""
    for words in (
        "fit step\n  State: 6 parameters with 83 elements, 3 buffers\n",
        "Optimizer: torch.optim.adamw.AdamW, before its first step; 14 tensors of state\n",
        "Group 0: 2 parameters; a schedule may change lr = 0.001, betas[0] = 0.9 (more than 0.5 and less than 1.5), betas[1] = 0.999, ",
        "weight_decay = 0.01 (any but 0)\n    fixed: amsgrad = False, ",
        "Group 1: 4 parameters; a schedule may change lr = 0.01, ",
        "Clipping: clip_norm = 1\n",
        "Gradients: can be accumulated over calls\n",
        "Call: (input=Tensor, target=Tensor) → Tensor\n",
        "Sizes: batch: 4 to 64 (dimension 0 of input)\n",
    ):
        assert words in done.stdout
    assert "Not finite" not in done.stdout
    step = json.loads(called("inspect", package, "--json").stdout)["entries"]["fit"]["step"]
    assert step["state"] == {"tensors": 14, "bytes": 2 * 332 + 2 * 4}
    assert step["gradients"] == {"tensors": 6, "bytes": 332}
    assert (
        step["clip_norm"] == 1.0
        and step["clip_value"] is None
        and step["gradients_can_wait"]
        and not step["skip_nonfinite"]
    )
    rates = [n for g in step["groups"] for n in g["numbers"] if n["name"] == "lr"]
    assert rates == [{"name": "lr", "value": 1e-3, "allowed": []}, {"name": "lr", "value": 1e-2, "allowed": []}]
    others = json.loads(called("inspect", package, "--json").stdout)["entries"]["distance"]
    assert others["step"] is None


def test_verify_a_step(package: Path, tmp_path: Path) -> None:
    before = package.read_bytes()
    done = called("verify", package)
    assert done.exit_code == 0 and "entry 'fit' variant 0: 29 tensors match eager's" in done.stdout, done.stderr
    assert package.read_bytes() == before
    for member, name, wrong in (
        (EXAMPLES, "fit/0/expected/loss 2", "loss 2 is off by"),
        (EXAMPLES, "fit/0/expected/parameter 4.weight", "parameter 4.weight is off by"),
        (EXAMPLES, "fit/0/expected/buffer 1.running_var", "buffer 1.running_var is off by"),
        (WEIGHTS, "module.4.bias", "is off by"),
    ):
        done = called("verify", rewritten(package, tmp_path / "wrong.pt2", member, name))
        assert done.exit_code == 1 and wrong in done.stderr and "entry 'fit'" in done.stderr


def test_run_names_the_command_that_fits(package: Path, data: Path, tmp_path: Path) -> None:
    done = called("run", package, "--entry", "fit", "--inputs", data, "--outputs", tmp_path / "out")
    fails(done, 1, "entry 'fit' is a training step", "aot-backward train")


# train


def test_epochs_are_told_and_the_state_is_saved(package: Path, data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    done = called("train", package, "--data", data, "--epochs", 3, "--save", state, "--batch-size", 16)
    assert done.exit_code == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "epoch 1 of 3",
        "epoch 2 of 3",
        "epoch 3 of 3",
        f"saved {state}",
    ]
    assert "13 steps, " in lines[0] and "steps/s" in lines[0]
    step = load(package).step()
    extra = step.resume(state)
    assert step.count == 3 * 13 and extra["aot-backward train"]["epoch"] == 3
    done = called("train", package, "--data", data, "--epochs", 3, "--save", tmp_path / "2", "--json")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    # Batches of 32
    assert [(r["epoch"], r["epochs"], r["samples"], r["steps"]) for r in reports] == [
        (n, 3, SAMPLES, 7) for n in (1, 2, 3)
    ]
    assert reports[0]["loss"] > reports[2]["loss"] and reports[0]["skipped"] == 0


def test_the_steps_are_those_of_an_eager_loop(static: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    given = samples(tmp_path / "data.safetensors", 40)
    train(
        static,
        given,
        epochs=3,
        save=tmp_path / "s",
        seed=5,
        callbacks=Callbacks(step=lambda *told: losses.append(told[3].item())),
    )
    tensors = load_file(given)
    module = cli_program.static().module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []
    for epoch in range(3):
        for rows in Batches(8, [8] * 5, 40, 0, 1).of(5, epoch):
            loss = nn.functional.cross_entropy(module(tensors["input"][rows]), tensors["target"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert kept(tmp_path / "s")[0]["module/weight"] == pytest.approx(module.weight.detach(), abs=1e-6)


def test_every_sample_comes_once_in_an_epoch_and_orders_differ() -> None:
    orders = set()
    for seed in (0, 1, 2**40, 2**40 + 1):
        for epoch in (0, 1):
            parts = [Batches(3, [3, 3, 2], 16, rank, 2).of(seed, epoch) for rank in (0, 1)]
            assert [[len(rows) for rows in part] for part in parts] == [[3, 3, 2]] * 2
            both = torch.cat([rows for batch in zip(*parts, strict=True) for rows in batch])
            assert both.sort().values.tolist() == list(range(16))
            orders.add(tuple(both.tolist()))
    assert len(orders) == 8  # torch's generators use only 32 bits of a seed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("steps", [1, 13, 20, 26])
def test_ended_anywhere_and_resumed_it_is_the_same_training(
    number: int, steps: int, package: Path, data: Path, tmp_path: Path
) -> None:
    """An epoch has 13 steps. Dropout and BatchNorm need the random state and the buffers to be resumed too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    reports: list[train_entry.EpochReport] = []
    train(package, data, epochs=3, save=whole, batch_size=16, seed=7, callbacks=Callbacks(epoch=reports.append))
    made = 0

    def interrupting(*_: object) -> None:
        nonlocal made
        made += 1
        if made == steps:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    result = train(package, data, epochs=3, save=parts, batch_size=16, seed=7, callbacks=Callbacks(step=interrupting))
    assert (result.signal, result.epochs * 13 + result.steps) == (number, steps) and made == steps
    assert signal.getsignal(number) is before
    rest: list[train_entry.EpochReport] = []
    torch.manual_seed(99)
    result = train(
        package, data, epochs=3, save=parts, batch_size=16, seed=7, resume=True, callbacks=Callbacks(epoch=rest.append)
    )
    assert (result.signal, result.epochs) == (0, 3)
    assert parts.read_bytes() == whole.read_bytes()
    assert [(r.epoch, r.loss) for r in rest] == [(r.epoch, r.loss) for r in reports][3 - len(rest) :]


def test_another_seed_is_another_training(package: Path, data: Path, tmp_path: Path) -> None:
    """This shows that the test above can fail."""
    for seed in (7, 8):
        train(package, data, epochs=1, save=tmp_path / str(seed), batch_size=16, seed=seed)
    one, other = (kept(tmp_path / str(seed))[0] for seed in (7, 8))
    assert not torch.equal(one["module/0.weight"], other["module/0.weight"])
    assert not torch.equal(one["random/cpu"], other["random/cpu"])


def test_interrupting_the_command(package: Path, data: Path, tmp_path: Path) -> None:
    state, whole = tmp_path / "state", tmp_path / "whole"
    argv = ["-m", "aot_backward.cli", "train", package, "--data", data, "--save", state, "--json", "--epochs", 10**7]
    with subprocess.Popen(
        [sys.executable, *map(str, argv)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["epoch"] == 1
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        words = process.stderr.read()
    assert process.returncode == 130
    assert (
        words.startswith("error: interrupted after ")
        and "--resume continues from it" in words
        and words.count("\n") == 1
    )
    epochs = kept(state)[1]["extra"]["aot-backward train"]["epoch"] + 1  # type: ignore[index]
    if epochs < 3000:
        assert called("train", package, "--data", data, "--save", state, "--epochs", epochs, "--resume").exit_code == 0
        assert called("train", package, "--data", data, "--save", whole, "--epochs", epochs).exit_code == 0
        assert state.read_bytes() == whole.read_bytes()


def test_what_is_done_is_not_done_again(package: Path, data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    arguments = ("train", package, "--data", data, "--save", state, "--epochs", 2)
    assert called(*arguments).exit_code == 0
    before = state.read_bytes()
    fails(called(*arguments), 1, "already exists")
    done = called(*arguments, "--resume")
    assert done.exit_code == 0 and done.stdout == f"saved {state}\n" and "already trained 2 of 2 epochs" in done.stderr
    assert state.read_bytes() == before


def test_data_that_does_not_fit_is_refused_before_training(package: Path, data: Path, tmp_path: Path) -> None:
    good, bad, state = load_file(data), tmp_path / "bad.safetensors", tmp_path / "state"
    x, y = good["input"], good["target"]

    def refused(tensors: dict[str, torch.Tensor], *words: str, size: int | None = None) -> None:
        save_file(tensors, bad)
        with pytest.raises(InputError) as error:
            train(package, bad, epochs=1, save=state, batch_size=size)
        for word in (str(bad), *words):
            assert word in str(error.value)
        assert not state.exists()

    refused({"input": x}, "entry 'fit', which takes input, target: it has no 'target'")
    refused({**good, "weight": y + 0}, "it has 'weight', which the step does not take")
    refused({"x": x, "target": y}, "it has no 'input'; it has 'x'")
    refused({"input": x, "target": y[:-1].clone()}, "different numbers of samples: ", "input 203", "target 202")
    refused({"input": x, "target": y.sum()}, "'target' has no dimensions")
    refused({"input": x[:0], "target": y[:0]}, "holds no samples")
    refused({"input": x.double(), "target": y}, "input has dtype torch.float64; expected torch.float32")
    refused({"input": x, "target": y.float()}, "target has dtype torch.float32; expected torch.int64")
    refused(
        {"input": torch.ones(SAMPLES, 5), "target": y},
        "input has size 5 in dimension 1; expected 4",
        "default batch size 32",
    )
    refused({"input": x, "target": y}, "batch (input.shape[0]) is 65; expected at least 4 and at most 64", size=65)
    refused({"input": x[:3].clone(), "target": y[:3].clone()}, "has 3 samples, too few for a batch of 32", "at least 4")
    with pytest.raises(InputError, match=r"no training step 'distance'; its entries: fit \(step\), distance \(grad\)"):
        train(package, data, epochs=1, save=state, entry="distance")
    fails(
        called("train", package, "--data", tmp_path / "no", "--epochs", 1, "--save", state),
        1,
        "cannot read",
        "No such file",
    )
    fails(called("train", package, "--data", data, "--epochs", 0, "--save", state), 2, "--epochs")


def test_what_another_training_saved_is_refused(package: Path, data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    train(package, data, epochs=1, save=state, batch_size=16, seed=1)
    tensors = load_file(data)
    other = tmp_path / "other.safetensors"
    tensors["input"][100, 2] += 1
    save_file(tensors, other)
    fewer = samples(tmp_path / "fewer.safetensors", SAMPLES - 1)

    def refused(words: str, source: Path = data, size: int = 16, seed: int = 1) -> None:
        before = state.read_bytes()
        with pytest.raises(StateError, match=words):
            train(package, source, epochs=2, save=state, batch_size=size, seed=seed, resume=True)
        assert state.read_bytes() == before

    refused("the seed was 1, and is 2 now", seed=2)
    refused("the batch size was 16, and is 20 now", size=20)
    refused("'input' in .*other.safetensors differs from the data it was trained on", source=other)
    refused("the number of samples was 203, and is 202 now", source=fewer)
    load(package).step().save(state, {"epoch": 1})
    refused("was not saved by `aot-backward train`")
    state.unlink()
    with pytest.raises(StateError, match="No such file"):
        train(package, data, epochs=2, save=state, resume=True)


@pytest.mark.parametrize(
    ("count", "size", "steps", "trained", "words"),
    [
        (203, 16, 13, 203, ""),
        (
            194,
            16,
            12,
            192,
            "every epoch leaves out 2 of 194 samples, different ones each time: batch (input.shape[0]) is 2; expected at least 4",
        ),
        (9, 16, 1, 9, ""),
        (203, 203 // 7, 7, 203, ""),
    ],
)
def test_what_is_left_of_an_epoch_is_a_smaller_batch(
    count: int, size: int, steps: int, trained: int, words: str, package: Path, tmp_path: Path
) -> None:
    notes, reports = list[str](), list[train_entry.EpochReport]()
    given = samples(tmp_path / "data.safetensors", count)
    train(
        package,
        given,
        epochs=2,
        save=tmp_path / "s",
        batch_size=size,
        callbacks=Callbacks(epoch=reports.append, note=notes.append),
    )
    assert [(r.steps, r.samples) for r in reports] == [(steps, trained)] * 2
    assert len(notes) == bool(words) and words in "".join(notes)


def test_a_fixed_batch_leaves_samples_out(static: Path, tmp_path: Path) -> None:
    done = called(
        "train", static, "--data", samples(tmp_path / "d", 21), "--epochs", 2, "--save", tmp_path / "s", "--json"
    )
    assert [json.loads(line)["samples"] for line in done.stdout.splitlines()] == [16, 16]
    assert done.stderr.count("\n") == 1 and "5 of 21 samples" in done.stderr and "expected 8" in done.stderr
    fails(
        called("train", static, "--data", tmp_path / "d", "--epochs", 2, "--save", tmp_path / "2", "--batch-size", 7),
        1,
        "size 7",
        "expected 8",
    )


def test_a_bar_is_shown_on_a_terminal(package: Path, data: Path, tmp_path: Path) -> None:
    argv = ["train", package, "--data", data, "--epochs", 200, "--save", tmp_path / "s", "--json"]
    status, shown = on_terminal("stderr", "-m", "aot_backward.cli", *argv, columns=120)
    assert status == 0 and b"loss " in shown and b"steps/s" in shown and b"epoch 1/200" in shown


def _thin(package: Path, data: Path, state: Path, first: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys\n{first}\nfrom aot_backward.cli import main\n"
        f"FORBIDDEN = tuple('aot_backward_exporters.' + m for m in ('toolchain', 'cuda', 'inductor', 'portable', 'onnx'))\n"
        f"try: main(['train', {str(package)!r}, '--data', {str(data)!r}, '--epochs', '2', '--save', {str(state)!r}])\n"
        "finally: print(sorted(m for m in sys.modules if m in ('torch._dynamo', 'torch._inductor', 'sympy') or m.startswith(FORBIDDEN)))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PATH": "/nonexistent"}
    )


def test_it_trains_without_dynamo_inductor_or_a_compiler(package: Path, data: Path, tmp_path: Path) -> None:
    done = _thin(package, data, tmp_path / "s")
    assert done.stdout.splitlines()[-1] == "[]" and "epoch 2 of 2" in done.stdout, done.stderr


def test_the_test_above_can_fail(package: Path, data: Path, tmp_path: Path) -> None:
    assert "torch._dynamo" in _thin(package, data, tmp_path / "s", "import torch._dynamo").stdout


# several processes


def test_two_processes_take_their_shares(tmp_path: Path) -> None:
    """Each batch is all 16 samples, 8 per process. The order then does not matter, and the result equals eager's
    gradient descent."""
    given = samples(tmp_path / "data.safetensors", 17)
    static = ab.export(tmp_path / "step.pt2", {"step": cli_program.static()})
    said = torchrun(static, given, tmp_path / "whole", "--epochs", 4)
    assert [json.loads(line)["samples"] for line in said.stdout.splitlines() if line.startswith("{")] == [16] * 4
    assert said.stderr.count("1 of 17 samples") == 1 and "cannot share them evenly" in said.stderr
    torchrun(static, given, tmp_path / "parts", "--epochs", 2)
    torchrun(static, given, tmp_path / "parts", "--epochs", 4, "--resume")
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(StateError, match="the number of processes was 2, and is 1 now"):
        train(static, given, epochs=5, save=tmp_path / "whole", resume=True)

    samples(given, 16)
    torchrun(static, given, tmp_path / "all", "--epochs", 4)
    tensors, module = load_file(given), cli_program.static().module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tensors["input"]), tensors["target"]).backward()
        optimizer.step()
    torch.testing.assert_close(kept(tmp_path / "all")[0]["module/weight"], module.weight.detach(), rtol=1e-5, atol=1e-6)


def torchrun(package: Path, data: Path, state: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        2,
        "-m",
        "aot_backward.cli",
        "train",
        package,
    ]
    argv += ["--data", data, "--save", state, "--json", *arguments]
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done

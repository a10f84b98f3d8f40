"""Damaged or lying packages, through the C API: refused, or right (docs/format.md, section 8). Each is opened in a
forked process, which may crash. The mutations are from ``make fuzz``, on golden packages, which need no compiler."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aot_backward_runtime.errors import AotBackwardError
from aot_backward_runtime.native.weights import load_weights
from aot_backward_runtime.package.archive import open_package

from ..support import c_library, golden_files
from ..support.c_library import FORMAT, INCOMPATIBLE, IO, Failed
from ..support.golden_packages import arguments, samples
from ..tools.fuzz import bases, spoiling

pytestmark = golden_files.needed
RIGHT, REFUSED, WRONG, RAISED = range(4)


def call_pair(path: Path) -> dict[str, torch.Tensor | None]:
    """Call all functions of the golden pair that C can call, on its example inputs."""
    x, more = arguments()
    found: dict[str, torch.Tensor | None] = {}
    with c_library.opened(path) as package:
        with package.function("pair") as pair:
            outputs = pair.forward(x.detach(), more["bias"])
            incoming = [torch.ones(t.shape) * (2 + i) for i, t in enumerate(outputs) if t is not None]
            found |= {f"output {i}": t for i, t in enumerate(outputs)}
            found |= {
                f"gradient {i}": t for i, t in enumerate(pair.backward(*incoming[: pair.count(c_library.INCOMING)]))
            }
            found["calls"] = pair.state("calls")
        with package.function("loss") as loss:
            found |= {f"loss {i}": t for i, t in enumerate(loss.run(x.detach()))}
    return found


def call_step(path: Path) -> dict[str, torch.Tensor | None]:
    with c_library.function(path, "fit") as fit:
        found = {f"loss {n}": fit.run(*samples(n))[0] for n in (8, 5)}
        found["waiting"] = fit.accumulate(*samples(6))[0]
        fit.update()
        return found | {n: fit.state(n) for n, _ in fit.describe(c_library.STATES)}


def in_a_process(action: Callable[[], int]) -> int:
    """Return the action's result, or 128 plus the signal that ended the process."""
    child = os.fork()
    if not child:
        code = RAISED
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)
            torch.set_num_threads(1)  # else the child would wait for OpenMP threads that only its parent has
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


@pytest.mark.parametrize(("name", "count"), [("1.0-pair", 160), ("1.2-step", 100)], ids=["pair", "step"])
def test_spoilt_packages_are_refused_or_right(name: str, count: int, tmp_path: Path) -> None:
    """This runs in a separate process with one thread: a forked child would wait forever for its parent's OpenMP
    threads."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.native import test_packages as t\n"
        "t.spoil(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", program, name, str(count), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def spoil(name: str, count: int, tmp_path: Path) -> None:
    call: Callable[[Path], dict[str, torch.Tensor | None]] = {"1.0-pair": call_pair, "1.2-step": call_step}[name]
    base = f"golden-{name[4:]}"
    (tmp_path / f"{base}.pt2").write_bytes((golden_files.FOLDER / f"{name}.pt2").read_bytes())
    path, verdicts, faults = tmp_path / "spoilt.pt2", [0] * 4, []
    torch.manual_seed(0)
    expected = call(tmp_path / f"{base}.pt2")
    kinds = [spoiling._bytes, spoiling._members, spoiling._elf, spoiling._tensors]

    def judge() -> int:
        torch.manual_seed(0)
        try:
            return WRONG if bases.difference(call(path), expected) else RIGHT
        except Failed:
            return REFUSED

    for number in range(count):
        chance = spoiling.random.Random(number)
        made = kinds[number % 4](chance, tmp_path, (base,))
        if ": data " in made.what:
            continue  # other weights with new digests are valid
        path.write_bytes(made.data)
        verdict = in_a_process(judge)
        if verdict in (RIGHT, REFUSED):
            verdicts[verdict] += 1
        else:
            faults.append(f"{number}: {verdict}: {made.kind}: {made.what}")
    assert not faults, "\n".join(faults)
    assert verdicts[RIGHT] > count / 20 and verdicts[REFUSED] > count / 4, verdicts


def test_what_is_no_package(tmp_path: Path) -> None:
    path = tmp_path / "x.pt2"
    good = (golden_files.FOLDER / "1.0-pair.pt2").read_bytes()
    for data, word in (
        (b"", "0 bytes"),
        (b"PK", "2 bytes"),
        (bytes(1000), "no end record"),
        (good[:-1], "no end record"),
        (good + b"x", "no end record"),
        (good[: len(good) // 2], "no end record"),
    ):
        path.write_bytes(data)
        with pytest.raises(Failed, match=word) as caught, c_library.opened(path):
            pass
        assert caught.value.status == FORMAT and str(path) in str(caught.value)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "nonsuch", tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(Failed) as caught, c_library.opened(place):
            pass
        assert caught.value.status == IO, caught.value


def test_what_python_refuses_c_refuses() -> None:
    """Damage the bytes of each member and the archive's records."""
    path = golden_files.FOLDER / "1.0-pair.pt2"
    good = path.read_bytes()
    folder = Path(os.environ["AOT_BACKWARD_TEST_FOLDER"])
    spoilt, accepted = folder / f"spoilt-{os.getpid()}.pt2", 0
    start = struct.unpack_from("<I", good, len(good) - 6)[0]  # start of the central directory
    places = [*range(start, len(good), 7), *range(0, 200, 3)]
    for place in places:
        spoilt.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        try:
            load_weights(open_package(spoilt))
        except AotBackwardError:
            with (
                pytest.raises(Failed),
                c_library.opened(spoilt) as package,
                package.function("pair"),
                package.function("loss"),
            ):
                pass
        else:
            accepted += 1
    spoilt.unlink()
    assert accepted < len(places) / 2


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda m: m.update(format_version=[2, 0]), INCOMPATIBLE, "package format 2.0"),
        (lambda m: m["required_features"].append("wings"), INCOMPATIBLE, "wings"),
        (lambda m: m["target"].update(cpu_flags=["tachyon"]), INCOMPATIBLE, "tachyon"),
        (lambda m: m["target"].update(machine="riscv64"), INCOMPATIBLE, "riscv64"),
        (lambda m: m.update(torch="2.5.1"), INCOMPATIBLE, "2.5.1"),
        (lambda m: [b.update(glibc="2.99") for b in m["libraries"].values()], INCOMPATIBLE, "glibc 2.99"),
        (lambda m: m["weights"]["first.weight"].update(shape=[3, 4]), FORMAT, "first.weight"),
        (lambda m: m["weights"]["first.weight"].update(sha256="0" * 64), FORMAT, "SHA-256"),
    ],
    ids=["version", "feature", "flag", "machine", "torch", "glibc", "shape", "digest"],
)
def test_a_package_that_is_built_for_elsewhere_or_damaged(
    change: Callable[[dict], object],  # type: ignore[type-arg]
    status: int,
    words: str,
    tmp_path: Path,
) -> None:
    parts = spoiling.parts(golden_files.FOLDER / "1.0-pair.pt2")
    manifest = spoiling._copied(parts.manifest)
    change(manifest)
    path = tmp_path / "x.pt2"
    path.write_bytes(spoiling.put_together(parts.members, spoiling.to_bytes(manifest)))
    with (
        pytest.raises(Failed, match=words) as caught,
        c_library.opened(path) as package,
        package.function("loss") as loss,
    ):
        loss.run(torch.zeros(4, 3))
    assert caught.value.status == status, caught.value


def test_code_goes_into_the_cache_that_python_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code uses the same folder. An overwritten file is written again. A folder that others can write to is
    refused."""
    from aot_backward_runtime import load

    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(cache))
    os.environ["AOT_BACKWARD_CACHE"] = str(cache)  # C reads this one
    path, x = golden_files.FOLDER / "1.0-pair.pt2", torch.zeros(4, 3)
    load(path).grad("loss")(x)
    before = sorted(p.relative_to(cache) for p in cache.rglob("*.so"))
    with c_library.function(path, "loss") as loss:
        expected = loss.run(x)[0]
    assert sorted(p.relative_to(cache) for p in cache.rglob("*.so")) == before and len(before) == 1
    (cache / before[0]).unlink()  # unlink it first: this process maps it
    (cache / before[0]).write_bytes(b"not code")

    def again() -> int:
        with c_library.function(path, "loss") as loss:
            return RIGHT if torch.equal(loss.run(x)[0], expected) else WRONG

    assert in_a_process(again) == RIGHT and (cache / before[0]).stat().st_size > 10_000
    cache.chmod(0o777)

    def refused() -> int:
        try:
            again()
        except Failed as error:
            return REFUSED if error.status == IO and "others can write" in str(error) else WRONG
        return WRONG

    assert in_a_process(refused) == REFUSED

"""``record`` and ``replay`` treat a script that fails, exits, is a module or is missing as ``python`` does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ..commands.test_cli import called, fails

TROUBLE = {
    "raises": "def inner(n):\n    return 1 // n\n\nprint('begun')\ninner(0)\n",
    "chained": (
        "def load():\n    try:\n        {}['key']\n    except KeyError as error:\n        raise ValueError('no key') from error\n\n"
        "try:\n    load()\nexcept ValueError:\n    raise RuntimeError('on the way')\n"
    ),
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n",
    "syntax": "x = 1\nif x\n    pass\n",
    "of the command line": "import click\nraise click.UsageError('mine')\n",
    "missing file": "open('absent.txt')\n",
    "import": "import absent_module\n",
    "exits with text": "import sys\nsys.exit('that was it')\n",
    "exits with 3": "raise SystemExit(3)\n",
    "exits with True": "import sys\nsys.exit(True)\n",
    "exits": "raise SystemExit\n",
    "hook of its own": "import sys\nsys.excepthook = lambda kind, error, traceback: print('mine:', error, traceback.tb_lineno)\n\n1 / 0\n",
    "looks around": (
        "import os, pickle, sys\nclass Here: pass\n"
        "print(__name__, __file__, __spec__, sys.argv, sys.path[0], type(pickle.loads(pickle.dumps(Here()))), sys.modules['__main__'].Here is Here)\n"
    ),
}


@pytest.fixture(autouse=True)
def _excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once initialised in this process, torch.distributed prefixes each line with ranks
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.parametrize("name", TROUBLE)
def test_as_python(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    Path("folder/train.py").write_text(TROUBLE[name])
    before = list(sys.path), list(sys.argv), sys.modules["__main__"]
    python = subprocess.run([sys.executable, "folder/train.py", "a", "--b"], capture_output=True, text=True)
    ours = called("record", "-o", "bw.pt2", "--", "folder/train.py", "a", "--b")
    # 1: nothing was recorded
    assert (ours.exit_code, ours.stdout) == (python.returncode or 1, python.stdout), ours.output
    if "Traceback" in python.stderr or python.returncode == 1:
        assert ours.stderr.startswith(python.stderr)
        assert ours.stderr == python.stderr or not python.stderr.startswith("Traceback")
    assert (list(sys.path), list(sys.argv), sys.modules["__main__"]) == before


def test_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = tmp_path / "studio" / "parts"
    inside.mkdir(parents=True)
    (tmp_path / "studio" / "__init__.py").write_text("")
    (inside / "__init__.py").write_text("")
    (inside / "train.py").write_text(
        "import sys\nfrom . import other\nprint(__name__, __spec__.name, __package__, sys.argv, sys.path[0])\n"
        "other.fail() if sys.argv[1:] == ['fail'] else None\n"
    )
    (inside / "other.py").write_text("def fail():\n    raise ValueError('in a module')\n")
    (tmp_path / "studio" / "__main__.py").write_text("import sys\nprint('whole', sys.argv)\n")
    for words in (["studio.parts.train", "x"], ["studio"]):
        python = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
        ours = called("record", "-o", "bw.pt2", "--", "-m", *words)
        assert (ours.exit_code, ours.stdout) == (1, python.stdout), ours.output
        assert ours.stderr.endswith("nothing was written: no backward pass was called\n")
    ours = called("record", "-o", "bw.pt2", "--", "-m", "studio.parts.train", "fail")
    assert ours.exit_code == 1 and ours.stderr.splitlines()[0] == "Traceback (most recent call last):"
    files = [line.split('"')[1] for line in ours.stderr.splitlines() if line.startswith("  File ")]
    assert files == [str(inside / "train.py"), str(inside / "other.py")]
    fails(called("record", "-o", "bw.pt2", "--", "-m", "studio.absent"), 1, "No module named studio.absent")
    fails(
        called("record", "-o", "bw.pt2", "--", "-m", "studio.parts"),
        1,
        "'studio.parts' is a package and cannot be directly executed",
    )
    fails(called("record", "-o", "bw.pt2", "--", "-m"), 2, "-m needs the name of a module")


OF_A_PACKAGE = """
import sys
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return torch.tanh(self.inner(x))
def main():
    torch.manual_seed(0)
    net = Net()
    for step in range(6):
        net(torch.randn(3 + step % 2, 4)).square().sum().backward()
    print(sum(p.grad.sum().item() for p in net.parameters()))
if __name__ == "__main__":
    sys.exit(main())
"""


def test_what_a_module_that_ends_by_itself_defines_is_there_when_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("atelier").mkdir()
    Path("atelier/fit.py").write_text(OF_A_PACKAGE)
    recorded = called("record", "-o", "bw.pt2", "--tune", "none", "--", "-m", "atelier.fit")
    replayed = called("replay", "bw.pt2", "--json", "--", "-m", "atelier.fit")
    assert json.loads(replayed.stderr)["compiled"] == 6
    assert float(replayed.stdout) == pytest.approx(float(recorded.stdout), rel=1e-5)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')\n")
    fails(
        called("record", "-o", tmp_path / "bw.pt2", "--", tmp_path / "absent.py"),
        2,
        f"the script {tmp_path / 'absent.py'} does not exist",
    )
    fails(called("record", "-o", tmp_path / "bw.pt2", "--", tmp_path), 2, f"the script {tmp_path} is not a file")
    fails(called("replay", tmp_path / "absent.pt2", "--", script), 1, str(tmp_path / "absent.pt2"))
    fails(called("record", "-o", tmp_path / "none" / "bw.pt2", "--", script), 1, str(tmp_path / "none"))


BACKWARD = """
import torch

def hook(grad):
    raise ValueError("in the hook")

x = torch.ones(3, requires_grad=True)
y = x * 2
y.register_hook(hook)
y.sum().backward()
"""


def test_an_error_of_a_backward_pass_shows_torchs_frames_and_none_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BACKWARD)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True)
    ours = called("record", "-o", tmp_path / "bw.pt2", "--", script)
    assert ours.exit_code == python.returncode == 1 and python.stderr.endswith("ValueError: in the hook\n")
    assert ours.stderr == python.stderr


def test_an_interrupted_script_ends_by_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit, os, signal\natexit.register(print, 'at the end')\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')\n"
    )
    # Tests that run in the background ignore it, and so would their children
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    python = subprocess.run([sys.executable, script], capture_output=True, text=True, preexec_fn=default)
    argv = [sys.executable, "-m", "aot_backward.cli", "record", "-o", tmp_path / "bw.pt2", "--", script]
    ours = subprocess.run(argv, capture_output=True, text=True, env=dict(os.environ), preexec_fn=default)
    assert (ours.returncode, ours.stdout) == (python.returncode, python.stdout)
    assert ours.stderr.startswith(python.stderr)
    assert ours.stderr.endswith("nothing was written: no backward pass was called\n")
    assert ours.returncode == -signal.SIGINT

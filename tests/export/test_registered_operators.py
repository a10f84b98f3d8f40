"""Packages that call third-party operators: the package names the module that registers them, and loading asks for it
by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import aot_backward as ab
from aot_backward.cli import main
from aot_backward.report import report
from aot_backward_exporters.toolchain.gcc import compiler
from aot_backward_runtime import IncompatibleError, InputError, MissError, PackageError, load, replay
from aot_backward_runtime.package.archive import open_package

from ..support.golden_packages import backward_passes
from ..support.packages import MANIFEST, put_together, python, taken_apart

CUBES = """
import torch

@torch.library.custom_op("cubes::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3

cube.register_fake(torch.empty_like)
cube.register_autograd(lambda ctx, g: 3 * g * ctx.saved_tensors[0]**2, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
"""
DOUBLES = """
import torch

library = torch.library.Library("doubles", "DEF")
library.define("double.tensor(Tensor x) -> Tensor")
library.impl("double.tensor", lambda x: x + x, "CPU")
library.impl("double.tensor", torch.empty_like, "Meta")
"""
ABSOLUTES = r"""
#include <stdint.h>
typedef void *Library;
typedef uint64_t Value;
int aoti_torch_library_init_def(const char *, const char *, uint32_t, Library *);
int aoti_torch_library_def(Library, const char *);
int aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, Library *);
int aoti_torch_library_impl(Library, const char *, void (*)(Value *, uint64_t, uint64_t));
int aoti_torch_call_dispatcher(const char *, const char *, Value *);
static void absolute(Value *stack, uint64_t inputs, uint64_t outputs) { aoti_torch_call_dispatcher("aten::abs", "", stack); }
__attribute__((constructor)) static void load(void) {
    Library library;
    aoti_torch_library_init_def("absolutes", "absolutes.c", 1, &library);
    aoti_torch_library_def(library, "absolute(Tensor x) -> Tensor");
    for (const char *const *key = (const char *const[]){"CPU", "Meta", 0}; *key; key++) {
        aoti_torch_library_init_impl("absolutes", *key, "absolutes.c", 2, &library);
        aoti_torch_library_impl(library, "absolute", absolute);
    }
}
"""
MODEL = """
from pathlib import Path
import torch
import aot_backward as ab
import cubes
from nets import doubles

torch.ops.load_library(Path(__file__).with_name("libabsolutes.so"))

@torch.library.custom_op("model::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x

half.register_fake(torch.empty_like)

def loss(x):
    apart = torch.ops.absolutes.absolute(torch.ops.doubles.double(x.detach())) + half(x.detach())
    return (cubes.cube(x) * apart).sum()

def entries():
    return ab.Grad(loss, [ab.Variant((torch.linspace(-1, 1, 6),))])
"""
SCRIPT = """
import torch
import aot_backward as ab
from aot_backward.cli import main

try:
    main(["export", "model.py:entries", "-o", "model.pt2"])
except SystemExit as end:
    assert not end.code

@torch.library.custom_op("script::third", mutates_args=())
def third(x: torch.Tensor) -> torch.Tensor:
    return x / 3

third.register_fake(torch.empty_like)
ab.export_grad(lambda x: (third(x.detach()) * x).sum(), (torch.ones(4),), path="script.pt2")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Export ``model.pt2`` by the command line and ``script.pt2`` by a script, in a folder with their sources. Return
    their output, too."""
    folder = tmp_path_factory.mktemp("registered")
    (folder / "nets").mkdir()
    for name, text in (
        ("cubes.py", CUBES),
        ("nets/doubles.py", DOUBLES),
        ("model.py", MODEL),
        ("absolutes.c", ABSOLUTES),
        ("script.py", SCRIPT),
    ):
        (folder / name).write_text(text)
    linked = ["-x", "none", f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    subprocess.run(
        [*compiler(), "-shared", "-fPIC", "-o", folder / "libabsolutes.so", "-x", "c", folder / "absolutes.c", *linked],
        check=True,
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, package=folder / "model.pt2", said=done.stderr)


def test_the_export_says_who_registers_what(made: SimpleNamespace) -> None:
    for words in (
        "calls cubes::cube, which the Python module 'cubes' (cubes.py) registers",
        "calls doubles::double.tensor, which the Python module 'nets.doubles' (doubles.py) registers",
        "load(path, imports=['nets.doubles']) or, on the command line, --import nets.doubles",
        "calls model::half, which the Python module 'model' (model.py) registers",
        "calls absolutes::absolute, which libabsolutes.so registers. Load that before the package, with torch.ops.load_library()",
        "calls script::third, which the script script.py registers; a script cannot be imported by name. Move the operator to its own module",
    ):
        assert words in made.said
    assert "aten::" not in made.said


def test_inspect_shows_them_and_imports_nothing(made: SimpleNamespace) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(made.package)]).stdout
    assert (
        ", registered by cubes; load does not import it by itself: use load(path, imports=['cubes']) or --import cubes"
        in shown
    )
    assert ", registered by libabsolutes.so when it was exported" in shown
    assert json.loads(CliRunner().invoke(main, ["inspect", str(made.package), "--json"]).stdout)["operators"] == {
        "absolutes::absolute": {"module": "", "file": "libabsolutes.so"},
        "cubes::cube": {"module": "cubes", "file": "cubes.py"},
        "doubles::double.tensor": {"module": "nets.doubles", "file": "doubles.py"},
        "model::half": {"module": "model", "file": "model.py"},
    }
    assert "registered by nets.doubles" in report(open_package(made.package))
    assert "cubes" not in sys.modules


LOADS = """
import sys, torch
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
import aot_backward_runtime as runtime

def refused(kind, **options):
    try:
        runtime.load(folder / "model.pt2", **options)
    except kind as error:
        return str(error)
    raise AssertionError("loaded")

said = refused(runtime.IncompatibleError)
for words in ("model.pt2 calls absolutes::absolute, registered by the compiled extension libabsolutes.so, which is not loaded here",
              "load_library('…/libabsolutes.so') first",
              "calls cubes::cube, registered by the Python module 'cubes', which is not imported here: "
              "import it first, or name it in imports=['cubes'] of load() and replay(), --import cubes on the command line"):
    assert words in said, said
assert not {"cubes", "nets.doubles", "model"} & sys.modules.keys()  # nothing was imported
assert "imports is 'cubes'; expected a list" in refused(runtime.InputError, imports="cubes")
assert "the module 'no_such' could not be imported (ModuleNotFoundError" in refused(runtime.InputError, imports=["cubes", "no_such"])
assert "imports has 7" in refused(runtime.InputError, imports=[7])
(folder / "broken.py").write_text("1 / 0")
assert "'broken' could not be imported (ZeroDivisionError: division by zero)" in refused(runtime.InputError, imports=["broken"])
said = refused(runtime.IncompatibleError, imports=["cubes"])
assert "cubes::cube" not in said and "doubles::double.tensor" in said and "model::half" in said
sys.modules["nets.doubles"] = sys.modules["cubes"]
said = refused(runtime.IncompatibleError)
assert "'nets.doubles'; the module imported here does not register it: is it another version?" in said, said
del sys.modules["nets.doubles"]
assert "aot_backward" not in sys.modules
grad = runtime.load(folder / "model.pt2", imports=["nets.doubles", "model"]).grad()  # model loads the extension
x = torch.linspace(-2, 1, 6)
value, gradients = grad(x)
leaf = x.clone().requires_grad_()
expected = sys.modules["model"].loss(leaf)
expected.backward()
torch.testing.assert_close((value, gradients["x"]), (expected.detach(), leaf.grad))
"""


def test_loading_names_what_is_missing_and_imports_what_it_is_told(made: SimpleNamespace) -> None:
    done = python(LOADS, made.folder)
    assert done.returncode == 0, done.stderr


def test_commands_import_what_they_are_told(made: SimpleNamespace) -> None:
    """This includes the current folder, which is not on the console script's path."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom aot_backward.cli import main\n"
        "sys.path[:] = [p for p in sys.path if p and Path(p).resolve() != Path.cwd()]\nmain(sys.argv[1:], prog_name='aot-backward')"
    )
    argv = [sys.executable, "-c", program, "verify", "--import", "model", "model.pt2"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=made.folder, check=False)
    assert done.returncode == 0 and "2 tensors match eager's" in done.stdout, done.stderr + done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("run", "--inputs", "x", "--outputs", "y"),
        ("rebuild", "-o", "again.pt2"),
        ("convert", "-o", "again.onnx"),
    ],
)
def test_commands_name_what_is_missing(
    arguments: tuple[str, ...], made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    before = sorted(made.folder.iterdir())
    refused = CliRunner().invoke(main, [*arguments, "model.pt2"])
    assert refused.exit_code == 3 and "calls cubes::cube, registered by the Python module 'cubes'" in refused.stderr
    monkeypatch.setattr(sys, "path", list(sys.path))
    unknown = CliRunner().invoke(main, [*arguments, "--import", "no.such", "model.pt2"])
    assert unknown.exit_code == 1 and "error: imports: the module 'no.such' could not be imported" in unknown.stderr
    assert sorted(made.folder.iterdir()) == before


def test_what_a_script_registers_itself_is_to_be_moved(made: SimpleNamespace) -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"calls script::third, registered by a script, script\.py, that cannot be imported by name: move",
    ):
        load(made.folder / "script.pt2")


def test_packages_that_do_not_say_and_packages_that_lie(made: SimpleNamespace, tmp_path: Path) -> None:
    """One package has an earlier format, and one has invalid names."""
    members = taken_apart(made.package)
    put_together(tmp_path / "older.pt2", members, {"operators": {}, "format_version": [1, 4]})
    with pytest.raises(
        IncompatibleError, match="model::half, which is not registered here, and the package does not name the module"
    ):
        load(tmp_path / "older.pt2")
    put_together(tmp_path / "odd.pt2", members, {"operators": {"cubes::cube": {"module": "os;\x1b[2J"}}})
    with pytest.raises(PackageError, match=r"calls 'cubes::cube' of 'os;\\x1b\[2J', which is not an operator"):
        load(tmp_path / "odd.pt2")


def test_recorded_passes(tmp_path: Path) -> None:
    """A script may import its operators after the load. A pass that calls an unregistered operator is interpreted."""
    with ab.record(tmp_path / "bw.pt2") as recording:
        backward_passes((3, 5))
    assert recording.recorded == 2
    members = taken_apart(tmp_path / "bw.pt2")
    libraries = {
        name: spec | {"operators": ["gone::away"]} for name, spec in json.loads(members[MANIFEST])["libraries"].items()
    }
    put_together(
        tmp_path / "gone.pt2", members, {"libraries": libraries, "operators": {"gone::away": {"module": "gone.module"}}}
    )
    with replay(tmp_path / "gone.pt2") as replaying:
        found = backward_passes((4, 6))
        missed = dict(replaying.report.misses)
        with torch.library._scoped_library("gone", "DEF") as library:
            library.define("away(Tensor x) -> Tensor")
            backward_passes((7,))
    torch.testing.assert_close(found, backward_passes((4, 6)))
    ((reason, count),) = missed.items()
    assert reason.startswith(
        "the package calls gone::away, registered by the Python module 'gone.module', which is not imported here"
    )
    assert count == 2 and replaying.report.hits == 1 and dict(replaying.report.misses) == missed
    with pytest.raises(InputError, match=r"imports: the module 'gone\.module' could not be imported"):
        replay(tmp_path / "gone.pt2", imports=["gone.module"])
    with pytest.raises(MissError, match="gone::away"), replay(tmp_path / "gone.pt2", strict=True):
        backward_passes((4,))


@torch.library.custom_op("aot_backward_tests::as_dtype", mutates_args=())
def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, copy=True)


@as_dtype.register_fake
def _(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype)


as_dtype.register_autograd(
    lambda ctx, grad: (grad.to(ctx.dtype), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[0].dtype),
)


def test_a_dtype_among_the_arguments(tmp_path: Path) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return as_dtype(x * 2, torch.float64).pow(3).sum() + as_dtype(x, torch.bfloat16).sum()

    x = torch.linspace(-1, 1, 6, requires_grad=True)
    gradient = load(ab.export_grad(loss, (x,), wrt="x", path=tmp_path / "dtype.pt2")).grad()
    value, actual = gradient(x)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, loss(x).detach())
    torch.testing.assert_close(actual, torch.autograd.grad(loss(x), x)[0])

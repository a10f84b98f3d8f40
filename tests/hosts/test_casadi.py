"""``aot_backward_native.casadi``: beside CasADi's own derivatives of the same network, in model predictive control, and
every wrong use."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import aot_backward_native as abn
import numpy as np
import pytest
import torch
from torch import nn

import aot_backward as ab

from ..support.exports import shared
from .potential import package as potential_package
from .potential import unlike_package

ca = pytest.importorskip("casadi")
from aot_backward_native.casadi import function  # noqa: E402

EXTERNAL = Path(__file__).parents[2] / "examples" / "casadi" / "external.c"
N = 5  # points


class Dynamics(nn.Module):
    """The next state of a learned system with three states and two controls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x: torch.Tensor, u: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * gain * self.net(torch.cat([x, u], -1))


def package() -> Path:
    """Return a package of :class:`Dynamics`. ``gain`` is shared by all points, and the entries are not differentiated
    by it."""

    def make(path: Path) -> None:
        args = torch.randn(4, 3).double(), torch.randn(4, 2).double(), torch.ones(1).double()
        ab.export(
            path,
            ab.derivatives(Dynamics(), args, ["value", "jacobian", "vjp", "hessian"], batch=[0, 0, None]),
            runtime="standalone",
        )

    return shared("dynamics", make)


def own(points: int = N) -> ca.Function:
    """Return the same network in CasADi's own operations."""
    w = {k: v.numpy() for k, v in Dynamics().state_dict().items()}
    x, u, gain = ca.SX.sym("x", 3), ca.SX.sym("u", 2), ca.SX.sym("gain")
    h = w["net.2.weight"] @ ca.tanh(w["net.0.weight"] @ ca.vertcat(x, u) + w["net.0.bias"]) + w["net.2.bias"]
    return ca.Function("own", [x, u, gain], [x + 0.1 * gain * h]).map(points, [False, False, True], [False])


Z, S = ca.MX.sym("Z", 5 * N), ca.MX.sym("S", 3, N)
FORMS: dict[str, Callable[[ca.MX], ca.MX]] = {
    "value": lambda y: y,
    "jacobian": lambda y: ca.jacobian(ca.vec(y), Z),
    "adjoint gradient": lambda y: ca.gradient(ca.dot(S, y), Z),
    "adjoint hessian": lambda y: ca.hessian(ca.dot(S, y), Z)[0],
    "adjoint gradient by its vector": lambda y: ca.jacobian(ca.gradient(ca.dot(S, y), Z), S),
    "forward": lambda y: ca.jtimes(ca.vec(y), Z, ca.sin(Z)),
}


def expression(f: ca.Function, form: Callable[[ca.MX], ca.MX]) -> ca.Function:
    return ca.Function("e", [Z, S], [form(f(ca.reshape(Z[: 3 * N], 3, N), ca.reshape(Z[3 * N :], 2, N), 1.5))])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_derivatives_equal_those_of_casadi(form: Callable[[ca.MX], ca.MX]) -> None:
    rng = np.random.default_rng(0)
    given = rng.standard_normal(5 * N), rng.standard_normal((3, N))
    found, expected = (expression(f, form)(*given) for f in (function(package(), points=N), own()))
    np.testing.assert_allclose(found.full(), expected.full(), rtol=0, atol=1e-14)
    assert found.sparsity() == expected.sparsity() or found.nnz() == expected.nnz()


def solve(f: ca.Function) -> tuple[np.ndarray, int]:
    """Return the states of three steps of control, and the number of IPOPT's iterations."""
    X, U, x0 = ca.MX.sym("X", 3, N + 1), ca.MX.sym("U", 2, N), ca.MX.sym("x0", 3)
    constraints = ca.vertcat(X[:, 0] - x0, ca.vec(X[:, 1:] - f(X[:, :N], U, 2.0)))
    problem = {
        "x": ca.vertcat(ca.vec(X), ca.vec(U)),
        "p": x0,
        "f": ca.sumsqr(X) + 0.05 * ca.sumsqr(U),
        "g": constraints,
    }
    solver = ca.nlpsol("mpc", "ipopt", problem, {"ipopt.print_level": 0, "ipopt.sb": "yes", "print_time": False})
    x, guess, states, iterations = np.array([1.0, -0.5, 0.8]), np.zeros(3 * (N + 1) + 2 * N), [], 0
    for _ in range(3):
        found = solver(x0=guess, p=x, lbg=0, ubg=0)
        assert solver.stats()["success"]
        iterations += solver.stats()["iter_count"]
        guess = found["x"].full().ravel()
        x = guess[3:6]
        states.append(x)
    return np.array(states), iterations


def test_predictive_control_takes_the_same_iterates() -> None:
    states, iterations = solve(function(package(), points=N))
    expected, expected_iterations = solve(own())
    np.testing.assert_allclose(states, expected, rtol=0, atol=1e-10)
    assert iterations == expected_iterations


def test_a_derivative_that_the_package_lacks_is_nan() -> None:
    gain, f = ca.MX.sym("gain"), function(package(), points=N)
    jacobian = ca.Function("j", [gain], [ca.jacobian(f(np.ones((3, N)), np.ones((2, N)), gain), gain)])
    assert np.isnan(jacobian(1.0).full()).all()


def test_a_function_outlives_its_name() -> None:
    def build() -> ca.Function:
        return expression(function(package(), points=N), FORMS["jacobian"])

    assert build()(np.zeros(5 * N), np.zeros((3, N))).shape == (3 * N, 5 * N)


def test_wrong_packages_and_points_are_named() -> None:
    with pytest.raises(abn.PackageError, match="expected a function entry 'value', got"):
        function(potential_package())
    with pytest.raises(
        abn.InputError, match=r"entry 'value': expected an entry of ab.derivatives, got the metadata {}"
    ):
        function(unlike_package())
    two = shared(
        "two-results", lambda path: ab.export(path, ab.derivatives(lambda x: (x, -x), (torch.ones(4, 2),), ["value"]))
    )
    with pytest.raises(abn.InputError, match=r"entry 'value': expected one tensor as result, got a tuple. Concatenate"):
        function(two)
    with pytest.raises(abn.InputError, match="points: expected at least 1, got 0"):
        function(package(), points=0)
    with pytest.raises(RuntimeError, match=r"3-by-4"):
        function(package(), points=N)(np.ones((3, 4)), np.ones((2, N)), 1.0)


def in_c(path: Path, points: int, library: Path) -> ca.Function:
    """Return ``examples/casadi/external.c`` for a package."""
    native = Path(abn.__file__).parent
    links = [f"-I{native / 'include'}", f"-L{native / 'lib'}", "-laot_backward", f"-Wl,-rpath,{native / 'lib'}"]
    options = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f'-DPACKAGE="{path}"', f"-DPOINTS={points}"]
    subprocess.run(["gcc", *options, EXTERNAL, "-o", library, *links], check=True)
    return ca.external("f", str(library))


def test_the_example_in_c_is_a_function_of_casadi(tmp_path: Path) -> None:
    path, network = tmp_path / "network.pt2", Dynamics()
    example = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    ab.export(
        path,
        ab.derivatives(lambda x, u: network(x, u, 1.5), example, ["value", "jacobian", "vjp", "hessian"]),
        runtime="standalone",
    )
    rng = np.random.default_rng(0)
    given = rng.standard_normal(5 * N), rng.standard_normal((3, N))
    for points in (N, 1):
        library = tmp_path / f"points{points}.so"
        f = in_c(path, points, library).map(N // points)
        for form in FORMS.values():
            found = expression(lambda x, u, gain, f=f: f(x, u), form)(*given)
            expected = expression(own(), form)(*given)
            np.testing.assert_allclose(found.full(), expected.full(), rtol=0, atol=1e-14)
            assert found.nnz() == expected.nnz()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            package,
            "expected float64 tensors of (points, size) with any number of points, got others. Export with batch=0.",
        ),
        (potential_package, "has no entry 'value'"),
    ],
)
def test_the_example_in_c_refuses_other_packages(
    made: Callable[[], Path], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError):
        in_c(made(), N, tmp_path / "other.so")
    assert words in capfd.readouterr().err

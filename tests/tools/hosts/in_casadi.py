"""``in_casadi.py PACKAGE LIBRARY WEIGHTS``: model predictive control by IPOPT with exact Hessians. Prints the figures
of each way."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import casadi as ca
import numpy as np
from aot_backward_native.casadi import function

HORIZON, STEPS = 20, 20


def in_casadi(weights: dict[str, np.ndarray], points: int) -> ca.Function:
    """Return the same network in CasADi's own operations."""
    x, u = ca.SX.sym("x", 4), ca.SX.sym("u", 2)
    h = ca.vertcat(x, u)
    for layer in (0, 2, 4):
        h = weights[f"net.{layer}.weight"] @ h + weights[f"net.{layer}.bias"]
        h = h if layer == 4 else ca.tanh(h)
    return ca.Function("own", [x, u], [x + 0.1 * h]).map(points)


def control(f: ca.Function, plant: ca.Function) -> dict[str, Any]:
    """Return the states, controls and costs of ``STEPS`` steps, the number of IPOPT's iterations, and milliseconds a
    step."""
    X, U, x0 = ca.MX.sym("X", 4, HORIZON + 1), ca.MX.sym("U", 2, HORIZON), ca.MX.sym("x0", 4)
    problem = {
        "x": ca.vertcat(ca.vec(X), ca.vec(U)),
        "p": x0,
        "f": ca.sumsqr(X) + 0.05 * ca.sumsqr(U),
        "g": ca.vertcat(X[:, 0] - x0, ca.vec(X[:, 1:] - f(X[:, :HORIZON], U))),
    }
    solver = ca.nlpsol(
        "control", "ipopt", problem, {"ipopt.print_level": 0, "print_time": False, "ipopt.sb": "yes", "ipopt.tol": 1e-8}
    )
    bound = np.concatenate([np.full(4 * (HORIZON + 1), np.inf), np.ones(2 * HORIZON)])
    x, guess = np.array([1.0, -0.5, 0.8, -1.2]), np.zeros(6 * HORIZON + 4)
    solver(x0=guess, p=x, lbx=-bound, ubx=bound, lbg=0, ubg=0)  # opens the compiled code
    states, iterations, start = list[list[float]](), 0, time.perf_counter()
    for _ in range(STEPS):
        solution = solver(x0=guess, p=x, lbx=-bound, ubx=bound, lbg=0, ubg=0)
        assert solver.stats()["success"], solver.stats()["return_status"]
        iterations += solver.stats()["iter_count"]
        guess = solution["x"].full().ravel()
        u = guess[4 * (HORIZON + 1) :][:2]
        states.append([*x, *u, float(solution["f"])])
        x = plant(x, u).full().ravel()
    return {"states": states, "iterations": iterations, "ms": 1e3 * (time.perf_counter() - start) / STEPS}


def main(package: str, library: str, weights: str) -> None:
    arrays = dict(np.load(weights))
    ways = {
        "adapter": function(package, points=HORIZON),
        "casadi.external": ca.external("f", library),
        "CasADi's own SX": in_casadi(arrays, HORIZON),
    }
    plant = in_casadi(arrays, 1)
    found = {name: control(f, plant) for name, f in ways.items()}
    print(json.dumps(found))


main(*sys.argv[1:])

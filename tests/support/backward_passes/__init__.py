"""Small backward passes of every kind that a script may run, by topic. Tests compare recorded passes with eager on
them."""

from . import corners, custom_functions, engine, hooks, modes, operators, views
from .scenario import SCENARIOS

__all__ = ["SCENARIOS", "corners", "custom_functions", "engine", "hooks", "modes", "operators", "views"]

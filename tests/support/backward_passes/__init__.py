"""Backward passes of every kind that a script may run, each small: what recorded passes are compared on with eager, by topic."""

from . import corners, custom_functions, engine, hooks, modes, operators, views
from .scenario import SCENARIOS

__all__ = ["SCENARIOS", "corners", "custom_functions", "engine", "hooks", "modes", "operators", "views"]

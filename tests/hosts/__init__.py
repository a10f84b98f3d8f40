"""Adapters for simulation programs and solvers, tested with the programs themselves."""

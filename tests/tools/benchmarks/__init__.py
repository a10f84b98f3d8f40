"""Benchmarks: ``python -m tests.tools.benchmarks``. Each subject is one module. No test asserts a time."""

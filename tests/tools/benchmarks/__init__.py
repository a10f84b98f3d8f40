"""Benchmarks: ``python -m tests.tools.benchmarks``. What is measured and against what, one module per subject; no test asserts a time."""

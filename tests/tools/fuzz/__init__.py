"""Fuzzing of packages, state files and signatures, from opening to the first calls: ``python -m tests.tools.fuzz``."""

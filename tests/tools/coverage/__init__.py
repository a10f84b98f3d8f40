"""Operator coverage: every differentiable operator of torch's test databases, compared with eager.
``python -m tests.tools.coverage``."""

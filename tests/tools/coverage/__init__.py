"""How much of PyTorch is served: every differentiable operator of torch's own test databases, against eager. ``python -m tests.tools.coverage``."""

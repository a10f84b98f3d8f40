"""A package against eager PyTorch, and a graph against its source: what an export and ``verify`` compare."""

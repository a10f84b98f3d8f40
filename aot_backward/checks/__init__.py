"""Compare packages with eager PyTorch, and graphs with their source, for exports and ``verify``."""

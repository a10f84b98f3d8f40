"""Force fields: examples/forcefields, compared with eager PyTorch."""

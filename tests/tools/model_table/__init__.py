"""Export common kinds of models, compare them with eager, and compare with PyTorch's own ways to do the same."""

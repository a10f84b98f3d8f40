"""Compare aot-backward with PyTorch's own ways to compile gradients ahead of time."""

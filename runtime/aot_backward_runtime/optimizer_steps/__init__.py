"""Steps of ``torch.optim`` optimizers, and the clipping of gradients before them, by compiled code, on the parameters, gradients and state of an
unmodified script."""

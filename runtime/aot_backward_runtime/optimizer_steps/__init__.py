"""Compiled steps of ``torch.optim`` optimizers, and compiled gradient clipping, on the parameters, gradients and state
of an unmodified script."""

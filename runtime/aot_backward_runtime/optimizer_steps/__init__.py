"""Steps of ``torch.optim`` optimizers by compiled code, on the parameters, gradients and state of an unmodified script."""

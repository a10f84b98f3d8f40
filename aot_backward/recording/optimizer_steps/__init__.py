"""Observe and compile the optimizer steps and gradient clippings of a recorded script."""

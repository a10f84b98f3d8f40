"""Optimizer steps and clippings of gradients of a recorded script: which there are, and their code."""

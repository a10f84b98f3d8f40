"""Optimizer steps of a recorded script: which there are, and their compiled updates."""

"""Sizes: dynamic dimensions, their ranges, and the memory layout of results."""

"""Rewrites of a graph before Inductor lowers it, for patterns that Inductor or eager's kernels compute slowly."""

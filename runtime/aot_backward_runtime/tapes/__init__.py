"""Tapes: a backward pass as a list of operations, recorded while the autograd engine walks the graph, in eager's order,
and interpreted."""

"""A backward pass as a list of operations, its tape: recorded as the autograd engine walks the graph, in the order of eager, and interpreted."""

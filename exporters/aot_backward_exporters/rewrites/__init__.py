"""What is rewritten in a graph before Inductor lowers it, because Inductor or eager's kernels would be slow at it."""

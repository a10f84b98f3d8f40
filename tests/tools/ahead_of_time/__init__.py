"""aot-backward beside what PyTorch itself offers to compile gradients ahead of time: what a process needs, and what is noticed."""

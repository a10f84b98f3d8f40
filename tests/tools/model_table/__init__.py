"""Models of the families that people train, exported and compared with eager, beside what PyTorch itself offers for the same."""

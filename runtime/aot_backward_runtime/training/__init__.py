"""What ``Package.step()`` returns: a whole training step, its state, and its files."""

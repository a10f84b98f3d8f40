"""A loaded training step (``Package.step()``), its state, and its files."""

"""Code for GPUs, where there may be none."""

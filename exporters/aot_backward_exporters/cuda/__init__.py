"""Code for GPUs, also on machines without one."""

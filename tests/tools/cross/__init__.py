"""Check code for GPUs on a machine without one: ``make cross``."""

"""Not tests: harnesses that measure and that write tables into docs/ (see the Makefile)."""

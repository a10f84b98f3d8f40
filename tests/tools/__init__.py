"""Measuring tools, not tests. They write tables into docs/ (see the Makefile)."""

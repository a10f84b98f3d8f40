"""Recorded backward passes, from a script to a package: observed, made into graphs, compiled, replayed."""

"""Graphs as JSON, which a rebuild reads."""

"""Tests of the project itself: imports, documentation, wheels, examples and tools."""

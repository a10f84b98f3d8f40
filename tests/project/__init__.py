"""The project itself: imports, documentation, wheels, examples, and that its tools can fail."""

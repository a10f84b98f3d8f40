"""From entries to a package: each is captured, compiled, checked, written."""

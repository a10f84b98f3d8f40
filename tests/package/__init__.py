"""The package file: reading, refusing, and round trips."""

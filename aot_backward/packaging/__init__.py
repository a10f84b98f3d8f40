"""Capture, compile and check entries, and write them into a package."""

"""Compiled libraries and their calls: guards on arguments, call plans, weights bound to a library."""

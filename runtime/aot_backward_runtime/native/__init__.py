"""Compiled libraries and what their calls need: guards on arguments, plans of a call, weights bound to a library."""

"""Loaded modules and gradient functions, beside eager."""

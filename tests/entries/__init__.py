"""Loaded modules and gradient functions, compared with eager."""

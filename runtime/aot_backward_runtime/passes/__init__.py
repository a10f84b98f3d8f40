"""Recorded backward passes: they are recorded from compiled autograd, interpreted, or run by compiled code."""

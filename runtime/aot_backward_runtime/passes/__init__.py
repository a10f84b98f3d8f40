"""Recorded backward passes: compiled autograd's structure of a pass, recorded, interpreted, or run by compiled code."""

"""Sizes: which are dynamic, in which range, and how a result's memory follows from them."""

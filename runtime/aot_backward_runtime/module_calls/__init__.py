"""Calls of an unmodified script's modules by compiled code, over the script's live parameters."""

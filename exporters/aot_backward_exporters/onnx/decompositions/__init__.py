"""Operators that ONNX does not have, by operators that it has."""

"""Decompositions of operators that ONNX or a run without PyTorch does not support."""

"""Operators by other operators: what ONNX does not have, and what runs without PyTorch only so."""

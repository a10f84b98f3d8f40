"""Exporting: capture, self-check, compiling, rebuilding, ONNX."""

"""Compiled graphs: shared libraries by AOTInductor, ONNX models, portable JSON."""

"""Graphs as ONNX models."""

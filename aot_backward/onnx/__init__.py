"""ONNX files of what is exported: names of inputs and outputs, comparison with eager, and writing."""

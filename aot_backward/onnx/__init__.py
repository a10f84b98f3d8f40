"""ONNX files of entries: names of inputs and outputs, comparison with eager, and writing."""

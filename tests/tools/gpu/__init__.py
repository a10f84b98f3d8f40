"""Checks and timings on a GPU: ``make gpu``. Parts that do not need a GPU also run on the CPU (``--device cpu``)."""

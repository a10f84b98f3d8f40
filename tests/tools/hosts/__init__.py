"""Measurements of packages in simulation programs and optimizers: ``make hosts``."""

TEMPERATURE = 1000.0  # K, at the start
TIME_STEP = 0.2  # fs: hydrogen is light
EVERY = 10
"""Steps from one reading of the energy to the next."""

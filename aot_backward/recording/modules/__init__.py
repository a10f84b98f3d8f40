"""Modules of an unmodified script: observed while it is recorded, exported as ``module`` entries that a replay serves the script's calls with."""

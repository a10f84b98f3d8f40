"""What can be proved of code for GPUs where there is none: ``make cross``."""

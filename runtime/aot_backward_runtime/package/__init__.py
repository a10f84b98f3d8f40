"""A package as a file: opened, its parts checked against each other, before any of its code runs. No torch."""

"""Package files: open one and check its parts against each other before any of its code runs. No torch."""

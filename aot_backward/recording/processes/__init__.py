"""Several processes that record one package."""

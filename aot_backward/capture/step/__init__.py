"""A whole training step as a graph: optimizer, hyperparameters, accumulation."""

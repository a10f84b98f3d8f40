"""A module, a step or a recorded pass as graphs: traced with its gradients, partitioned into forward and backward."""

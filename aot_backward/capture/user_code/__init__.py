"""The user's code under a trace: hooks, attributes that its forward writes, and source lines."""

"""What the caller's module brings along: hooks, attributes that its forward writes, the lines it was written on."""

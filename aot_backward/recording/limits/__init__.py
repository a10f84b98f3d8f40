"""What of a recording is compiled: which structures, in which order, and for how long."""

"""What the command line does, without the command line."""

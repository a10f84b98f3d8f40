"""The file: what is read, what is refused, what comes back."""

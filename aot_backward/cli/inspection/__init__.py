"""What ``inspect`` says of a package: described as JSON, printed as text."""

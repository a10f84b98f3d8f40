"""Long runs: file descriptors, mappings, private memory and extracted folders of a process must not grow."""

"""Long runs: what a process has of descriptors, mappings, memory of its own and extracted folders must stay as it is."""

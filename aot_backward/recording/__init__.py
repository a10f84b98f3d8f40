"""Record backward passes of a script into a package: observe them, trace them into graphs, compile them."""

"""The C++ compiler, and the cache of its output."""

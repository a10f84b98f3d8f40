"""The C++ compiler, and the cache of what it has made."""

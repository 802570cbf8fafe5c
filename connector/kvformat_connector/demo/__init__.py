"""A tiny model, real engines in fresh processes, and the scenes that `make demo` plays."""

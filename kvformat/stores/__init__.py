"""Stores: where objects live. One protocol, found by URI scheme."""

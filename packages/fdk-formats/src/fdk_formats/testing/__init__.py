"""Checks that every backend runs against the reference."""

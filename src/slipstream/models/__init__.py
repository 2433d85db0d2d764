"""Loads models by name, path or object, and runs them on a slot-addressed key-value cache."""

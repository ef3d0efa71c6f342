"""Wrappers that add a property to any method."""

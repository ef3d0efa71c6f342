"""Foundations that import no other room: trees, keyed noise, devices, memory and tables."""

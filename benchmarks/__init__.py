"""Benchmarks, run as modules from the checkout: `python -m benchmarks.reference radon`."""

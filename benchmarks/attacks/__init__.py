"""Attacks on hierfl: the `attack` of each module counts what was right, refused, wrong or raw, and code that ran."""

"""Attacks on hierfl: each module's `attack` counts what was right, refused, wrong, raw, and which code ran."""

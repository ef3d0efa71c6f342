"""Attacks on hierfl: each counts how often its answer is right, refused by a sentence, wrong, or a raw error."""

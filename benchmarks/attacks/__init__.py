"""Attacks on hierfl: crafted input, counted as right, refused by name, wrong, or failing raw."""

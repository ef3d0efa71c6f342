"""`hierfl demo`: four hospitals, from their rows to a report."""

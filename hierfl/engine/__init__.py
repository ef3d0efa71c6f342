"""Rounds: draw a cohort, run its clients in chunks, sum their updates, update the server."""

"""Rounds: a cohort is drawn, its clients work in chunks, the server adds up what they send."""

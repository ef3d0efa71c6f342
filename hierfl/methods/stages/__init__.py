"""The two stages of `two_stage`: clients' factors, then the server's exact target."""

"""Clients on machines of their own: what they agree on, what crosses, and the rounds of a server that has no rows."""

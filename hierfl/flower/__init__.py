"""hierfl on Flower: the server's and the clients' apps of one run (the extra `flower` installs flwr)."""

from hierfl.flower.apps import Apps, apps

__all__ = ["Apps", "apps"]

"""Federated posteriors against reference ones, through the functions of the benchmark; `slow` are its full-length runs."""

import os

import pytest

needs_files = pytest.mark.skipif(not os.environ.get("HIERFL_DATA"), reason="HIERFL_DATA is not set: no reference posterior")

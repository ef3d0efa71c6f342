"""The algorithm's two functions, and no other name: vantage6 calls whatever name of this package a task gives."""

from .algorithm import central as central
from .algorithm import partial as partial

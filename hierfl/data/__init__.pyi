from . import partition as partition
from .clients import ClientData as ClientData

__all__: list[str]

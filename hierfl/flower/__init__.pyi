from .apps import Apps as Apps
from .apps import apps as apps
from .link import SuperLink as SuperLink
from .link import superlink as superlink

__all__: list[str]

"""The fixture `data`: three ragged clients with a field for every model."""

import pytest

from hierfl import ClientData
from tests.models.scene import three_clients


@pytest.fixture
def data() -> ClientData:
    return three_clients()

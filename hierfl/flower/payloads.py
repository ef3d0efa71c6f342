"""Where the bytes of `hierfl.nodes` stand in a message of Flower."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message

from hierfl.nodes.messages import Refused

PAYLOAD, WRONG, RECORD = "payload", "wrong", "hierfl"
INS = "fitins.config"  # the record of a message of secure aggregation


def asked_for(message: Message) -> bytes | None:
    """Return the server's payload in a message of secure aggregation; None: it holds none."""
    record: Mapping[str, Any] = message.content.config_records.get(INS, ConfigRecord())
    content = record.get(PAYLOAD)
    return content if isinstance(content, bytes) else None


def payload_of(message: Message) -> bytes:
    """Return the bytes of another message, or raise Refused."""
    if message.has_error():
        raise Refused(f"Flower says: {message.error.reason or message.error.code}"[:500])
    record: Mapping[str, Any] = message.content.config_records.get(RECORD, ConfigRecord())
    if WRONG in record:
        raise Refused(str(record[WRONG])[:500])
    content = record.get(PAYLOAD)
    if not isinstance(content, bytes):
        raise Refused("its message holds no payload of hierfl")
    return content

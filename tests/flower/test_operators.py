"""The operators' page, the compose file and written projects name options that Flower's programs have."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operators.md").read_text()
README = (ROOT / "hierfl" / "flower" / "template" / "README.md").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(
    (ROOT / "examples" / "flower_hospitals" / "compose.yaml").read_text()
)
PROGRAMS = ("flower-superlink", "flower-supernode")


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: Any) -> tuple[str, set[str]]:
    """Return a program and the options that its help names."""
    path = Path(sys.executable).parent / request.param
    said = subprocess.run([path, "--help"], capture_output=True, text=True, check=True, timeout=600)
    return request.param, set(re.findall(r"--[a-z][a-z-]+", said.stdout))


def commands(text: str, name: str) -> list[str]:
    """Return the commands of a program in a text, lines that go on joined."""
    joined = re.sub(r"\\+\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip().startswith(name)]


def test_options_exist(program: tuple[str, set[str]]) -> None:
    name, known = program
    service = {"flower-superlink": "superlink", "flower-supernode": "supernode"}[name]
    command = COMPOSE["services"][service]["command"]
    assert command[0] == name
    texts = [" ".join(map(str, command)), *commands(PAGE, name), *commands(README, name)]
    assert len(texts) >= 3
    for text in texts:
        used = set(re.findall(r"(?<=\s)--[a-z][a-z-]+", text))
        assert used and used <= known, used - known
        assert "--insecure" not in used
    deprecated = {"--auth-list-public-keys", "--fleet-api-address", "--control-api-address"}
    assert not deprecated & set(re.findall(r"--[a-z-]+", " ".join(texts)))


def test_every_secret_and_folder_of_the_compose_file_is_there() -> None:
    named = set(COMPOSE["secrets"])
    for service in COMPOSE["services"].values():
        used = {
            part.removeprefix("/run/secrets/") for part in service["command"] if "/run/" in part
        }
        assert used == set(service["secrets"]) and used <= named
        (volume,) = service["volumes"]
        assert volume.endswith(":/var/lib/hierfl")
        assert service["read_only"] and service["environment"]["FLWR_TELEMETRY_ENABLED"] == "0"
    assert "ports" not in COMPOSE["services"]["supernode"]


@pytest.mark.parametrize("text", re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE))
def test_messages_on_the_page_are_those_of_the_code(text: str) -> None:
    """Each piece between what varies stands in the source."""
    sources = [
        p.read_text()
        for room in ("nodes", "flower", "core")
        for p in (ROOT / "hierfl" / room).glob("*.py")
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    pieces = re.split(r"'[^']*'|\.\.\.|\d+|\"left_out\"", text)
    for piece in pieces:
        words = piece.strip(" :,;[]")
        assert not words or words in code, words

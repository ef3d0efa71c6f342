"""The transport of `examples/over_https.py`, with TLS on this machine: who or what is hostile is refused."""

from __future__ import annotations

import os
import pickle
import runpy
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import hierfl
from hierfl.nodes.envelope import read_answer, write_request
from hierfl.nodes.messages import Refused
from tests.nodes.test_faults import HOSTILE, plain
from tests.nodes.transports import (
    assert_refused,
    assert_same,
    demo,
    formula,
    frames,
    patients,
)

ROOT = Path(__file__).parents[2]
EXAMPLE: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "over_https.py"))
SERVES = """
import runpy, ssl, sys
from pathlib import Path
from types import SimpleNamespace
import torch, uvicorn
torch.set_default_dtype(torch.float64)
from tests.nodes.transports import answering, demo_stations, formula_stations, plain_stations
from hierfl.nodes import Station
example = runpy.run_path("examples/over_https.py")
folder, port = Path(sys.argv[1]), int(sys.argv[2])
kinds = {"demo": demo_stations, "formula": formula_stations, "plain": plain_stations}
stations = {}
for kind, made in kinds.items():
    here = made(folder / kind)
    lying = answering(here)
    for name in here:
        answer = lambda request, by, name=name, lying=lying: lying(name, request)
        stations[f"{kind}-{name}"] = SimpleNamespace(answer=answer)
config = uvicorn.Config(example["served"](stations), host="localhost", port=port, log_level="error")
config.load()
config.ssl = example["trusted"](folder, ssl.Purpose.CLIENT_AUTH)
uvicorn.Server(config).run()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """All nodes, in a process of their own; one of the plain ones lies. The folder of TLS files, the address."""
    folder = tmp_path_factory.mktemp("https")
    EXAMPLE["certificates"](folder)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVES, str(folder), str(port)]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        EXAMPLE["wait_for"](port, process)
        yield folder, f"https://localhost:{port}"
    finally:
        process.terminate()
        process.wait(20.0)


def reached(served: tuple[Path, str], kind: str, names: Any) -> Any:
    tls = EXAMPLE["trusted"](served[0], ssl.Purpose.SERVER_AUTH)
    return EXAMPLE["over_https"]({name: f"{served[1]}/{kind}-{name}" for name in names}, tls)


@pytest.mark.slow  # the process of the nodes takes 10 s of a core
def test_fits_over_https_are_those_here(served: tuple[Path, str]) -> None:
    names = sorted(frames())
    assert_same(
        hierfl.nodes.fit(demo(), reached(served, "demo", names)), hierfl.fit(demo(), patients())
    )
    assert_same(
        hierfl.nodes.fit(formula(), reached(served, "formula", names)),
        hierfl.fit(formula(), frames()),
    )


@pytest.mark.slow
def test_wrong_answers_are_refused(served: tuple[Path, str]) -> None:
    nodes = reached(served, "plain", ("east", "north", "south", "west"))
    assert_refused(hierfl.nodes.fit(plain(), nodes, rounds=len(HOSTILE)))


@pytest.mark.slow
def test_requests_without_a_certificate_or_of_no_kind_are_refused(served: tuple[Path, str]) -> None:
    folder, address = served
    place = f"{address}/demo-va"
    strangers = ssl.create_default_context(cafile=str(folder / "ca.crt"))  # shows no certificate
    for context in (strangers, ssl.create_default_context()):
        with (
            httpx.Client(verify=context, trust_env=False) as client,
            pytest.raises(httpx.HTTPError),
        ):
            client.post(place, content=write_request("introduce", b""))
    with httpx.Client(verify=EXAMPLE["trusted"](folder, ssl.Purpose.SERVER_AUTH)) as client:
        assert client.get(place).status_code == 405
        assert client.post(f"{address}/other").status_code == 404
        for wrong in (b"", pickle.dumps({}), write_request("rows", b"")):
            with pytest.raises(Refused):
                read_answer(wrong, client.post(place, content=wrong).content)


def test_a_node_that_is_away_is_left_out() -> None:
    tls = ssl.create_default_context()
    nodes = EXAMPLE["over_https"]({"north": "https://localhost:9"}, tls, timeout=5.0)
    began = time.monotonic()
    with pytest.raises(hierfl.nodes.TooFewNodes, match="ConnectError"):
        hierfl.nodes.fit(plain(), nodes, rounds=1)
    assert time.monotonic() - began < 5.0

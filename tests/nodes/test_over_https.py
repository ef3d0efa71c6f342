"""The transport of `examples/over_https.py`, with TLS on this machine: who or what is hostile is refused."""

import asyncio
import gzip
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

import hierfl
from hierfl.cli.officer_page import entries
from hierfl.nodes import Refused, TooFewNodes
from hierfl.nodes.envelope import read_answer, write_answer
from hierfl.nodes.policy import Policy
from tests.nodes.test_faults import plain
from tests.nodes.transports import INTRODUCE, plain_stations
from tests.nodes.ways import EXAMPLE, serving

BYTES: dict[str, str] = EXAMPLE["BYTES"]
GLOBALS: dict[str, Any] = EXAMPLE["served"].__globals__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of TLS, of one authority."""
    made = tmp_path_factory.mktemp("tls")
    EXAMPLE["certificates"](made)
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of TLS of another authority."""
    made = tmp_path_factory.mktemp("other")
    EXAMPLE["certificates"](made)
    return made


def of_server(folder: Path) -> ssl.SSLContext:
    found: ssl.SSLContext = EXAMPLE["trusted"](folder, ssl.Purpose.SERVER_AUTH)
    return found


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a node, whose log is in tmp_path / "east"."""
    with serving(folder, {"node": plain_stations(tmp_path)["east"]}) as address:
        yield f"{address}/node"


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    """A client with the right certificate."""
    how: Any = {"trust_env": False, "headers": BYTES, "timeout": 600.0}
    with httpx.Client(verify=of_server(folder), **how) as made:
        yield made


def test_who_shows_no_certificate_of_the_authority_reaches_no_node(
    place: str, folder: Path, other: Path, tmp_path: Path
) -> None:
    nobody = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    stranger = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    stranger.load_cert_chain(other / "own.pem", other / "own.key")
    for context in (nobody, stranger):
        with pytest.raises(httpx.HTTPError):
            httpx.post(place, content=INTRODUCE, verify=context, trust_env=False, headers=BYTES)
    with pytest.raises(httpx.HTTPError):
        httpx.post(place.replace("https", "http"), content=INTRODUCE, trust_env=False)
    assert not entries(tmp_path / "east")


def test_other_paths_methods_and_types_reach_no_node(
    place: str, client: httpx.Client, tmp_path: Path
) -> None:
    """A page that a browser shows cannot post bytes elsewhere; forms and texts are of other types."""
    assert client.get(place).status_code == client.put(place, content=b"").status_code == 405
    for path in ("/other", "/../node/x", "/node/../../etc/passwd", ""):
        assert client.post(place.removesuffix("/node") + path).status_code == 404
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json", ""):
        found = client.post(place, content=INTRODUCE, headers={"content-type": kind})
        assert found.status_code == 415
    assert not entries(tmp_path / "east")
    found = client.post(place, content=INTRODUCE)
    assert found.headers["content-type"] == "application/octet-stream"
    assert b"east" in read_answer(INTRODUCE, found.content)


def limited(folder: Path, **limits: int) -> dict[str, Any]:
    """Return a node with limits in its policy."""
    (folder / "east").mkdir()
    text = "".join(f"{key} = {value}\n" for key, value in limits.items())
    (folder / "east" / "policy.toml").write_text(text)
    return {"node": plain_stations(folder)["east"]}


HEAD = b"POST /node HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"


@contextmanager
def connected(address: str, folder: Path) -> Iterator[ssl.SSLSocket]:
    """A connection with the right certificate."""
    port = int(address.rpartition(":")[2])
    with (
        socket.create_connection(("localhost", port), 600.0) as below,
        of_server(folder).wrap_socket(below, server_hostname="localhost") as above,
    ):
        yield above


def test_a_request_that_is_too_long_is_cut_off(
    folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    """By its bytes, whatever length it claims."""
    parts = (bytes(1 << 12) for _ in range(1000))  # sent without a length
    with serving(folder, limited(tmp_path, bytes_a_request=1 << 16)) as address:
        for content in (parts, bytes(1 << 20)):
            with suppress(httpx.TransportError):  # where the node has hung up before it is read
                assert client.post(f"{address}/node", content=content).status_code == 413
        assert not entries(tmp_path / "east")
        with pytest.raises(Refused, match="not JSON"):
            read_answer(b"x", client.post(f"{address}/node", content=b"x").content)


def test_bodies_that_come_together_are_no_longer_than_one(
    folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    """Memory would else grow by the number of connections."""
    with serving(folder, limited(tmp_path, bytes_a_request=1 << 16)) as address:
        with connected(address, folder) as slow:
            slow.sendall(HEAD + b"Content-Length: 60001\r\n\r\n" + bytes(60_000))
            until = time.monotonic() + 600.0
            while client.post(f"{address}/node", content=bytes(1 << 14)).status_code != 503:
                assert time.monotonic() < until
        until = time.monotonic() + 600.0
        while client.post(f"{address}/node", content=INTRODUCE).status_code != 200:
            assert time.monotonic() < until


@pytest.mark.slow
def test_a_slow_body_keeps_nobody_waiting_and_is_cut_off(
    folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    with (
        serving(folder, limited(tmp_path, seconds_to_send=2)) as address,
        connected(address, folder) as slow,
    ):
        slow.sendall(HEAD + b"Content-Length: 99\r\n\r\nhier")
        assert client.post(f"{address}/node", content=INTRODUCE).status_code == 200
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_endless_headers_and_too_many_connections_are_cut_off(
    folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    limits = limited(tmp_path, seconds_to_send=4, connections=5)
    with serving(folder, limits) as address, ExitStack() as stack:
        first, began, soon = list[ssl.SSLSocket](), time.monotonic(), 0
        for number in range(20):
            first.append(stack.enter_context(connected(address, folder)))
            asked = time.monotonic()
            with suppress(OSError):  # it is the sixth, or a later one
                first[-1].sendall(HEAD)
                assert number < 5 or first[-1].recv(1) == b""
            soon += number >= 5 and time.monotonic() - asked < 3.0
        assert soon > 10, "a slow machine may take seconds for some, and not for most"
        for one in first[:5]:
            one.settimeout(0.1)
            while True:
                try:
                    one.sendall(b"X-Header: 1\r\n")
                    assert one.recv(100) == b""
                except TimeoutError:
                    continue
                except OSError:
                    pass
                break
            assert time.monotonic() - began > 3.5
        assert client.post(f"{address}/node", content=INTRODUCE).status_code == 200
        assert not [line for line in entries(tmp_path / "east") if line["what"] == "refusal"]


ELSEWHERE = {
    "another path": (b"POST /other HTTP/1.1\r\nHost: l\r\n\r\n", HEAD),
    "another method": (b"GET /node HTTP/1.1\r\nHost: l\r\n\r\n", HEAD),
    "a body without end": (b"PUT / HTTP/1.1\r\nHost: l\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_connection_has_one_request_alone(
    name: str, folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    """One that has got an answer would else be held open by headers that do not end."""
    asked, more = ELSEWHERE[name]
    with serving(folder, limited(tmp_path, connections=1)) as address:
        with connected(address, folder) as one:
            one.sendall(asked + more)
            content = b""
            while part := one.recv(1 << 12):
                content += part
        assert content.startswith(b"HTTP/1.1 40") and content.count(b"HTTP/1.1") == 1
        assert client.post(f"{address}/node", content=INTRODUCE).status_code == 200


def test_who_does_not_shake_hands_keeps_nobody_out(
    folder: Path, client: httpx.Client, tmp_path: Path
) -> None:
    """Without a certificate; asyncio would keep each of them for a minute."""
    with serving(folder, limited(tmp_path, connections=5)) as address, ExitStack() as stack:
        place = ("localhost", int(address.rpartition(":")[2]))
        silent = [stack.enter_context(socket.create_connection(place, 600.0)) for _ in range(200)]
        assert client.post(f"{address}/node", content=INTRODUCE).status_code == 200
        ended = 0
        for one in silent[:190]:
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
            ended += 1
        assert ended == 190
        assert client.post(f"{address}/node", content=INTRODUCE).status_code == 200


def test_an_answer_that_nobody_reads_is_in_memory_once(folder: Path) -> None:
    """With 16 connections, copies of it would take gigabytes that no policy bounds."""
    content = bytes(1 << 26)
    node = SimpleNamespace(answer=lambda request, *, by=None: content, allowed=Policy())
    with serving(folder, {"node": node}) as address, connected(address, folder) as silent:
        (process,) = active_children()

        def peak() -> int:
            return int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) << 10

        status = Path(f"/proc/{process.pid}/status")
        before = peak()
        silent.sendall(HEAD + b"Content-Length: 1\r\n\r\nx")
        assert silent.recv(12) == b"HTTP/1.1 200"
        time.sleep(1.0)
        assert peak() - before < len(content) // 2


def left_out(address: str, folder: Path, timeout: float = 600.0) -> str:
    """Return why a fit goes on without the node at an address."""
    with pytest.raises(TooFewNodes) as error:
        nodes = EXAMPLE["over_https"]({"north": address}, of_server(folder), timeout=timeout)
        hierfl.nodes.fit(plain(), nodes, rounds=1)
    return str(error.value)


def test_a_node_of_another_authority_or_name_is_left_out(
    place: str, folder: Path, other: Path
) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in left_out(place, other)
    assert "certificate is not valid for '127.0.0.1'" in left_out(
        place.replace("localhost", "127.0.0.1"), folder
    )


def test_a_node_that_is_away_is_left_out(folder: Path) -> None:
    assert "ConnectError" in left_out("https://localhost:9", folder)


async def dripping() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0.2)
        yield b"x"


async def long() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield bytes(1 << 16)


async def bomb(request: Request) -> Response:
    packed = gzip.compress(write_answer(await request.body(), bytes(1 << 24)))
    return Response(packed, headers={"content-encoding": "gzip"})


HOSTILE: dict[str, tuple[Any, str]] = {
    "slow": (lambda request: StreamingResponse(dripping()), "it did not answer within 1 s"),
    "long": (lambda request: StreamingResponse(long()), "its answer has more than 1,048,576 bytes"),
    "compressed": (bomb, "it is not JSON"),  # it is not decompressed
    "elsewhere": (lambda request: RedirectResponse("/other"), "Redirect response '307"),
    "nowhere": (lambda request: Response(None, 302, {"location": "mailto:x"}), "InvalidURL"),
    "no name": (lambda request: Response(None, 302, {"location": "http://xn--a/"}), "Codepoint"),
    "failing": (lambda request: Response(status_code=500), "Server error '500"),
    "empty": (lambda request: Response(), "it is not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_in_place_of_a_node_is_left_out(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GLOBALS, "MOST", 1 << 20)
    answer, why = HOSTILE[name]
    app = Starlette(routes=[Route("/node", answer, methods=["POST"])])
    with serving(folder, {}, app) as address:
        assert why in left_out(f"{address}/node", folder, 1.0 if name == "slow" else 600.0)

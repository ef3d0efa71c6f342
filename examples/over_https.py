"""hierfl over plain HTTPS: a node and a server, here two hospitals with TLS on this machine.

    python examples/over_https.py [--smoke]

A node serves one address, to which the server posts a request and gets the answer back. Both sides show a
certificate of the same authority. The nodes run in a process of their own, as their rows do.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

import hierfl
from hierfl.core.trees import named_leaves
from hierfl.nodes import Answer, Reached, Station, over, station

MOST = 1 << 28  # bytes of an answer
BYTES = {"content-type": "application/octet-stream"}  # a browser's form has another
# of uvicorn: whatever comes after a request is not read; the connections that are taken at a time have
# 256 KiB each
SERVES: dict[str, Any] = {"headers": [("connection", "close")], "ws": "none", "loop": "asyncio"}
SERVES |= {"backlog": 128}
PART = 1 << 16  # bytes of an answer that are sent at a time


# ------------------------------------------------------------ at a node
def least(stations: Mapping[str, Station], key: str) -> int:
    """Return the least that the policies of stations allow by a key."""
    return min((getattr(node.allowed, key) for node in stations.values()), default=0)


class Sent(Response):
    """An answer that is sent by parts, as it is read: within some seconds, or the connection is closed."""

    def __init__(self, content: bytes, seconds: float) -> None:
        super().__init__(content, headers=BYTES)
        self.seconds = seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the parts; what nobody reads is in memory once."""
        whole, ends = memoryview(self.body), range(PART, len(self.body) + PART, PART)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                head = {"status": self.status_code, "headers": self.raw_headers}
                await send({"type": "http.response.start", **head})
                for end in ends:
                    part = {"body": bytes(whole[end - PART : end]), "more_body": end < len(whole)}
                    await send({"type": "http.response.body", **part})


def served(stations: Mapping[str, Station]) -> Starlette:
    """Return the application of one node, or of several on one machine: path -> its station.

    What comes in for all of them, and is not answered yet, is of `bytes_a_request` together.
    """
    limit = least(stations, "bytes_a_request")
    slowest = least(stations, "seconds_to_send")
    coming: Counter[str] = Counter()

    async def answer(request: Request) -> Response:
        content, came = bytearray(), request.url.path
        if request.headers.get("content-type") != BYTES["content-type"]:
            return Response("no bytes", 415)
        try:
            async with asyncio.timeout(slowest):
                async for part in request.stream():
                    content += part
                    coming[came] += len(part)
                    if coming.total() > limit:
                        alone = len(content) == coming.total()
                        return Response("too long", 413 if alone else 503)
            who = None if request.client is None else request.client.host
            here = stations[came.strip("/")]
            answered = await run_in_threadpool(here.answer, bytes(content), by=who)
        except TimeoutError:
            return Response("too slow", 408)
        finally:
            coming[came] -= len(content)
        return Sent(answered, slowest)

    return Starlette(routes=[Route(f"/{path}", answer, methods=["POST"]) for path in stations])


class Listening(socket.socket):
    """A port whose connections shake hands soon: beyond `limit` that have not, the oldest is cut off.

    asyncio keeps what does not shake hands for a minute, with 256 KiB, and tells nobody of it.
    """

    def __init__(self, limit: int, port: int = 0) -> None:
        super().__init__()
        self.limit, self.strangers = limit, dict[Any, socket.socket]()
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("localhost", port))
        self.listen()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection, and where it comes from."""
        made, whence = super().accept()
        there = {at: of for at, of in self.strangers.items() if of.fileno() >= 0}
        self.strangers = {**there, whence: made}
        if len(self.strangers) > self.limit:
            with suppress(OSError):  # it is gone
                self.strangers.pop(next(iter(self.strangers))).shutdown(socket.SHUT_RDWR)
        return made, whence


def hurried(stations: Mapping[str, Station], port: Listening) -> type[H11Protocol]:
    """Return what reads connections, and hangs up where headers do not come in time, or too many are open."""
    limit, slowest = least(stations, "connections"), least(stations, "seconds_to_send")

    class Hurried(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            port.strangers.pop(transport.get_extra_info("peername"), None)
            super().connection_made(transport)
            if len(self.connections) > limit:
                return transport.abort()
            self.loop.call_later(slowest, lambda: self.cycle or transport.abort())

    return Hurried


def trusted(folder: Path, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Return the TLS of one side: its certificate and key, and the authority that signed the other's."""
    context = ssl.create_default_context(purpose, cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "own.pem", folder / "own.key")
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# ------------------------------------------------------------ at the server
def over_https(
    addresses: Mapping[str, str], tls: ssl.SSLContext, *, fewest: int = 1, timeout: float = 600.0
) -> Reached:
    """Return nodes by their addresses, for `hierfl.nodes.fit`; `timeout` is in seconds."""

    async def post(client: httpx.AsyncClient, name: str, request: bytes) -> Answer:
        content = bytearray()
        try:
            async with (
                asyncio.timeout(timeout),
                client.stream("POST", addresses[name], content=request) as response,
            ):
                response.raise_for_status()
                async for part in response.aiter_raw():  # never decompressed
                    content += part
                    if len(content) > MOST:
                        return Answer(name, None, f"its answer has more than {MOST:,} bytes")
        except TimeoutError:
            return Answer(name, None, f"it did not answer within {timeout:g} s")
        except Exception as error:  # whatever what a node sends raises in httpx and below it
            return Answer(name, None, f"{type(error).__name__}: {error}")
        return Answer(name, bytes(content))

    async def post_all(requests: Mapping[str, bytes]) -> list[Answer]:
        options: Any = {"timeout": None, "limits": httpx.Limits(), "trust_env": False}
        async with httpx.AsyncClient(verify=tls, headers=BYTES, **options) as client:
            return await asyncio.gather(*(post(client, *request) for request in requests.items()))

    def ask(requests: Mapping[str, bytes]) -> list[Answer]:
        with ThreadPoolExecutor(1) as pool:  # a notebook runs a loop of its own
            return pool.submit(asyncio.run, post_all(requests)).result()

    return over(ask, addresses, fewest=fewest)


# ------------------------------------------------------------ both, on this machine
HOSPITALS = ("cleveland", "hungarian")


def model() -> Any:
    """Return the model, the same at the server and at every node."""
    return hierfl.models.regression("bernoulli", centered=True)


def certificates(folder: Path) -> None:
    """Make an authority for this run, and one certificate for both sides, of "localhost"; openssl does it."""
    for name, usage in (("ca", ["-addext", "keyUsage=critical,keyCertSign"]), ("own", [])):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes"]
        subject = ["-subj", f"/CN={name}", "-keyout", f"{folder / name}.key"]
        signs = ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key")] * (name == "own")
        about = ["basicConstraints=critical,CA:FALSE", "subjectAltName=DNS:localhost"]
        names = [word for extension in about for word in ("-addext", extension)] * (name == "own")
        out = ["-out", str(folder / ("ca.crt" if name == "ca" else "own.pem"))]
        command = ["openssl", "req", "-x509", *key, *subject, *signs, *names, *usage, "-days", "30"]
        subprocess.run([*command, *out], check=True, capture_output=True)


def serve_hospitals(folder: Path, port: int) -> None:
    """Serve the stations of all hospitals, until the process is stopped; each has a folder."""
    data = hierfl.datasets.heart_disease()
    stations = {name: station(model(), data.select([name]), folder / name) for name in HOSPITALS}
    place = Listening(least(stations, "connections"), port)
    how: Any = {**SERVES, "http": hurried(stations, place), "log_level": "warning"}
    config = uvicorn.Config(served(stations), **how)
    config.load()
    config.ssl = trusted(folder, ssl.Purpose.CLIENT_AUTH)
    uvicorn.Server(config).run([place])


def wait_for(port: int, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Wait until a process listens on a port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as tried:
            if tried.connect_ex(("localhost", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"no node listens on port {port}: see what it has printed")


def main() -> None:
    """Fit over HTTPS, and compare with a fit of all rows here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one round")
    parser.add_argument("--node", nargs=2, metavar=("FOLDER", "PORT"), help="used by itself")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    if options.node:
        return serve_hospitals(Path(options.node[0]), int(options.node[1]))
    rounds = 1 if options.smoke else None
    with tempfile.TemporaryDirectory() as home, socket.socket() as free:
        free.bind(("localhost", 0))
        port, folder = free.getsockname()[1], Path(home)
        free.close()
        certificates(folder)
        command = [sys.executable, __file__, "--node", home, str(port)]
        nodes = subprocess.Popen(command)
        try:
            wait_for(port, nodes)
            tls = trusted(folder, ssl.Purpose.SERVER_AUTH)
            places = {name: f"https://localhost:{port}/{name}" for name in HOSPITALS}
            fit = hierfl.nodes.fit(model(), over_https(places, tls), rounds=rounds)
        finally:
            nodes.terminate()
            nodes.wait()
    here = hierfl.fit(model(), hierfl.datasets.heart_disease().select(HOSPITALS), rounds=rounds)
    there = named_leaves(fit.message)
    off = max(float((there[k] - v).abs().max()) for k, v in named_leaves(here.message).items())
    if off > 1e-9:
        raise SystemExit(f"the fit over HTTPS differs from hierfl.fit on all rows by {off:.1e}")
    print(f"{len(fit.history)} rounds over HTTPS; farthest from hierfl.fit on all rows: {off:.1e}")


if __name__ == "__main__":
    main()

"""Each transport, with real bytes in between: what the tests of `test_transports.py` go over."""

import importlib
import importlib.util
import json
import runpy
import ssl
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pandas as pd
import pytest
import uvicorn

from hierfl.nodes import Answer, Reached, by_files, over
from hierfl.nodes.request_files import answer_waiting

ROOT = Path(__file__).parents[2]
EXAMPLE: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "over_https.py"))
VANTAGE6 = ROOT / "examples" / "vantage6_formula"


@dataclass(frozen=True)
class Way:
    """A transport: `reached` has nodes for a fit, `ask` takes any bytes to one node and brings back its answer.

    A node is whatever has the `answer` of a station; `by` is what its log says of who asked.
    """

    reached: Callable[..., Reached]  # (name -> node, seconds to wait for it)
    ask: Callable[[Any, bytes], bytes]
    by: str | None = None


@contextmanager
def memory(folder: Path) -> Iterator[Way]:
    """A function of this process."""

    def reached(nodes: Mapping[str, Any], timeout: float = 100.0) -> Reached:
        def ask(requests: Mapping[str, bytes]) -> Iterator[Answer]:
            for name, request in requests.items():
                yield Answer(name, nodes[name].answer(request, by="server"))

        return over(ask, nodes)

    yield Way(reached, lambda node, request: bytes(node.answer(request, by="server")), "server")


@contextmanager
def files(folder: Path) -> Iterator[Way]:
    """Folders, into which the nodes look whenever the server waits: Pyro's handlers are global to a process."""
    watched: list[tuple[Any, Path]] = []
    numbers = count()

    def work(seconds: float) -> None:
        for node, mail in watched:
            list(answer_waiting(node, mail))

    def reached(nodes: Mapping[str, Any], timeout: float = 100.0) -> Reached:
        home = folder / f"mail-{next(numbers)}"
        watched[:] = [(node, home / name) for name, node in nodes.items()]
        return by_files(home, nodes, timeout=timeout)

    def ask(node: Any, request: bytes) -> bytes:
        mail = folder / f"one-{next(numbers)}"
        mail.mkdir(parents=True)
        (mail / "1.request.hfl").write_bytes(request)
        list(answer_waiting(node, mail))
        return (mail / "1.answer.hfl").read_bytes()

    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(sleep=work, monotonic=count().__next__)  # a second a look
        patch.setattr(sys.modules["hierfl.nodes.request_files"], "time", clock)
        yield Way(reached, ask)


@contextmanager
def serving(folder: Path, nodes: Mapping[str, Any], app: Any = None) -> Iterator[str]:
    """Serve nodes over HTTPS from a fork, with the certificates of a folder; yield the address.

    A thread would not do: a fit and a node take turns in one process.
    """
    how: Any = {**EXAMPLE["SERVES"], "log_level": "critical"}
    limit = EXAMPLE["least"](nodes, "connections")
    with EXAMPLE["Listening"](limit or 100) as listening, warnings.catch_warnings():
        how |= {"http": EXAMPLE["hurried"](nodes, listening)} if nodes else {}
        config = uvicorn.Config(app or EXAMPLE["served"](nodes), **how)
        config.load()
        config.ssl = EXAMPLE["trusted"](folder, ssl.Purpose.CLIENT_AUTH)
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12, of forks
        port, run = listening.getsockname()[1], uvicorn.Server(config).run
        process = get_context("fork").Process(target=run, args=([listening],))
        process.start()
    try:
        yield f"https://localhost:{port}"
    finally:
        process.kill()
        process.join()


@contextmanager
def https(folder: Path) -> Iterator[Way]:
    """`examples/over_https.py`, with TLS on this machine."""
    folder.mkdir(parents=True)
    EXAMPLE["certificates"](folder)
    tls = EXAMPLE["trusted"](folder, ssl.Purpose.SERVER_AUTH)
    places: dict[Any, str] = {}
    how: Any = {"verify": tls, "trust_env": False, "headers": EXAMPLE["BYTES"], "timeout": 100.0}
    with ExitStack() as stack:

        def reached(nodes: Mapping[str, Any], timeout: float = 100.0) -> Reached:
            place = stack.enter_context(serving(folder, nodes))
            places = {name: f"{place}/{name}" for name in nodes}
            found: Reached = EXAMPLE["over_https"](places, tls, timeout=timeout)
            return found

        def ask(node: Any, request: bytes) -> bytes:
            if node not in places:
                places[node] = stack.enter_context(serving(folder, {"node": node})) + "/node"
            return httpx.post(places[node], content=request, **how).raise_for_status().content

        yield Way(reached, ask, "127.0.0.1")


def _without_vantage6() -> dict[str, ModuleType]:
    """Return stand-ins of what the algorithm imports, for tests where vantage6 is not installed."""

    def given(name: str) -> Callable[[Any], Any]:
        def decorated(function: Any) -> Any:
            return lambda *args, **kw: function(*kw.pop(name, ()), *args, **kw)

        return decorated

    util: Any = ModuleType("util")
    client: Any = ModuleType("client")
    decorators: Any = ModuleType("decorators")
    util.info, client.AlgorithmClient = print, object
    decorators.data = lambda number: given("mock_data")
    decorators.algorithm_client = lambda function: (
        lambda *args, mock_client=None, **kw: function(mock_client, *args, **kw)
    )
    tools = "vantage6.algorithm.tools"
    packages = {name: ModuleType(name) for name in ("vantage6", "vantage6.algorithm", tools)}
    made = {f"{tools}.util": util, f"{tools}.decorators": decorators}
    return {**packages, **made, "vantage6.algorithm.client": client}


@contextmanager
def algorithm() -> Iterator[Any]:
    """Yield the algorithm's module, with vantage6 or without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(VANTAGE6)
        if importlib.util.find_spec("vantage6") is None:
            for name, module in _without_vantage6().items():
                patch.setitem(sys.modules, name, module)
        yield importlib.import_module("hierfl_formula.algorithm")


class Organizations:
    """What the algorithm calls of vantage6's client: a task `partial` is run here, its input through JSON."""

    collaboration_id = 1

    def __init__(self, functions: Any, organization: int = 0) -> None:
        self.functions, self.organization_id = functions, organization
        self.task = self.organization = self
        self.results: list[str] = []

    def create(self, *, input_: Any, organizations: list[int], name: str) -> dict[str, int]:
        (number,), sent = organizations, json.loads(json.dumps(input_))
        assert sent["method"] == "partial"
        there = Organizations(self.functions, number)
        frame = pd.DataFrame({"y": [0]})
        found = self.functions.partial(mock_client=there, mock_data=[frame], **sent["kwargs"])
        self.results.append(json.dumps(found))
        return {"id": len(self.results)}

    def wait_for_results(self, task_id: int, interval: float) -> list[Any]:
        return [json.loads(self.results[task_id - 1])]

    def get(self, number: int) -> dict[str, str]:
        return {"name": f"organization-{number}"}


HOW: dict[str, Any] = {"formula": "y ~ 1", "clients": "h", "family": "gaussian"}
HOW |= {"priors": None, "missing": "refuse"}


@contextmanager
def vantage6(folder: Path) -> Iterator[Way]:
    """The functions of `examples/vantage6_formula`, whose nodes answer for given ones."""
    with algorithm() as functions, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEMPORARY_FOLDER", str(folder))
        patch.setattr(functions, "_model", lambda *asked: None)

        def having(nodes: list[Any]) -> Organizations:
            def station(model: Any, rows: Any, place: Path, **how: Any) -> Any:
                return nodes[int(place.name.removeprefix("organization-"))]

            patch.setattr(functions, "station", station)
            return Organizations(functions)

        def reached(nodes: Mapping[str, Any], timeout: float = 100.0) -> Reached:
            client = having(list(nodes.values()))
            found: Reached = functions._nodes(client, range(len(nodes)), HOW, 1, timeout)
            return found

        def ask(node: Any, request: bytes) -> bytes:
            client = having([node])
            sent = {**HOW, "request": functions._text(request)}
            task = client.create(
                input_={"method": "partial", "kwargs": sent}, organizations=[0], name="any"
            )
            return bytes(functions._bytes(client.wait_for_results(task["id"], 0.0)[0]))

        yield Way(reached, ask, "vantage6 collaboration 1")


WAYS: dict[str, Callable[[Path], AbstractContextManager[Way]]] = {
    "memory": memory,
    "files": files,
    "https": https,
    "vantage6": vantage6,
}

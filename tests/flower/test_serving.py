"""`hierfl node serve`: real SuperNodes whose messages are answered by processes that are forked."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import hierfl
from hierfl import methods
from hierfl.core.trees import named_leaves
from hierfl.flower import superlink
from hierfl.flower.project import write_project
from hierfl.flower.serving import serve
from tests.flower.test_apps import identity
from tests.flower.test_link import started

__all__ = ["identity"]  # a fixture of every test here
NAME, CLIENTS = "served_by_forks", ("east", "west")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rows(folder: Path) -> hierfl.ClientData:
    """Write each client's rows into its folder, and return all of them."""
    rng, parts = np.random.default_rng(0), []
    for client in CLIENTS:
        x = rng.normal(size=(30, 2))
        frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": (x[:, 0] > 0.0).astype(float)})
        (folder / client).mkdir()
        frame.to_csv(folder / client / "rows.csv", index=False)
        parts.append(frame.assign(client=client))
    return hierfl.ClientData.from_frame(pd.concat(parts), "client", x=["a", "b"], y="y")


@pytest.mark.slow
def test_nodes_served_by_forked_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    project, data = tmp_path / NAME, rows(tmp_path)
    write_project(NAME, tmp_path, nodes=2)
    monkeypatch.syspath_prepend(project)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    options = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    programs = Path(sys.executable).parent
    with ExitStack() as stack:
        address = stack.enter_context(started(tmp_path, *options))
        for client in CLIENTS:
            port = free_port()
            config = f'client="{client}" folder="{tmp_path / client}"'
            place = ("--insecure", "--superlink", address, "--port", str(port))
            node = [programs / "flower-supernode", *place, "--node-config", config, *options]
            answers = f"node serve --supernode 127.0.0.1:{port} --secret {secret}"
            commands: dict[str, list[Any]] = {
                "node": node,
                "serve": [programs / "hierfl", *answers.split()],
            }
            for name, command in commands.items():
                log = stack.enter_context(open(tmp_path / f"{client}-{name}.log", "w"))
                process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
                stack.callback(process.wait)
                stack.callback(process.terminate)
        model: Any = __import__(f"{NAME}.model", fromlist=["model"]).model
        torch.set_default_dtype(torch.float64)
        method = methods.fedsvi(model)
        link = superlink(
            address, project=project, nodes=2, insecure=True, secret=secret, timeout=600.0
        )
        with link as there:
            over = hierfl.nodes.fit(method, there, rounds=2)
    here = named_leaves(
        hierfl.fit(
            method, data, rounds=2, settings=hierfl.Settings(compile=False), progress=False
        ).message
    )
    for name, value in named_leaves(over.message).items():
        assert float((value - here[name]).abs().max()) < 1e-9, name
    assert over.history["left_out"].map(len).tolist() == [0, 0]


def test_a_wrong_secret_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "0")
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    options = ("--isolation", "process", "--superexec-auth-secret-file", str(secret))
    with started(tmp_path, *options) as address:  # a SuperLink's API refuses as a SuperNode's does
        for wrong, words in ((b"w" * 32, "another secret than"), (None, "no secret")):
            with pytest.raises(ConnectionError, match=f"refuses .*--isolation process.*{words}"):
                serve(address, secret=wrong)

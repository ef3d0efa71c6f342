"""A run at a SuperLink (`--isolation process`) that this process serves in place of `flwr-serverapp`."""

import hashlib
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import Status, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from hierfl.flower.serving import taking_tasks

WAIT = 20.0  # seconds for the SuperLink to hand the task over


@dataclass(frozen=True)
class Address:
    """Where a SuperLink is, its authority's certificates (PEM), and its superexec secret."""

    address: str
    certificates: bytes | None
    insecure: bool
    secret: bytes | None

    @property
    def place(self) -> dict[str, Any]:
        """What every client of Flower's takes."""
        return {"insecure": self.insecure, "root_certificates": self.certificates}


@dataclass(frozen=True, eq=False)
class ServerTask:
    """The server task of a run; `identity` is what Flower keeps once per process."""

    run: int
    grid: HttpGrid
    client: RuntimeHttpClient
    beat: HeartbeatSender
    over: threading.Event
    identity: Mapping[str, int]

    def begin(self) -> None:
        """Make this task, unless it is over, the sender of this process's messages."""
        if self.over.is_set():
            raise RuntimeError(
                f"run {self.run} at the SuperLink is over (it was closed or stopped, or it missed "
                "this process): call hierfl.flower.superlink again; a fit with a checkpoint goes "
                "on by resume=True"
            )
        for name, number in self.identity.items():
            setattr(TaskIdentity, name, number)

    def end(self) -> None:
        """Report the run as complete to the SuperLink. A second call does nothing."""
        if self.beat.is_running:
            self.beat.stop()
        if not self.over.is_set():
            self.over.set()
            with suppress(httpx.HTTPError):  # a SuperLink that is gone needs no word
                self.client.PushTaskOutput(
                    PushTaskOutputRequest(sub_status=SubStatus.COMPLETED, details="")
                )
        self.grid.close()
        self.client.close()


def served(at: Address, project: Path) -> ServerTask:
    """Start a run of a project, a folder with a pyproject.toml, and take its server task."""
    control = ControlHttpClient.from_server_address(
        at.address, interceptors=[RuntimeVersionHttpInterceptor("flwr CLI")], **at.place
    )
    try:
        with _said(at):
            _check_none_waits(control)
            run = _started(control, project)
            try:
                return _taken(at, run)
            except BaseException:
                with suppress(httpx.HTTPError):
                    control.StopRun(StopRunRequest(run_id=run))
                raise
    finally:
        control.close()


def _check_none_waits(control: ControlHttpClient) -> None:
    """Refuse to begin while another run waits for a server: this process would get its task."""
    waits = [
        run.run_id
        for run in control.ListRuns(ListRunsRequest()).run_dict.values()
        if run.status.status == Status.PENDING
    ]
    if waits:
        raise RuntimeError(
            f"run {waits[0]} at the SuperLink has no server yet: wait for it, or end it with flwr "
            f"stop {waits[0]}"
        )


def _started(control: ControlHttpClient, project: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of flwr's own use of pathspec
        content = build_fab_from_disk(project)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    answered = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    if not answered.HasField("run_id"):
        raise RuntimeError("the SuperLink has started no run: its log says why")
    return int(answered.run_id)


def _taken(at: Address, run: int) -> ServerTask:
    token = _token(at, run)
    signed: list[ProtobufClientInterceptor] = [
        RuntimeVersionHttpInterceptor("flwr-serverapp"),
        RuntimeTokenHttpInterceptor(token),
    ]
    client = RuntimeHttpClient.from_server_address(at.address, interceptors=signed, **at.place)
    task_input = client.PullTaskInput(PullTaskInputRequest())
    grid = HttpGrid(at.address, token=token, **at.place)
    grid.set_run(run_from_proto(task_input.run))
    over = threading.Event()
    beat = HeartbeatSender(lambda: _alive(client, over))
    numbers = {"task_id": task_input.task_id, "run_id": run, "node_id": task_input.context.node_id}
    beat.start()
    return ServerTask(run, grid, client, beat, over, numbers)


def _token(at: Address, run: int) -> str:
    """Take the server task of a run, and return its token."""
    client = taking_tasks(at.address, at.secret, **at.place)
    until = time.monotonic() + WAIT
    try:
        while time.monotonic() < until:
            request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            acquired = client.AcquireTask(request)
            if acquired.token and acquired.task.run_id == run:
                return str(acquired.token)
            if acquired.token:
                raise RuntimeError(
                    f"the SuperLink handed over run {acquired.task.run_id}, which was started at the "
                    f"same moment, and not run {run}: start both again, one after the other"
                )
            time.sleep(0.2)
    finally:
        client.close()
    raise RuntimeError(
        "the SuperLink does not hand over the run's server task: start it with --isolation "
        "process, and no flower-superexec beside it"
    )


def _alive(client: RuntimeHttpClient, over: threading.Event) -> bool:
    """Send a heartbeat; return False where it is to be sent again soon."""
    if over.is_set():
        return True
    try:
        is_going = client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
    except httpx.TransportError:
        return False
    except httpx.HTTPStatusError as error:
        if error.response.status_code in (503, 504):
            return False
        is_going = False
    if not is_going:  # stopped by flwr stop, or given up after a minute without a sign
        over.set()
    return True


@contextmanager
def _said(at: Address) -> Iterator[None]:
    """Explain what went wrong between this process and the SuperLink."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        secret = "the one" if at.secret is None else "another one than that"
        advice = f" (is secret= {secret} of its --superexec-auth-secret-file?)"
        path = str(error.request.url.path)
        raise ConnectionError(
            f"the SuperLink at {at.address} refuses {path}: {error.response.text[:300]}"
            f"{advice if 'acquire' in path else ''}"
        ) from error
    except httpx.TransportError as error:
        raise ConnectionError(
            f"no SuperLink is reached at {at.address} ({error}): see its address, port and "
            "root_certificates"
        ) from error

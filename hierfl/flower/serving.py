"""Processes for a SuperNode's messages, forked from one that has imported flwr, torch and hierfl (7 s of a core)."""

import multiprocessing
import os
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

import httpx
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

NOT_READY = (502, 503, 504)  # of HTTP, of an API that starts or ends
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
# what a client app imports, and what torch imports when a gradient is taken for the first time
MODULES = [
    "hierfl.flower",
    "hierfl.methods",
    "hierfl.models",
    "hierfl.nodes.local_fit",
    "flwr.supernode.runtime.run_clientapp",
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "pandas",
]


def serve(
    address: str,
    *,
    root_certificates: bytes | None = None,
    secret: bytes | None = None,
    wait: float = 0.1,
) -> None:
    """Answer a SuperNode's messages until this process is stopped; wait for a missing one.

    Without `root_certificates`, PEM, `address` is plain HTTP; `wait` is seconds between two looks.
    """
    client = taking_tasks(
        address, secret, insecure=root_certificates is None, root_certificates=root_certificates
    )
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(MODULES)
    forkserver.ensure_running()  # now, and not at the first message
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    busy: list[BaseProcess] = []
    try:
        while True:
            if token := _token(client, request):
                args = (address, root_certificates, token, os.getpid())
                busy.append(forks.Process(target=answer_one, args=args))
                busy[-1].start()
            busy = [process for process in busy if process.is_alive()]
            time.sleep(wait)
    except httpx.HTTPStatusError as error:
        secret_too = "another secret than the SuperNode's" if secret else "no secret"
        raise ConnectionError(
            f"the SuperNode at {address} refuses ({error.response.text[:200]}): was it started "
            f"with --isolation process? This process has {secret_too}, of its "
            "--superexec-auth-secret-file"
        ) from error
    finally:
        client.close()


def taking_tasks(
    address: str, secret: bytes | None, *, insecure: bool, root_certificates: bytes | None
) -> RuntimeHttpClient:
    """Return a client that may take tasks from a SuperLink or SuperNode; arguments as `serve`."""
    asks: list[ProtobufClientInterceptor] = [RuntimeVersionHttpInterceptor("SuperExec")]
    if secret is not None:
        asks.append(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE]))
    return RuntimeHttpClient.from_server_address(
        address, insecure=insecure, root_certificates=root_certificates, interceptors=asks
    )


def _token(client: RuntimeHttpClient, request: AcquireTaskRequest) -> str:
    """Return the token of a waiting message, or "" where none waits or the SuperNode is away."""
    try:
        return str(client.AcquireTask(request).token)
    except httpx.TransportError:
        return ""
    except httpx.HTTPStatusError as error:
        if error.response.status_code in NOT_READY:
            return ""
        raise


def answer_one(address: str, root_certificates: bytes | None, token: str, parent: int) -> None:
    """Answer the message of a token in its own process, which ends with that of id `parent`."""
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    run_clientapp(
        address,
        token,
        insecure=root_certificates is None,
        certificates=root_certificates,
        parent_pid=parent,
        runtime_dependency_install=False,
    )

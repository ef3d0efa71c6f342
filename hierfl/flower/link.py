"""A SuperLink whose run is served by this process, such as a notebook."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hierfl.core.arguments import expect_count
from hierfl.flower.at_server import FlowerServer
from hierfl.flower.task import Address, ServerTask, served
from hierfl.nodes.choosing import FitCall
from hierfl.nodes.reached import Reached


@dataclass(frozen=True, eq=False)
class SuperLink:
    """A run at a SuperLink, served by this process until `close`. Use it in a `with` block.

    Args:
        server: asks the nodes.
        task: of the run at the SuperLink.
    """

    server: FlowerServer
    task: ServerTask

    def reached(self, call: FitCall) -> Reached:
        """Return the nodes of the SuperLink, once enough of them are connected."""
        return self.server.reached(send_recipe=True)

    def ask_about_rows(self, formula: Any, *question: Any) -> Any:
        """Ask the nodes about their rows; `hierfl.describe` and `hierfl.kaplan_meier` call it."""
        return self.server.reached().ask_about_rows(formula, *question)

    def close(self) -> None:
        """End the run at the SuperLink: nodes cannot be asked then. A second call does nothing."""
        self.task.end()

    def __enter__(self) -> Self:
        """Return the link, which is closed at the end of the block."""
        return self

    def __exit__(self, *raised: object) -> None:
        """End the run at the SuperLink."""
        self.close()


def superlink(
    address: str,
    *,
    project: str | Path,
    nodes: int,
    root_certificates: str | Path | None = None,
    secret: str | Path | None = None,
    insecure: bool = False,
    fewest: int = 1,
    timeout: float = 600.0,
) -> SuperLink:
    """Start a run at a running SuperLink, and make this process its server.

    The SuperLink must have been started with `--isolation process`. The project goes to the nodes,
    as by `flwr run`; its server app is not used. Where its app is made from a model, that model may
    be fitted by any method, seed and number of rounds; where it is made from a method, only by that
    method.

    Args:
        address: host and port of the SuperLink's HTTP API, "server.example.org:8000".
        project: folder of the Flower project, as `hierfl new` writes it.
        nodes: how many nodes a fit waits for before its first round.
        root_certificates: file with the certificate of the authority that has signed the
            SuperLink's, PEM. Default None: the system's authorities.
        secret: the SuperLink's `--superexec-auth-secret-file`. Default None: it has none.
        insecure: plain HTTP, to a SuperLink on this machine that was started with `--insecure`.
        fewest: as in `hierfl.nodes.over`.
        timeout: seconds that a fit waits for nodes, and for their answers in a round.

    Returns:
        The link, the `nodes` of `hierfl.nodes.fit`. It may serve several fits in turn. After a fit,
        the nodes answer questions of that fit alone.

    Raises:
        ValueError: the folder is no Flower project; `nodes` or `fewest` is below 1; or both
            `insecure` and certificates are given.
        FileNotFoundError: there is no such file of certificates or of a secret.
        ConnectionError: there is no such SuperLink, or it refuses.
        RuntimeError: the SuperLink serves its runs itself, or another run still waits for a server.
    """
    root = Path(project)
    if not (root / "pyproject.toml").is_file():
        raise ValueError(f"'{root}' has no pyproject.toml: write a project with hierfl new NAME")
    for name, count in (("nodes", nodes), ("fewest", fewest)):
        expect_count(count, name)
    if insecure and root_certificates is not None:
        raise ValueError("insecure is True, and root_certificates are given: leave one of them out")
    certificates = None if root_certificates is None else Path(root_certificates).read_bytes()
    signed = None if secret is None else Path(secret).read_bytes()
    task = served(Address(address, certificates, insecure, signed), root)
    return SuperLink(FlowerServer(task.grid, timeout, nodes, fewest, task.begin), task)

"""Four hospitals on Flower, on this machine: a SuperLink and four SuperNodes, with TLS and node authentication.

Certificates, keys and the hospitals' folders are made from scratch. The posterior of the hierarchy
by two_stage, and a common model by fedavg, are compared with those of `hierfl.fit` on all rows
together; the means of the first also with NUTS, where HIERFL_DATA has its reference posterior. Run
it with `make demo-flower`.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import multiprocessing
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import hierfl
from hierfl.core.disk import private_folder, write_private
from hierfl.core.trees import named_leaves
from hierfl.demo.run import hospitals

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
LINK = int(os.environ.get("HOSPITALS_PORT", "8443"))
FIRST_NODE = LINK + 757  # the ports of SuperNodes, 9200 and on
NUTS = {"intercept_loc": "alpha", "slope_loc": "beta", "intercept_scale": "s", "slope_scale": "t"}
PRIVATE = (
    serialization.Encoding.PEM,
    serialization.PrivateFormat.OpenSSH,
    serialization.NoEncryption(),
)


# --------------------------------------------------------------------------------------------- keys
def certificates(folder: Path, name: str) -> None:
    """Make a certificate authority for this run, and the certificate of the SuperLink on localhost.

    Args:
        folder: of the files.
        name: what their names begin with.
    """
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hospitals")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    end = start + datetime.timedelta(days=30)

    def base(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(own).public_key(key)
        return (
            made.serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
        )

    root = base(own, authority.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    host = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    link = base(host, server.public_key()).add_extension(
        x509.SubjectAlternativeName(names), critical=False
    )
    pem = serialization.Encoding.PEM
    (folder / f"{name}ca.crt").write_bytes(root.sign(authority, hashes.SHA384()).public_bytes(pem))
    (folder / f"{name}server.pem").write_bytes(
        link.sign(authority, hashes.SHA384()).public_bytes(pem)
    )
    plain = (pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(folder / f"{name}server.key", server.private_bytes(*plain))


def node_key(folder: Path, name: str) -> None:
    """Make the key pair by which a SuperNode is known."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(folder / name, key.private_bytes(*PRIVATE))
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (folder / f"{name}.pub").write_bytes(public)


# ---------------------------------------------------------------------------------------- processes
@contextmanager
def running(name: str, command: list[str], folder: Path, **environment: str) -> Iterator[None]:
    """Run a program of Flower, with its log in the folder."""
    with open(folder / f"{name}.log", "w") as log:
        whole = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", **environment}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=whole)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def program(name: str) -> str:
    """Return the path of a program of this environment."""
    return str(Path(sys.executable).parent / name)


def flwr(folder: Path, *arguments: str) -> str:
    """Run the command flwr, and return what it prints."""
    done = subprocess.run(
        [program("flwr"), *arguments],
        env={**os.environ, "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"flwr {' '.join(arguments)} fails:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def link(folder: Path) -> list[str]:
    """Return the command that starts the SuperLink."""
    return [
        program("flower-superlink"),
        *("--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "server.pem")),
        *("--ssl-keyfile", str(folder / "server.key")),
        *("--host", "127.0.0.1", "--port", str(LINK)),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def supernode(folder: Path, name: str, port: int) -> list[str]:
    """Return the command that starts a hospital's SuperNode."""
    return [
        program("flower-supernode"),
        *("--root-certificates", str(folder / "ca.crt")),
        *("--superlink", f"127.0.0.1:{LINK}", "--port", str(port)),
        *("--auth-supernode-private-key", str(folder / name)),
        *("--node-config", f'folder="{folder / "nodes" / name}"'),
        *("--isolation", "process", "--superexec-auth-secret-file", str(folder / "secret")),
    ]


def answering(folder: Path, port: int) -> list[str]:
    """Return the command that answers the messages of a SuperNode on this machine."""
    place = ("--supernode", f"127.0.0.1:{port}", "--secret", str(folder / "secret"))
    return [program("hierfl"), "node", "serve", *place]


def strangers(folder: Path) -> dict[str, list[str]]:
    """Return the commands of SuperNodes that must not get in, by what is wrong with them."""
    good = supernode(folder, "unknown", FIRST_NODE + 99)
    authority = str(folder / "ca.crt")
    return {
        "a key that nobody has registered": good,
        "no TLS": [*good[:1], *good[3:7], "--insecure", *good[9:]],  # without authority and key
        "a server of an unknown authority": [
            str(folder / "unknown-ca.crt") if part == authority else part for part in good
        ],
    }


@contextmanager
def turned_away(folder: Path, settings: dict[str, str]) -> Iterator[None]:
    """Let the SuperNodes that must not get in try it all along, and print at the end what each one's log says.

    Raises:
        RuntimeError: one has got in.
    """
    before = len(online(folder))
    with ExitStack() as stack:
        for number, command in enumerate(strangers(folder).values()):
            command[command.index("--port") + 1] = str(FIRST_NODE + 90 + number)
            stack.enter_context(running(f"stranger-{number}", command, folder, **settings))
        yield
        if len(online(folder)) > before:
            raise RuntimeError(f"a stranger has got in: see {folder}/stranger-*.log")
    for number, why in enumerate(strangers(folder)):
        lines = (folder / f"stranger-{number}.log").read_text().splitlines()
        marks = ("code:", "CERTIFICATE", "Connection attempt failed")
        wrong = [line for mark in marks for line in lines if mark in line]
        said = (wrong or lines or ["it says nothing"])[0].strip()[:150]
        print(f"{why}: turned away ({said})", flush=True)


def wait_for_link() -> None:
    """Wait until the SuperLink takes connections.

    Raises:
        OSError: it does not within a minute.
    """
    until = time.monotonic() + 60.0
    while True:
        try:
            return socket.create_connection(("127.0.0.1", LINK)).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def wait_for(count: int, folder: Path) -> None:
    """Wait until as many SuperNodes are connected.

    Raises:
        RuntimeError: they are not within a minute.
    """
    until = time.monotonic() + 60.0
    while len(online(folder)) < count:
        if time.monotonic() > until:
            raise RuntimeError(
                f"{len(online(folder))} of {count} SuperNodes are connected: see {folder}/*.log"
            )
        time.sleep(1.0)


def online(folder: Path) -> list[dict[str, object]]:
    """Return the SuperNodes that are connected."""
    found = json.loads(flwr(folder, "supernode", "list", "local", "--format", "json"))
    nodes: list[dict[str, object]] = found["nodes"]
    return [node for node in nodes if node.get("status") == "online"]


# ------------------------------------------------------------------------------------------ the run
def here(method: str) -> dict[str, torch.Tensor]:
    """Return the last message of `hierfl.fit` on all rows together; it runs in a process of its own."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    from hospitals.model import method_of

    rounds = 5 if method == "fedavg" else None
    fit = hierfl.fit(
        method_of(method),
        training_rows(),
        rounds=rounds,
        settings=hierfl.Settings(compile=False),
        progress=False,
    )
    return dict(named_leaves(fit.message))


def apart(method: str, folder: Path, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between the deployment's last message and that of `hierfl.fit`."""
    there = named_leaves(torch.load(folder / f"{method}.pt", weights_only=True))
    return max(
        float((there[name].double() - value.double()).abs().max())
        for name, value in expected.items()
    )


def against_nuts(folder: Path) -> str:
    """Return how far the deployment's means are from those of NUTS on all rows together, in NUTS's sd."""
    try:
        truth = hierfl.datasets.reference("demo_hierarchy")
    except FileNotFoundError:
        return "not compared with NUTS: its reference posterior is not under HIERFL_DATA"
    means = json.loads((folder / "means.json").read_text())
    own = pd.read_csv(folder / "hospitals.csv")  # what the hospitals' policies let out
    for name in ("intercept", "slope"):
        rows = own[own["site"].str.split("[").str[0] == name]
        means[name] = [part["mean"].tolist() for _, part in rows.groupby("client", sort=True)]
    errors = {}
    for site, found in means.items():
        wanted = truth[NUTS.get(site, site)]
        away = np.abs(np.reshape(found, wanted.mean.shape) - wanted.mean) / wanted.sd
        errors[site] = float(away.max())
    worst = max(errors, key=lambda site: errors[site])
    return f"worst mean within {errors[worst]:.3f} sd of NUTS ({worst})"


def training_rows() -> hierfl.ClientData:
    """Return the rows of all four hospitals that are fitted."""
    data = hospitals().split(0.7, seed=0)[0]
    return data.select(sorted(data.names))


def new_folder(out: Path) -> Path:
    """Make a new private folder for a run in `out`, of which nothing else is touched."""
    out.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{datetime.datetime.now():%Y-%m-%d-%H%M}-", dir=out))


def settled(folder: Path) -> hierfl.ClientData:
    """Make certificates, keys, each hospital's folder with its rows, and Flower's settings; return all rows.

    Raises:
        FileExistsError: the folder is there and holds something.
    """
    data = training_rows()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"'{folder}' holds something already: name another folder")
    private_folder(folder)
    private_folder(folder / "home")
    certificates(folder, "")
    certificates(folder, "unknown-")
    node_key(folder, "unknown")
    write_private(folder / "secret", secrets.token_bytes(32))
    for name in data.names:
        node_key(folder, name)
        place = folder / "nodes" / name
        private_folder(folder / "nodes")
        private_folder(place)
        own = data.select([name]).fields
        columns = {f"x{k}": column for k, column in enumerate(own["x"].unbind(1))}
        table = pd.DataFrame({k: v.numpy() for k, v in {**columns, "y": own["y"]}.items()})
        write_private(place / "patients.csv", table.to_csv(index=False).encode())
        (place / "policy.toml").write_text('may_leave = ["summaries"]\n')
    (folder / "home" / "config.toml").write_text(
        f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{LINK}"\n'
        f'root-certificates = "{folder / "ca.crt"}"\n'
    )
    return data


@contextmanager
def deployment(folder: Path, names: tuple[str, ...], *options: str) -> Iterator[dict[str, str]]:
    """Start the SuperLink with more options, and the SuperNodes; give the environment that they run in."""
    settings = {
        "HOSPITALS_OUT": str(folder),
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(folder / "home"),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds between two looks for work; 1 unless it is set
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    with ExitStack() as stack:
        stack.enter_context(running("superlink", [*link(folder), *options], folder, **settings))
        for k, name in enumerate(names):  # they wait for the SuperLink
            command = answering(folder, FIRST_NODE + k)
            stack.enter_context(running(f"{name}-answers", command, folder, **settings))
        wait_for_link()
        for name in names:
            flwr(folder, "supernode", "register", str(folder / f"{name}.pub"), "local")
        for k, name in enumerate(names):
            command = supernode(folder, name, FIRST_NODE + k)
            stack.enter_context(running(name, command, folder, **settings))
        wait_for(len(names), folder)
        yield settings


def project(apps: str, folder: Path) -> Path:
    """Return the project with a pair of its apps: a copy, but for the pair that it has as it is.

    Args:
        apps: name of the pair in `hospitals/app.py`.
        folder: of copies.
    """
    own = (HERE / "pyproject.toml").read_text()
    if f"app:{apps}." in own:
        return HERE
    place = folder / f"project-{apps}"
    shutil.copytree(HERE / "hospitals", place / "hospitals", dirs_exist_ok=True)
    (place / "pyproject.toml").write_text(own.replace("app:two_stage.", f"app:{apps}."))
    return place


def deployed(method: str, folder: Path) -> float:
    """Run a method on the deployment, and return its seconds, from `flwr run` to the end."""
    began = time.monotonic()
    flwr(folder, "run", str(project(method, folder)), "local", "--stream")
    return time.monotonic() - began


def main() -> None:
    """Deploy, run, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-flower-out"), help="gets a new folder for this run"
    )
    parser.add_argument("--method", action="append", choices=["two_stage", "fedavg"])
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    folder, methods = new_folder(args.out.resolve()), args.method or ["two_stage", "fedavg"]
    data, began = settled(folder), time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as beside:  # while the programs start
        expected = {method: beside.submit(here, method) for method in methods}
        with deployment(folder, data.names) as settings, turned_away(folder, settings):
            seconds = {method: deployed(method, folder) for method in methods}
        for method in methods:
            difference = apart(method, folder, expected[method].result())
            print(
                f"{method}: {seconds[method]:.0f} s, within {difference:.1e} of hierfl.fit on all "
                "rows"
            )
    if "two_stage" in methods:
        print(against_nuts(folder))
    print(f"in all: {time.monotonic() - began:.0f} s; logs and results: {folder}")


if __name__ == "__main__":
    main()

"""Deal rows without clients out to clients: `labels, num_clients, seed -> client ids`, a row each, -1 for a row left out.

Every function is a function of its arguments alone, leaves no client without rows, and raises where that cannot be had.
`to_clients` makes the federation of them; split each client's own rows afterwards with `ClientData.split`, so that what a
client is tested on has its own mix of labels. Dirichlet and pathological partitions come from flwr-datasets (the `data` extra).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.data.clients import Array, ClientData

LEFT_OUT = -1

_Ids = NDArray[np.int64]


def to_clients(ids: Tensor, **fields: Array) -> ClientData:
    """Make the federation that a partition stands for; clients "0", "1", ..., rows left out are dropped.

    Args:
        ids: (n,) int64, from a function of this module.
        **fields: name -> (n, ...).

    Raises:
        ValueError: as `ClientData.from_arrays`.

    >>> to_clients(torch.tensor([1, 0, -1, 1]), y=[1.0, 2.0, 3.0, 4.0]).fields["y"].tolist()
    [2.0, 1.0, 4.0]
    """
    keep = ids >= 0
    names = [str(k) for k in range(int(ids.max()) + 1)]
    kept: dict[str, Any] = {name: torch.as_tensor(values) for name, values in fields.items()}
    for name, values in kept.items():
        if len(values) != len(ids):
            raise ValueError(f"field '{name}' has {len(values)} rows, the partition {len(ids)}")
    return ClientData.from_arrays(
        ids[keep], names=names, **{name: values[keep] for name, values in kept.items()}
    )


def label_table(labels: Array, ids: Tensor) -> Tensor:
    """Count rows of each class on each client: Tensor (K, C) int64, the C classes in ascending order.

    >>> label_table([0, 1, 1, 0], torch.tensor([0, 0, 1, -1])).tolist()
    [[1, 1], [0, 1]]
    """
    classes, codes = _codes(labels)
    keep = ids >= 0
    cells = ids[keep] * len(classes) + torch.from_numpy(codes)[keep]
    return torch.bincount(cells, minlength=(int(ids.max()) + 1) * len(classes)).reshape(
        -1, len(classes)
    )


def pathological(
    labels: Array,
    *,
    num_clients: int,
    classes_per_client: int,
    seed: int,
    assignment: Literal["first-deterministic", "random", "deterministic"] = "first-deterministic",
) -> Tensor:
    """Give each client rows of exactly `classes_per_client` classes; the clients of a class share its rows evenly.

    Args:
        labels: (n,) integers.
        num_clients: K.
        classes_per_client: at most the number of classes.
        seed: of the draw of classes and rows.
        assignment: "first-deterministic": client k has class k mod C and others at random, so that with K >= C no row is
            left out; "random": all at random; "deterministic": client k has the classes k, k + 1, ... mod C.

    Returns:
        (n,) int64, 0..K-1; rows of a class that no client was given are left out, -1.

    Raises:
        ValueError: more classes a client than there are, or a class with fewer rows than clients that want it.
        ImportError: flwr-datasets is not installed.

    Reference: Li et al. 2022, "Federated Learning on Non-IID Data Silos", arXiv:2102.02079; after McMahan et al. 2017.
    """
    classes, codes = _codes(labels)
    _check_clients(len(codes), num_clients)
    if not 1 <= classes_per_client <= len(classes):
        raise ValueError(
            f"classes_per_client is {classes_per_client}; the labels have {len(classes)} classes"
        )

    def make(partitioner: Any) -> Any:
        return partitioner.PathologicalPartitioner(
            num_clients, "label", classes_per_client, assignment, shuffle=False, seed=_word(seed)
        )

    try:
        return _by_flower(make, codes, num_clients, seed)
    except ValueError as error:
        raise ValueError(
            f"pathological: a class has fewer rows than clients that were given it ({error}); lower num_clients "
            f"({num_clients}) or classes_per_client ({classes_per_client})"
        ) from error


def dirichlet(
    labels: Array, *, num_clients: int, alpha: float, seed: int, min_rows: int = 1
) -> Tensor:
    """Split each class over the clients by proportions drawn from a symmetric Dirichlet(alpha).

    Args:
        labels: (n,) integers.
        num_clients: K.
        alpha: > 0; small: few classes a client; large: every client has the same mix.
        seed: of the draw.
        min_rows: the fewest rows that a client may have, at least 1; proportions are drawn again until all have them,
            eleven times at the most.

    Returns:
        (n,) int64, 0..K-1; no row is left out.

    Raises:
        ValueError: alpha <= 0, min_rows that cannot be had, or that eleven draws did not give.
        ImportError: flwr-datasets is not installed.

    Reference: Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural Networks", arXiv:1905.12022.
    """
    _, codes = _codes(labels)
    _check_clients(len(codes), num_clients, min_rows)
    if not alpha > 0.0 or not np.isfinite(alpha):
        raise ValueError(f"alpha is {alpha}; it must be positive and finite")

    def make(partitioner: Any) -> Any:
        return partitioner.DirichletPartitioner(
            num_clients,
            "label",
            float(alpha),
            min_partition_size=min_rows,
            shuffle=False,
            seed=_word(seed),
        )

    try:
        return _by_flower(make, codes, num_clients, seed)
    except ValueError as error:
        raise ValueError(
            f"dirichlet: eleven draws left a client with fewer than {min_rows} rows; raise alpha ({alpha}), or lower "
            f"num_clients ({num_clients}) or min_rows"
        ) from error


def quantity_skew(
    num_rows: int,
    *,
    num_clients: int,
    seed: int,
    sigma: float | None = None,
    alpha: float | None = None,
    min_rows: int = 1,
) -> Tensor:
    """Give clients random shares of the rows, whatever their labels: log-normal(0, sigma) or Dirichlet(alpha) sizes.

    A client has `min_rows` and, of the rest, its share, rounded so that the sizes add up.

    Args:
        num_rows: n.
        num_clients: K.
        seed: of sizes and rows.
        sigma: >= 0, standard deviation of the log of a size; 0 for equal sizes. Give either this or alpha.
        alpha: > 0, concentration.
        min_rows: at least 1.

    Returns:
        (n,) int64, 0..K-1; no row is left out.

    Raises:
        ValueError: both or none of sigma and alpha, one out of range, or more rows asked for than there are.
    """
    _check_clients(num_rows, num_clients, min_rows)
    if (sigma is None) == (alpha is None):
        raise ValueError(
            "quantity_skew takes either sigma (log-normal sizes) or alpha (Dirichlet shares)"
        )
    generator = _generator(seed)
    if sigma is not None:
        if not 0.0 <= sigma < np.inf:
            raise ValueError(f"sigma is {sigma}; it must be 0 or positive")
        logs = sigma * generator.standard_normal(num_clients)
        shares = np.exp(logs - logs.max())
    else:
        if not 0.0 < (alpha or 0.0) < np.inf:
            raise ValueError(f"alpha is {alpha}; it must be positive and finite")
        shares = generator.dirichlet(np.full(num_clients, alpha))
    ends = np.cumsum(shares) / shares.sum() * (num_rows - num_clients * min_rows)
    sizes = min_rows + np.diff(np.rint(ends).astype(np.int64), prepend=0)
    ids = np.repeat(np.arange(num_clients), sizes)
    return _finished(ids[generator.permutation(num_rows)], num_clients)


def label_skew(labels: Array, *, num_clients: int, share: float, seed: int) -> Tensor:
    """Deal a `share` of each class to the clients that have it for their majority, the rest to all evenly.

    Client k's majority class is class k mod C. With share 0 clients are alike up to chance; with share 1 and K >= C each has
    its majority class alone.

    Args:
        labels: (n,) integers.
        num_clients: K.
        share: in [0, 1].
        seed: of the draw of rows.

    Returns:
        (n,) int64, 0..K-1; no row is left out.

    Raises:
        ValueError: share outside [0, 1], or a client left without rows.
    """
    classes, codes = _codes(labels)
    _check_clients(len(codes), num_clients)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share}; it must lie between 0 and 1")
    generator = _generator(seed)
    ids = np.full(len(codes), LEFT_OUT)
    common = []
    for c in range(len(classes)):
        rows = generator.permutation(np.flatnonzero(codes == c))
        own = np.arange(c, num_clients, len(classes))
        dealt = round(share * len(rows)) if len(own) else 0
        ids[rows[:dealt]] = np.resize(own, dealt)
        common.append(rows[dealt:])
    rest = generator.permutation(np.concatenate(common))
    # Starting with the clients that have fewest rows, so that few common rows reach those who need them.
    order = np.argsort(np.bincount(ids[ids >= 0], minlength=num_clients), kind="stable")
    ids[rest] = np.resize(order, len(rest))
    return _finished(ids, num_clients)


# ---------------------------------------------------------------------- what they share
def _codes(labels: Array) -> tuple[NDArray[Any], _Ids]:
    """The classes, ascending, and each row's place among them.

    Raises:
        ValueError: labels that are not one a row.
        TypeError: floating labels.
    """
    raw = labels.numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if raw.ndim != 1 or len(raw) == 0:
        raise ValueError(f"labels have shape {raw.shape}; one label a row is needed: (n,)")
    if raw.dtype.kind == "f":
        raise TypeError("labels are floating; classes are integers (y.long())")
    classes, codes = np.unique(raw, return_inverse=True)
    return classes, codes.astype(np.int64)


def _check_clients(num_rows: int, num_clients: int, min_rows: int = 1) -> None:
    if num_clients < 1 or min_rows < 1:
        raise ValueError(
            f"num_clients is {num_clients} and min_rows {min_rows}; both must be at least 1"
        )
    if num_clients * min_rows > num_rows:
        raise ValueError(
            f"{num_clients} clients of at least {min_rows} rows need {num_clients * min_rows} rows; there are {num_rows}"
        )


def _word(seed: int) -> int:
    """A seed as NumPy takes it; negative ones wrap around."""
    return seed & 0xFFFFFFFFFFFFFFFF


def _generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_word(seed)))


def _by_flower(make: Callable[[Any], Any], codes: _Ids, num_clients: int, seed: int) -> Tensor:
    """Run one of flwr-datasets' partitioners on the labels alone, and read which rows each client was given.

    The rows are shuffled before: the partitioners cut each class in the order it comes in.
    """
    try:
        import datasets
        from flwr_datasets import partitioner
    except ImportError as error:
        raise ImportError(
            "this partition is made by flwr-datasets; install it: pip install 'hierfl[data]'"
        ) from error
    order = _generator(seed).permutation(len(codes))
    maker = make(partitioner)
    maker.dataset = datasets.Dataset.from_dict({"label": codes[order], "row": order}).with_format(
        "numpy"
    )
    ids = np.full(len(codes), LEFT_OUT)
    with warnings.catch_warnings():
        # They warn of every draw made again and of classes left out: both are said in our docstrings.
        warnings.simplefilter("ignore", UserWarning)
        for k in range(num_clients):
            ids[maker.load_partition(k)[:]["row"]] = k
    return _finished(ids, num_clients)


def _finished(ids: _Ids, num_clients: int) -> Tensor:
    counts = np.bincount(ids[ids >= 0], minlength=num_clients)
    if counts.min() == 0:
        raise ValueError(
            f"client {int(counts.argmin())} is left without rows; lower num_clients ({num_clients})"
        )
    return torch.from_numpy(ids.astype(np.int64))

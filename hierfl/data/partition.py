"""Partitions of labeled rows over clients: `labels, num_clients, seed -> ids`, one per row.

The id of a row that no client gets is -1. Each function gives every client a row, or raises. Split
(`ClientData.split`) what `to_clients` returns: test rows then have a client's own mix of labels.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hierfl.core.arguments import expect, expect_count, expect_integer, spelled
from hierfl.core.extras import extras_for
from hierfl.data.arrays import Array, as_tensor, masked_in
from hierfl.data.clients import ClientData
from hierfl.data.consistency import check_length
from hierfl.data.grouping import sort_by_client

__all__ = ["class_mixes", "dirichlet", "label_skew", "label_table", "pathological"]
__all__ += ["quantity_skew", "to_clients"]


@spelled
def to_clients(ids: Tensor, **fields: Array) -> ClientData:
    """Return the `ClientData` of a partition: clients "0", "1", ..., without rows left out.

    Args:
        ids: (n,) int64, the client of each row, as returned by a function of this module.
        **fields: name -> (n, ...).

    Raises:
        TypeError: the ids are not integers; or as `ClientData.from_arrays`.
        ValueError: an id is below -1, no row has a client, or as `ClientData.from_arrays`.

    >>> to_clients(torch.tensor([1, 0, -1, 1]), y=[1.0, 2.0, 3.0, 4.0]).fields["y"].tolist()
    [2.0, 1.0, 4.0]
    """
    ids = checked_ids(ids)
    tensors = {name: as_tensor(values, name) for name, values in fields.items()}
    for name, tensor in tensors.items():
        check_length(name, tensor, len(ids), "the partition has")
    keep = ids >= 0
    dealt = {name: tensor[keep] for name, tensor in tensors.items()}
    names = [str(k) for k in range(int(ids.max()) + 1)]
    return ClientData(**sort_by_client(ids[keep], names, dealt)._asdict())


@spelled
def label_table(labels: Array, ids: Tensor) -> Tensor:
    """Count the rows of each class on each client.

    Args:
        labels: (n,) integers.
        ids: (n,) int64, the client of each row, as returned by a function of this module.

    Returns:
        (N, L) int64: a row for each client, a column for each class in ascending order.

    Raises:
        TypeError: the ids are not integers.
        ValueError: an id is below -1, no row has a client, or there are not as many labels as ids.

    >>> label_table([0, 1, 1, 0], torch.tensor([0, 0, 1, -1])).tolist()
    [[1, 1], [0, 1]]
    """
    classes, codes = codes_of(labels)
    ids = checked_ids(ids)
    check_length("labels", torch.from_numpy(codes), len(ids), "the partition has")
    keep, wide = ids >= 0, len(classes)
    cells = ids[keep] * wide + torch.from_numpy(codes)[keep]
    return torch.bincount(cells, minlength=(int(ids.max()) + 1) * wide).reshape(-1, wide)


@spelled
def pathological(labels: Array, *, num_clients: int, classes_per_client: int, seed: int) -> Tensor:
    """Give each client rows of exactly `classes_per_client` classes, shared evenly.

    Client k has class k mod L and others at random, so that no row is left out if N >= L.

    Args:
        labels: (n,) integers, of L classes.
        num_clients: N.
        classes_per_client: between 1 and L.
        seed: seed of the draw of classes and rows.

    Returns:
        (n,) int64, 0..N-1, or -1 for the rows of a class that no client has.

    Raises:
        ValueError: `classes_per_client` is out of range, or a class has fewer rows than clients.
        ImportError: flwr-datasets is not installed.

    Reference: Li et al. 2022, "Federated Learning on Non-IID Data Silos", arXiv:2102.02079; after
        McMahan et al. 2017.
    """
    classes, codes = codes_of(labels)
    check_clients(len(codes), num_clients)
    expect(classes_per_client=(classes_per_client, f"[1, {len(classes)}]"))

    options = {
        "num_classes_per_partition": classes_per_client,
        "class_assignment_mode": "first-deterministic",
    }
    fix = f"lower num_clients ({num_clients}) or classes_per_client ({classes_per_client})"
    advice = f"pathological: a class has fewer rows than it has clients: {fix}"
    return from_flwr_datasets("Pathological", codes, num_clients, seed, advice, **options)


@spelled
def dirichlet(
    labels: Array, *, num_clients: int, alpha: float, seed: int, min_rows: int = 1
) -> Tensor:
    """Split each class over the clients in proportions drawn from a symmetric Dirichlet(alpha).

    Args:
        labels: (n,) integers.
        num_clients: N.
        alpha: concentration, > 0. With a small alpha each client has few classes; with a large
            alpha all clients have the same mix.
        seed: seed of the draw.
        min_rows: smallest number of rows that a client may have, at least 1. The proportions are
            drawn up to eleven times, until every client has that many.

    Returns:
        (n,) int64, 0..N-1; no row is left out.

    Raises:
        ValueError: alpha is not positive and finite; there are too few rows; or after eleven draws
            a client still has fewer than `min_rows` rows.
        ImportError: flwr-datasets is not installed.

    Reference: Yurochkin et al. 2019, "Bayesian Nonparametric Federated Learning of Neural
        Networks", arXiv:1905.12022.
    """
    _, codes = codes_of(labels)
    check_clients(len(codes), num_clients, min_rows)
    expect(alpha=(alpha, "(0, inf)"))
    options = {"alpha": float(alpha), "min_partition_size": min_rows}
    fix = f"raise alpha ({alpha}), or lower num_clients ({num_clients}) or min_rows"
    advice = f"dirichlet: after eleven draws a client still has fewer than {min_rows} rows: {fix}"
    return from_flwr_datasets("Dirichlet", codes, num_clients, seed, advice, **options)


@spelled
def class_mixes(labels: Array, *, num_clients: int, alpha: float, seed: int) -> Tensor:
    """Give all clients equally many rows, and each a mix of classes from Dirichlet(alpha L p).

    p (L,) are the shares of the classes among all rows. Once a class is used up, its share goes to
    the classes that are left, in proportion to the client's mix. Unlike with `dirichlet`, every
    client has rows, however small alpha is.

    Args:
        labels: (n,) integers, of L classes.
        num_clients: N.
        alpha: concentration of a class, > 0, the mean over classes; L alpha is the alpha of Hsu et
            al. With a small alpha a client has one class or two; with a large one all mixes agree.
        seed: seed of the draw.

    Returns:
        (n,) int64, 0..N-1; no row is left out. Clients have n / N rows, rounded up or down.

    Raises:
        ValueError: alpha is not positive and finite, or there are fewer rows than clients.

    Reference: Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for
        Federated Visual Classification", arXiv:1909.06335.
    """
    classes, codes = codes_of(labels)
    check_clients(len(codes), num_clients)
    expect(alpha=(alpha, "(0, inf)"))
    generator = generator_of(seed)
    rows = [generator.permutation(np.flatnonzero(codes == c)) for c in range(len(classes))]
    unused = np.array([len(own) for own in rows])
    ids = np.full(len(codes), LEFT_OUT)
    concentrations = alpha * len(classes) * unused / unused.sum()
    for k, mix in enumerate(generator.dirichlet(concentrations, num_clients)):
        need = len(codes) // num_clients + (k < len(codes) % num_clients)
        while need:
            weights = mix * (unused > 0)
            if weights.sum() == 0.0:  # the client's classes are used up: all others equally
                weights = (unused > 0).astype(float)
            counts = np.minimum(generator.multinomial(need, weights / weights.sum()), unused)
            for own, start, count in zip(rows, unused - counts, counts, strict=True):
                ids[own[start : start + count]] = k
            unused -= counts
            need -= int(counts.sum())
    return filled(ids, num_clients)


@spelled
def quantity_skew(
    num_rows: int, *, num_clients: int, seed: int, sigma: float, min_rows: int = 1
) -> Tensor:
    """Give clients random numbers of rows, regardless of labels.

    The clients' shares are log-normal(0, sigma), normalized. A client has `min_rows` rows and its
    share of the remaining rows, rounded so that the sizes add up to n.

    Args:
        num_rows: n.
        num_clients: N.
        seed: seed of the draw of sizes and rows.
        sigma: standard deviation of the log of a share, >= 0; 0 gives equal sizes.
        min_rows: smallest number of rows that a client may have, at least 1.

    Returns:
        (n,) int64, 0..N-1; no row is left out.

    Raises:
        ValueError: sigma is negative, or there are too few rows.
    """
    check_clients(num_rows, num_clients, min_rows)
    expect(sigma=(sigma, "[0, inf)"))
    generator = generator_of(seed)
    logs = sigma * generator.standard_normal(num_clients)
    shares = np.exp(logs - logs.max())
    ends = np.cumsum(shares) / shares.sum() * (num_rows - num_clients * min_rows)
    sizes = min_rows + np.diff(np.rint(ends).astype(np.int64), prepend=0)
    ids = np.repeat(np.arange(num_clients), sizes)
    return filled(ids[generator.permutation(num_rows)], num_clients)


@spelled
def label_skew(labels: Array, *, num_clients: int, share: float, seed: int) -> Tensor:
    """Give a `share` of each class to the clients of that majority class, the rest evenly to all.

    The majority class of client k is class k mod L. With share 0 the clients differ by chance
    alone. With share 1 and N >= L each client has its majority class only.

    Args:
        labels: (n,) integers, of L classes.
        num_clients: N.
        share: in [0, 1].
        seed: seed of the draw of rows.

    Returns:
        (n,) int64, 0..N-1; no row is left out.

    Raises:
        ValueError: `share` is outside [0, 1], or a client is left without rows.
    """
    classes, codes = codes_of(labels)
    check_clients(len(codes), num_clients)
    expect(share=(share, "[0, 1]"))
    generator = generator_of(seed)
    ids = np.full(len(codes), LEFT_OUT)
    common = []
    for c in range(len(classes)):
        rows = generator.permutation(np.flatnonzero(codes == c))
        own = np.arange(c, num_clients, len(classes))
        count = round(share * len(rows)) if len(own) else 0
        ids[rows[:count]] = np.resize(own, count)
        common.append(rows[count:])
    to_all = generator.permutation(np.concatenate(common))
    # Clients with the fewest rows come first, so that even a few common rows reach them.
    order = np.argsort(np.bincount(ids[ids >= 0], minlength=num_clients), kind="stable")
    ids[to_all] = np.resize(order, len(to_all))
    return filled(ids, num_clients)


LEFT_OUT = -1
Ids = NDArray[np.int64]


def codes_of(labels: Array) -> tuple[NDArray[Any], Ids]:
    """Return the L classes in ascending order, and the index of each row's class, (n,) int64."""
    raw = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if masked_in(labels) or raw.ndim != 1 or len(raw) == 0:
        fix = "give one label per row, of shape (n,), and leave masked rows out"
        raise ValueError(f"labels have shape {raw.shape}, or are masked in some rows: {fix}")
    if raw.dtype.kind not in "iubU" and not all(isinstance(v, str) for v in raw):
        fix = "give integers, such as y.long(), or strings, none missing"
        raise TypeError(f"labels are of type {raw.dtype}: {fix}")
    classes, codes = np.unique(raw, return_inverse=True)
    return classes, codes.astype(np.int64)


def checked_ids(ids: Any) -> Tensor:
    """Return the ids of a partition, (n,) int64, refusing others than -1, 0, 1, ..."""
    tensor = torch.as_tensor(ids)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        fix = "give integers, as a partition returns them"
        raise TypeError(f"ids are {str(tensor.dtype).removeprefix('torch.')}: {fix}")
    is_right = tensor.dim() == 1 and len(tensor) and int(tensor.min()) >= LEFT_OUT
    if not is_right or int(tensor.max()) < 0:
        what = "a client is 0 or more, and a row that is left out is -1"
        raise ValueError(f"ids of shape {tuple(tensor.shape)} are not one per row, (n,): {what}")
    return tensor.long()


def check_clients(num_rows: int, num_clients: int, min_rows: int = 1) -> None:
    """Refuse numbers of clients and rows that no partition can have."""
    needed = expect_count(num_clients, "num_clients") * expect_count(min_rows, "min_rows")
    if needed > expect_integer(num_rows, "rows"):
        what = f"{num_clients} clients of at least {min_rows} rows need {needed} rows"
        raise ValueError(f"{what}, but there are {num_rows}")


def numpy_seed(seed: int) -> int:
    """Wrap a seed to 64 unsigned bits: NumPy refuses negative seeds."""
    return expect_integer(seed, "seed") & 0xFFFFFFFFFFFFFFFF


def generator_of(seed: int) -> np.random.Generator:
    """Return NumPy's counter-based generator of a seed."""
    return np.random.Generator(np.random.Philox(numpy_seed(seed)))


def from_flwr_datasets(
    kind: str, codes: Ids, num_clients: int, seed: int, advice: str, **options: Any
) -> Tensor:
    """Partition shuffled rows by flwr-datasets, which cuts each class in the order of its rows."""
    with extras_for("this partition"):
        import datasets
        from flwr_datasets import partitioner
    order = generator_of(seed).permutation(len(codes))
    maker = getattr(partitioner, f"{kind}Partitioner")(
        num_clients, "label", shuffle=False, seed=numpy_seed(seed), **options
    )
    shuffled = datasets.Dataset.from_dict({"label": codes[order], "row": order})
    maker.dataset = shuffled.with_format("numpy")
    ids = np.full(len(codes), LEFT_OUT)
    with warnings.catch_warnings():
        # Our docstrings document what the partitioners warn of: repeated draws, classes left out.
        warnings.simplefilter("ignore", UserWarning)
        try:
            for k in range(num_clients):
                ids[maker.load_partition(k)[:]["row"]] = k
        except ValueError as error:
            raise ValueError(f"{advice} ({error})") from error
    return filled(ids, num_clients)


def filled(ids: Ids, num_clients: int) -> Tensor:
    """Return the ids as a tensor, once every client is known to have a row."""
    counts = np.bincount(ids[ids >= 0], minlength=num_clients)
    if counts.min() == 0:
        fix = f"lower num_clients ({num_clients})"
        raise ValueError(f"client {int(counts.argmin())} is left without rows: {fix}")
    return torch.from_numpy(ids.astype(np.int64))

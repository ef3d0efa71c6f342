"""The clients of a study: who trains, who joins later, and their training and test rows."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from hierfl import datasets
from hierfl.comparisons.study_data import LINES, REGRESSION, Data, Partition
from hierfl.comparisons.study_file import Study
from hierfl.data.clients import ClientData
from hierfl.data.partition import class_mixes, dirichlet
from hierfl.data.preprocess import fill_missing, missing_features
from hierfl.datasets import Labeled
from hierfl.studies import drawn_clients
from hierfl.studies import image_splits as images
from hierfl.studies.baseline_parts import held_out
from hierfl.studies.drawn_clients import Both


@dataclass(frozen=True)
class StudyFederation:
    """Rows of a study; `classes` 0: real labels in sds; `foreign`: images of no client, by set."""

    train: ClientData
    test: ClientData
    joining: Both | None
    classes: int
    foreign: dict[str, ClientData] = field(default_factory=dict)
    variance: float = 1.0


@lru_cache(maxsize=1)
def federation(
    data: Data, new_clients: int, seed: int, foreign: tuple[str, ...] = ()
) -> StudyFederation:
    """Return a study's clients, scaled by participants' training rows; random `new_clients` join later."""
    train, test, joining, classes = _raw(data, new_clients, seed)
    flat = _flat(train)
    scaling, missing = images.scaling_of(flat, data.scaling), missing_features(flat)
    middle, sd = 0.0, 1.0  # real labels are in sds of the training labels from their mean
    if not classes and data.name not in LINES:
        y = train.fields["y"].double()
        middle, sd = float(y.mean()), float(y.std())

    def given(rows: ClientData) -> ClientData:
        real = ((rows.fields["y"].double() - middle) / sd).to(torch.get_default_dtype())
        typed = rows.with_fields(y=rows.fields["y"].long() if classes else real)
        return fill_missing(scaling.apply(_flat(typed)), indicators=missing)

    later = None if joining is None else (held_out(given(joining[0])), given(joining[1]))
    own, scored = held_out(given(train)), given(test)
    strangers = {
        name: scaling.apply(foreign_rows(name, _flat(test), data, seed)) for name in foreign
    }
    variance = 1.0 if classes else float(own.fields["y"].double().var(correction=0))
    return StudyFederation(own, scored, later, classes, strangers, variance)


def of_study(study: Study, seed: int) -> StudyFederation:
    """Return the clients of a study for one seed."""
    return federation(study.data, study.evaluation.new_clients, seed, study.evaluation.foreign)


def foreign_rows(name: str, test: ClientData, data: Data, seed: int) -> ClientData:
    """Return images of no client, for each client as many as it has (unscaled) test rows."""
    generator = np.random.Generator(np.random.Philox(seed))
    if name == "shuffled_pixels":
        shuffled = generator.permuted(test.fields["x"].numpy(), axis=1)
        return ClientData({"x": torch.from_numpy(shuffled)}, test.offsets, test.names)
    if name == "unseen_classes":
        source = images.labeled(data.name)
        x = source.x[source.y >= len(source.classes) - data.unseen_classes]
    else:
        source = datasets.notmnist() if name == "notmnist" else getattr(datasets, name)()[1]
        x = source.x.flatten(1)
    if x.shape[1] != test.fields["x"].shape[1]:
        raise ValueError(
            f"evaluation.foreign: images of '{name}' have {x.shape[1]} pixels, and rows "
            f"{test.fields['x'].shape[1]}: leave it out"
        )
    order = generator.permutation(len(x))
    taken = torch.from_numpy(np.resize(order, test.num_rows))
    return ClientData({"x": x[taken].to(torch.get_default_dtype())}, test.offsets, test.names)


def _flat(rows: ClientData) -> ClientData:
    return rows.with_fields(x=rows.fields["x"].flatten(1).to(torch.get_default_dtype()))


def _raw(data: Data, new: int, seed: int) -> tuple[ClientData, ClientData, Both | None, int]:
    if data.name == "femnist":
        train, test, _ = datasets.femnist()
        classes = 62
    elif data.name in LINES:
        train, test = getattr(drawn_clients, data.name)(seed)
        classes = 0
    elif data.name.startswith("fedmap_"):
        train, test = drawn_clients.synthetic_clients(
            data.name.removeprefix("fedmap_"),  # type: ignore[arg-type]
            seed=seed,
        )
        classes = 2
    elif data.partition is None:
        rows = _natural(data.name)
        train, test = rows.split(1.0 - data.test_share, seed=seed)
        classes = 0 if data.name in REGRESSION else int(rows.fields["y"].max()) + 1
    else:
        source, how = _seen(data), data.partition
        row_numbers = _rows_of(how, source, data.test_share, seed)
        if how.authors_labels:
            who: dict[str, int] = {"clients": how.clients, "classes": how.classes, "seed": seed}
            source = replace(source, y=images.authors_labels(source.y, **who))
        train, test = images.dealt(source, *row_numbers)
        classes = len(source.classes)
    if data.clients is not None:
        train, test = _first(train, data.clients), _first(test, data.clients)
    if not new:
        return train, test, None, classes
    if new >= train.num_clients:
        raise ValueError(
            f"evaluation.new_clients is {new}, and there are {train.num_clients} clients: leave some to train"
        )
    order = np.random.Generator(np.random.Philox(seed + 7)).permutation(train.num_clients)
    later, first = sorted(order[:new].tolist()), sorted(order[new:].tolist())
    held_out = train.select(later), test.select(later)
    return train.select(first), test.select(first), held_out, classes


def _seen(data: Data) -> Labeled:
    source = images.labeled(data.name)
    seen = len(source.classes) - data.unseen_classes
    if seen < 1:
        raise ValueError(
            f"data.unseen_classes is {data.unseen_classes}, and there are {len(source.classes)}: "
            "leave some to the clients"
        )
    if not data.unseen_classes:
        return source
    inside = source.y < seen
    return replace(source, x=source.x[inside], y=source.y[inside])


def _first(rows: ClientData, count: int) -> ClientData:
    if count > rows.num_clients:
        raise ValueError(f"data.clients is {count}, and there are {rows.num_clients}: take fewer")
    return rows.select(rows.names[:count])


def _natural(name: str) -> ClientData:
    """Return the rows of a data set with clients of its own, x (n, columns)."""
    rows: ClientData = getattr(datasets, name)()
    if name != "election88":
        return rows
    groups = {"age": 4, "edu": 4}
    hot = [one_hot(rows.fields[of], count).double() for of, count in groups.items()]
    return rows.with_fields(x=torch.cat([rows.fields["x"], *hot], dim=1))


def _rows_of(
    how: Partition, source: Labeled, test_share: float, seed: int
) -> tuple[list[images.Ids], list[images.Ids]]:
    """Return the numbers of each client's training rows, and of its test rows."""
    who: dict[str, Any] = {"clients": how.clients, "classes": how.classes, "seed": seed}
    if how.kind == "equal_classes":
        return images.equal_classes(source.y, train=how.train, test=how.test, **who)
    if how.kind == "shared_classes":
        return images.shared_classes(source.y, share=how.share, **who)
    if how.kind == "power_law":
        return images.power_law(source.y, **who)
    deal = dirichlet if how.kind == "dirichlet" else class_mixes
    ids = deal(source.y, num_clients=how.clients, alpha=how.concentration, seed=seed).numpy()
    generator = np.random.Generator(np.random.Philox(seed))
    own = [generator.permutation(np.flatnonzero(ids == k)) for k in range(how.clients)]
    cuts = [max(1, round((1.0 - test_share) * len(rows))) for rows in own]
    pairs = list(zip(own, cuts, strict=True))
    for k, (rows, cut) in enumerate(pairs):
        if cut == len(rows):
            raise ValueError(
                f"client {k} has {cut} rows, none of them for tests: use a larger concentration, "
                "fewer clients, or the partition 'class_mixes', which gives all clients as many rows"
            )
    return [rows[:cut] for rows, cut in pairs], [rows[cut:] for rows, cut in pairs]


def renamed(rows: ClientData, name: Callable[[str], str]) -> ClientData:
    """Return the same clients under other names, as clients that the server has never seen."""
    return replace(rows, names=tuple(name(client) for client in rows.names))

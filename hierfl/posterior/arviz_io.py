"""The only module that imports ArviZ (InferenceData of 0.x, DataTree of 1.x), slow, at its first use."""

import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]  # variable -> array
SAMPLE = ("chain", "draw")
CHAINS = 4  # blocks of independent draws, which ArviZ's R-hat compares
LEAST_DRAWS = 100  # that are in blocks; fewer, and numbers that blocks do not divide, are one chain
WITHOUT_DRAWS = ("observed_data", "constant_data")
# `hasattr(arviz, "InferenceData")` holds for 1.x as well, with a warning.
DATA_TREE = int(version("arviz").split(".")[0]) >= 1


def arviz() -> Any:
    """Import ArviZ without its announcement of version 1 (0.23, at the first import of a day)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        import arviz as az
    return az


def arviz_of(
    groups: Mapping[str, Arrays],
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any],
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """Return arrays as ArviZ holds them: InferenceData, or with ArviZ 1 a DataTree.

    `groups`: group -> variable -> (S, *shape), or (*shape) in "observed_data"; `dims`: variable or
    "group/variable" -> names of *shape; `coords`: dimension -> labels, or name -> both.

    >>> groups = {"posterior": {"w": np.zeros((5, 2))}}
    >>> found = arviz_of(groups, {"w": ["client"]}, {"client": ["north", "south"]})
    >>> found["posterior"]["w"].dims
    ('chain', 'draw', 'client')
    """
    sets = {
        group: _dataset(group, arrays, dims, coords, attributes or {})
        for group, arrays in groups.items()
    }
    if DATA_TREE:
        import xarray as xr

        tree: Any = xr.DataTree
        return tree.from_dict(sets)
    return arviz().InferenceData(**sets)


def _dataset(
    group: str,
    arrays: Arrays,
    dims: Mapping[str, Sequence[str]],
    coords: Mapping[str, Any],
    attributes: Any,
) -> Any:
    import xarray as xr

    lead: tuple[str, ...] = () if group in WITHOUT_DRAWS else SAMPLE
    taken = {*SAMPLE, *coords}
    variables = {}
    for name, value in arrays.items():
        named = (*lead, *dims.get(f"{group}/{name}", dims.get(name, ())))
        array = np.asarray(value)
        if lead:  # independent draws, in blocks in their order
            in_blocks = len(array) >= LEAST_DRAWS and len(array) % CHAINS == 0
            array = array.reshape(CHAINS if in_blocks else 1, -1, *array.shape[1:])
        if name in taken:
            raise ValueError(f"site '{name}' has the name of a dimension: rename the site")
        if array.ndim != len(named):
            raise ValueError(
                f"'{name}' of {group} has shape {array.shape}, and dimensions {', '.join(named)}: "
                f"one name each"
            )
        variables[name] = (named, array)
    used = {
        dim: size
        for named, array in variables.values()
        for dim, size in zip(named, array.shape, strict=True)
    }
    labels: dict[str, Any] = {dim: np.arange(size) for dim, size in used.items()}
    for name, values in coords.items():
        beside = isinstance(values, tuple)
        if (values[0] if beside else name) in used:
            labels[name] = (values[0], np.asarray(values[1])) if beside else np.asarray(values)
    return xr.Dataset(variables, coords=labels, attrs=dict(attributes))


# of ArviZ's estimates: by row or client, their sum, and the effective number of parameters
_NAMES = ("elpd_i", "elpd", "p") if DATA_TREE else ("loo_i", "elpd_loo", "p_loo")


def elpd_of(each: Any, *, p: Any, k_hat: Any, draws: int) -> Any:
    """Return estimates by row or client, (n,) each, as ArviZ's object; of S = `draws`."""
    import xarray as xr

    # ArviZ makes its object of one column: all would take long, and are replaced here. ArviZ 1
    # refuses equal values, and fewer than 25.
    column = np.linspace(-1.0, 0.0, 100)[:, None]
    groups = {"posterior": {"at": np.zeros(len(column))}, "log_likelihood": {"y": column}}
    tree = arviz_of(groups, {"y": ["i"]}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = arviz().loo(tree, pointwise=True, reff=1.0)
    se = float((len(each) * np.var(each, ddof=int(DATA_TREE))) ** 0.5)  # as its `compare` has dse
    values = (float(np.sum(each)), float(np.sum(p)), se)
    for name, value in zip((*_NAMES[1:], "se"), values, strict=True):
        setattr(one, name, value)
    for name, values in ((_NAMES[0], each), ("pareto_k", k_hat)):
        setattr(one, name, xr.DataArray(np.asarray(values), {"i": range(len(each))}))
    one.n_samples, one.n_data_points = draws, len(each)
    one.warning = bool(np.any(np.asarray(k_hat) > one.good_k))
    return one


def compared(estimates: Mapping[str, Any]) -> Any:
    """`az.compare` as a frame, the best first."""
    az = arviz()
    options = {"round_to": "none"} if DATA_TREE else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = az.compare(estimates, **options)
    table = table.rename(columns={"elpd_loo": "elpd", "p_loo": "p"})
    table["elpd_diff"] = table["elpd_diff"].abs()  # ArviZ 1 gives it as a negative number
    return table[["rank", "elpd", "p", "elpd_diff", "weight", "se", "dse"]]

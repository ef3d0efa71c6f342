"""The only room that imports ArviZ: 0.23's InferenceData on Python 3.11, 1.x's DataTree on 3.12 and later."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import arviz as az
import numpy as np

from hierfl.inference import Draws

if TYPE_CHECKING:
    from hierfl.fitted import Fit


def to_arviz(fit: Fit, draws: Draws) -> Any:
    """Draws as ArviZ holds them: chain, draw, `client` for local sites with the clients' names, features where they fit.

    Attributes say that the draws are of an approximation: r-hat and effective sample size, which judge chains, say nothing of it.
    """
    data = fit.federation.data
    variables = {name: value.numpy()[None] for name, value in {**draws.shared, **draws.own}.items()}
    dims: dict[str, list[str]] = {}
    coords: dict[str, list[Any]] = {"client": list(data.names)}
    for name, value in variables.items():
        local = name in draws.own
        lead = ["client"] if local else []
        own = value.shape[2 + len(lead) :]
        names: list[str] = []
        for i, size in enumerate(own):
            label = _feature_dim(data.features, size)
            names.append(f"{name}_dim_{i}" if label is None or label in names else label)  # no dimension twice
        for label, size in zip(names, own, strict=True):
            coords.setdefault(label, list(data.features.get(label) or range(size)))
        dims[name] = [*lead, *names]
    attributes = {
        "inference_library": "hierfl",
        "inference_library_version": version("hierfl"),
        "method": fit.method.name,
        "approximation": "draws of a fitted guide, not of a Markov chain: r_hat and ess do not judge them",
        "seed": fit.federation.seed,
        "rounds": fit.progress.round,
        "bytes_up": int(np.sum([r.get("bytes_up", 0) for r in fit.progress.history])),
        "bytes_down": int(np.sum([r.get("bytes_down", 0) for r in fit.progress.history])),
    }
    from_dict: Any = az.from_dict
    if hasattr(az, "InferenceData"):
        return from_dict(posterior=variables, dims=dims, coords=coords, posterior_attrs=attributes)
    return from_dict({"posterior": variables}, dims=dims, coords=coords, attrs={"posterior": attributes})


def _feature_dim(features: Any, size: int) -> str | None:
    """The field whose named columns a dimension of this size is of, if there is exactly one."""
    of_size = [name for name, labels in features.items() if len(labels) == size]
    return of_size[0] if len(of_size) == 1 else None

"""One mixed model by bambi on all rows together: `python -m benchmarks.bambi_sampler ASKED OUT`.

ASKED is JSON: rows, formula and family, and link, priors and draws or bambi's defaults. OUT gets mean,
sd and Monte Carlo standard error of each number. `benchmarks.against_bambi` and `benchmarks.workflow`
run it, in a Python that has bambi; it imports neither torch nor hierfl.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any


def prior_of(text: Any) -> Any:
    """Return a bambi prior of ["Normal", {"mu": 0.0, "sigma": 1.0}], whose values may be priors themselves."""
    import bambi

    name, values = text
    return bambi.Prior(
        name,
        **{
            k: prior_of(v) if isinstance(v, list) and isinstance(v[0], str) else v
            for k, v in values.items()
        },
    )


def main() -> None:
    """Sample, and write the summary."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import arviz
    import bambi
    import pandas as pd

    asked = json.loads(Path(sys.argv[1]).read_text())
    frame = pd.DataFrame(asked["rows"])
    model = bambi.Model(
        asked["formula"],
        frame,
        family=asked["family"],
        link=asked.get("link"),
        priors={name: prior_of(prior) for name, prior in asked.get("priors", {}).items()} or None,
    )
    drawn = model.fit(
        draws=asked.get("draws", 2000),
        tune=1000,
        chains=2,
        cores=1,
        progressbar=False,
        random_seed=0,
        target_accept=0.95 if "priors" in asked else 0.8,
    )
    table = arviz.summary(drawn, kind="all", round_to="none")
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                str(n): [float(r["mean"]), float(r["sd"]), float(r["mcse_mean"])]
                for n, r in table.iterrows()
            }
        )
    )


if __name__ == "__main__":
    main()

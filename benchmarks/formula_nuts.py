"""NUTS of NumPyro on a formula's printed program, in a process of its own; results are kept."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hierfl
from benchmarks.pooled_nuts import ROOT, python
from benchmarks.reference import cache

Numbers = dict[str, np.ndarray]
# Effective draws of a site, and share of divergent transitions, with which NUTS runs again,
# non-centered. A centered one misses the small scales of few clients, at any number of draws
# (trauma: 5% diverge, an sd off by 0.12 posterior sds).
FEWEST, DIVERGING = 2000.0, 0.001
AGAIN = ("--draws", "15000", "--accept", "0.99")
# Of a test; again, non-centered, where that is not enough.
FEW = ("--warmup", "400", "--draws", "1500", "--accept", "0.97", "--dense")
FEW_AGAIN = ("--draws", "3000", "--accept", "0.99")
FEWEST_OF_FEW, DIVERGING_OF_FEW = 400.0, 0.005
CURVES = re.compile(r"pyro.sample\('([^']+)', dist.Normal\(torch.zeros")  # of s() and gp()


def pooled_nuts(
    made: hierfl.Formula, data: hierfl.ClientData, *, few: bool = False, apart: bool = False
) -> Numbers:
    """Return what `benchmarks.formula_sampler` saved of a program, run once and kept.

    Args:
        made: the formula, with its schema.
        data: the rows.
        few: draws for a test.
        apart: non-centered at once.
    """
    text = made.program()
    batch = hierfl.full_batch(data)
    fields = {**batch.fields, **batch.client_fields}
    rows: dict[str, Any] = {n: v.numpy() for n, v in fields.items()}
    groups = [*(term.site for term in made.layout.groups), *CURVES.findall(text)]
    options = (*(FEW if few else ()), *(("--apart", *groups) if apart else ()))
    parts = [text.encode(), *(v.tobytes() for v in rows.values()), " ".join(options).encode()]
    digest = hashlib.sha256(b"".join(parts))
    kept = cache() / f"formula_nuts_{digest.hexdigest()[:16]}.npz"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("program.py", "rows.npz", "out.npz")]
            files[0].write_text(text)
            np.savez(files[1], present=batch.mask().numpy(), **rows)
            call = [python(), "-m", "benchmarks.formula_sampler", *map(str, files), *options]
            subprocess.run(call, cwd=ROOT, check=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(files[2].read_bytes())
            effective, diverging = _quality(kept)
            least, most = (FEWEST_OF_FEW, DIVERGING_OF_FEW) if few else (FEWEST, DIVERGING)
            if effective < least or diverging > most:  # few rows a group, or a scale near 0
                again = FEW_AGAIN if few else AGAIN
                subprocess.run([*call, *again, "--apart", *groups], cwd=ROOT, check=True)
                more, fewer = _quality(files[2])
                if fewer < diverging if diverging > most else more > effective:
                    kept.write_bytes(files[2].read_bytes())
    with np.load(kept) as found:
        return dict(found)


def _quality(file: Path) -> tuple[float, float]:
    """Return the fewest effective draws of a site, and the share of divergent transitions."""
    with np.load(file) as found:
        return float(found["effective"]), float(found["diverging"])

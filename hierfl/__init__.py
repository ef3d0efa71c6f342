"""hierfl: hierarchical Bayesian federated learning on Pyro. One program, inferred federatedly, a plate per client."""

import os

# Read when torch is first imported: how long a thread that waits for the others of one operation spins before it sleeps. Spinning
# long loses the core to whoever else wants it, not at all makes every small operation wait for the scheduler. Compiled steps wait
# for nobody (`hierfl.engine.processes`); of what is left this is measured, in seconds a round on two cores, alone and beside a busy
# process:
# no spinning 0.11 and 0.08, 1000 turns 0.06 and 0.10, 3000 0.04 and 0.15, 30000 0.04 and 0.54.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from hierfl.core.allocator import keep_memory

keep_memory()

from hierfl import datasets, diagnostics, guides, methods, models, optimisers, plots
from hierfl.data import partition
from hierfl.data.batch import ClientBatch
from hierfl.data.clients import ClientData
from hierfl.data.preprocess import Scaling, fill_missing, standardise
from hierfl.diagnostics.pac_bayes import PacBayes, pac_bayes
from hierfl.engine.chunks import ClientError
from hierfl.method import Client, Clock, LogShare, Method, Phase, Server, Share
from hierfl.posterior.new_clients import predict_from_prior
from hierfl.posterior.nuts import nuts
from hierfl.posterior.prediction import Prediction
from hierfl.program.program import Program, ProgramError
from hierfl.program.read import read
from hierfl.program.recipes import CannotRemake
from hierfl.runs.checkpoint import CheckpointError
from hierfl.runs.fit import fit, load
from hierfl.runs.result import Fit

__version__ = "0.1.0"

__all__ = [
    "CannotRemake",
    "CheckpointError",
    "Client",
    "ClientBatch",
    "ClientData",
    "ClientError",
    "Clock",
    "Fit",
    "LogShare",
    "Method",
    "PacBayes",
    "Phase",
    "Prediction",
    "Program",
    "ProgramError",
    "Scaling",
    "Server",
    "Share",
    "datasets",
    "diagnostics",
    "fill_missing",
    "fit",
    "guides",
    "load",
    "methods",
    "models",
    "nuts",
    "optimisers",
    "pac_bayes",
    "partition",
    "plots",
    "predict_from_prior",
    "read",
    "standardise",
]

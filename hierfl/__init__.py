"""hierfl: hierarchical Bayesian federated learning on Pyro. One program, inferred federatedly, a plate per client."""

import os

# Read when torch is first imported: how long a thread that waits for the others of one operation spins before it sleeps. Spinning
# long loses the core to whoever else wants it, not at all makes every small operation wait for the scheduler. Compiled steps wait
# for nobody (`hierfl.workers`); of what is left this is measured, in seconds a round on two cores, alone and beside a busy process:
# no spinning 0.11 and 0.08, 1000 turns 0.06 and 0.10, 3000 0.04 and 0.15, 30000 0.04 and 0.54.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from hierfl.allocator import keep_memory

keep_memory()

from hierfl import datasets, diagnostics, guides, methods, models, optimisers, partition, plots
from hierfl.batch import ClientBatch
from hierfl.check import read
from hierfl.data import ClientData
from hierfl.engine import ClientError
from hierfl.fitted import Fit
from hierfl.fitting import fit, load
from hierfl.method import Client, Clock, LogShare, Method, Phase, Server, Share
from hierfl.newcomers import predict_from_prior
from hierfl.pac_bayes import PacBayes, pac_bayes
from hierfl.pooled import nuts
from hierfl.prediction import Prediction
from hierfl.preprocess import Scaling, fill_missing, standardise
from hierfl.program import Program, ProgramError
from hierfl.recipes import CannotRemake
from hierfl.state import CheckpointError

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

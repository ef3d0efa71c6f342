"""hierfl: hierarchical Bayesian federated learning on Pyro. One program, with a plate over clients."""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# OpenMP reads this when torch is first imported: how long a thread that waits for the other threads of an
# operation spins before it sleeps. Long spins take the core from other work; no spin makes each small operation
# wait for the scheduler. Compiled steps wait for no other thread (`hierfl.engine.processes`). Measured for the
# rest, in seconds a round on two cores, alone and beside a busy process: no spin 0.11 and 0.08, 1000 turns 0.06
# and 0.10, 3000 turns 0.04 and 0.15, 30000 turns 0.04 and 0.54.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from hierfl.core.allocator import keep_memory

keep_memory()

if TYPE_CHECKING:
    from hierfl import datasets, diagnostics, guides, methods, models, nodes, optimizers, plots
    from hierfl.data import partition
    from hierfl.data.absent import RowsNotSaved
    from hierfl.data.batch import ClientBatch, full_batch
    from hierfl.data.clients import ClientData
    from hierfl.data.preprocess import Scaling, fill_missing, standardize
    from hierfl.effects.prior_predictive import prior_predictive
    from hierfl.engine.chunks import ClientError
    from hierfl.engine.client_store import CheckpointError
    from hierfl.engine.settings import Settings
    from hierfl.formulas.formula import Formula, formula, schema
    from hierfl.formulas.schema import Schema
    from hierfl.method import Client, Clock, LogShare, Method, Phase, Server, Share
    from hierfl.posterior.new_clients import predict_from_prior
    from hierfl.posterior.prediction import Prediction
    from hierfl.program.marked import guide, model
    from hierfl.program.program import Program, ProgramError
    from hierfl.program.public_names import CannotRemake
    from hierfl.program.read import read
    from hierfl.runs.fit import fit
    from hierfl.runs.folder_lock import FolderInUse
    from hierfl.runs.load import load
    from hierfl.runs.pooled import fit_pooled
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
    "FolderInUse",
    "Formula",
    "LogShare",
    "Method",
    "Phase",
    "Prediction",
    "Program",
    "ProgramError",
    "RowsNotSaved",
    "Scaling",
    "Schema",
    "Server",
    "Settings",
    "Share",
    "datasets",
    "diagnostics",
    "fill_missing",
    "fit",
    "fit_pooled",
    "formula",
    "full_batch",
    "guide",
    "guides",
    "load",
    "methods",
    "model",
    "models",
    "nodes",
    "optimizers",
    "partition",
    "plots",
    "predict_from_prior",
    "prior_predictive",
    "read",
    "schema",
    "standardize",
]

# Public name -> the module that defines it. A module is imported when its name is first used, so that
# `import hierfl` stays light.
_MODULE_OF = {
    "CannotRemake": "hierfl.program.public_names",
    "CheckpointError": "hierfl.engine.client_store",
    "Client": "hierfl.method",
    "ClientBatch": "hierfl.data.batch",
    "ClientData": "hierfl.data.clients",
    "ClientError": "hierfl.engine.chunks",
    "Clock": "hierfl.method",
    "Fit": "hierfl.runs.result",
    "FolderInUse": "hierfl.runs.folder_lock",
    "Formula": "hierfl.formulas.formula",
    "LogShare": "hierfl.method",
    "Method": "hierfl.method",
    "Phase": "hierfl.method",
    "Prediction": "hierfl.posterior.prediction",
    "Program": "hierfl.program.program",
    "ProgramError": "hierfl.program.program",
    "RowsNotSaved": "hierfl.data.absent",
    "Scaling": "hierfl.data.preprocess",
    "Schema": "hierfl.formulas.schema",
    "Server": "hierfl.method",
    "Settings": "hierfl.engine.settings",
    "Share": "hierfl.method",
    "datasets": "hierfl.datasets",
    "diagnostics": "hierfl.diagnostics",
    "fill_missing": "hierfl.data.preprocess",
    "fit": "hierfl.runs.fit",
    "fit_pooled": "hierfl.runs.pooled",
    "formula": "hierfl.formulas.formula",
    "full_batch": "hierfl.data.batch",
    "guide": "hierfl.program.marked",
    "guides": "hierfl.guides",
    "load": "hierfl.runs.load",
    "methods": "hierfl.methods",
    "model": "hierfl.program.marked",
    "models": "hierfl.models",
    "nodes": "hierfl.nodes",
    "optimizers": "hierfl.optimizers",
    "partition": "hierfl.data.partition",
    "plots": "hierfl.plots",
    "predict_from_prior": "hierfl.posterior.new_clients",
    "prior_predictive": "hierfl.effects.prior_predictive",
    "read": "hierfl.program.read",
    "schema": "hierfl.formulas.formula",
    "standardize": "hierfl.data.preprocess",
}

if not TYPE_CHECKING:  # hidden from type checkers, which would accept any misspelled name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'hierfl' has no attribute '{name}'")
        module = import_module(_MODULE_OF[name])
        # A room is its own value: "guides" stands for hierfl.guides, "fit" for the function in hierfl.runs.fit.
        value = getattr(module, name, module)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

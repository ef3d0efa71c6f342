# The public names of hierfl: `__init__.py` imports each from here, when it is first used.
from . import datasets as datasets
from . import diagnostics as diagnostics
from . import guides as guides
from . import methods as methods
from . import models as models
from . import nodes as nodes
from . import optimizers as optimizers
from . import plots as plots
from .data import partition as partition
from .data.absent import RowsNotSaved as RowsNotSaved
from .data.batch import ClientBatch as ClientBatch
from .data.batch import full_batch as full_batch
from .data.clients import ClientData as ClientData
from .data.preprocess import Scaling as Scaling
from .data.preprocess import fill_missing as fill_missing
from .data.preprocess import standardize as standardize
from .effects.prior_predictive import prior_predictive as prior_predictive
from .engine.chunks import ClientError as ClientError
from .engine.client_store import CheckpointError as CheckpointError
from .engine.settings import Settings as Settings
from .formulas.declare import formula as formula
from .formulas.formula import Formula as Formula
from .formulas.formula import schema as schema
from .formulas.schema import Schema as Schema
from .method import Client as Client
from .method import Clock as Clock
from .method import LogShare as LogShare
from .method import Method as Method
from .method import Phase as Phase
from .method import Server as Server
from .method import Share as Share
from .posterior.new_clients import predict_from_prior as predict_from_prior
from .posterior.prediction import Prediction as Prediction
from .program.program import Program as Program
from .program.program import ProgramError as ProgramError
from .program.public_names import CannotRemake as CannotRemake
from .program.public_names import guide as guide
from .program.public_names import model as model
from .program.read import read as read
from .runs.fit import fit as fit
from .runs.load import load as load
from .runs.pooled import fit_pooled as fit_pooled
from .runs.result import Fit as Fit
from .runs.run_folder import FolderInUse as FolderInUse

__all__: list[str]
__version__: str

"""The main job: heart disease at four hospitals that keep their patients' rows to themselves, `hierfl demo --out DIR`.

Four ways to predict who is ill, all of them logistic regressions of the same 27 columns (missing values are 0 and have an indicator;
no patient is dropped; units are fixed, so nothing is computed from held-out rows):

* local-only: a hospital alone. Coefficients ~ Normal(0, 2.5^2); posterior by Laplace's method.
* pooled: the same model and prior for all rows brought together, as if the hospitals were one.
* hierarchical MAP: a hospital's coefficients ~ Normal(mean, scale^2) with a mean and a scale for each, priors Normal(0, 2.5^2) and
  HalfNormal(0.5) (intercept: HalfNormal(1)); a point for all of them, in non-centred coordinates. No row leaves its hospital.
* hierarchical posterior: the same model; low-rank Gaussian of means and log scales, conditional Laplace of each hospital's
  coefficients; predictions average over draws. The 0.5 was chosen among 1, 0.5 and 0.25 by the ELBO of training rows alone.

Each is scored in three settings: "trained", patients held out of the hospitals that were fitted; "unseen", each hospital left out in
turn and nothing of it known; "joined", the same hospital after it inferred its own coefficients from its own training rows, the
global level fixed. Unseen, a hierarchical method draws coefficients from p(own | global); local-only lends the model of another
hospital, its scores averaged over which. Joined, local-only is the hospital's own model; pooled has nothing to infer, and stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyro.distributions as dist
import torch

from hierfl.data import ClientData
from hierfl.datasets import heart_disease
from hierfl.demo_report import METHODS, MetricTable, pictures, reading, table
from hierfl.fitted import Fit
from hierfl.fitting import fit
from hierfl.guides import conditional, delta, shared
from hierfl.method import Method
from hierfl.methods import fedsvi
from hierfl.models import logistic
from hierfl.newcomers import predict_from_prior
from hierfl.optimisers import Adam
from hierfl.prediction import Prediction

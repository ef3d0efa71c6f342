"""The public names of hierfl, in groups as users think of them; the API reference has a page for each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

METHODS = "hierfl.methods"


@dataclass(frozen=True)
class Group:
    """A group of the reference: the word in its address, a title, a sentence, and parts with names."""

    word: str
    title: str
    about: str
    parts: dict[str, list[str]]

    @property
    def names(self) -> list[str]:
        """All names of the group, in order."""
        return [name for names in self.parts.values() for name in names]


def exported(module: str, *, without: str = "") -> list[str]:
    """Return the full names that a module exports, without its modules and those in `without`."""
    room = importlib.import_module(module)
    others = [n for n in room.__all__ if n not in without.split()]
    return [
        f"{module}.{n}"
        for n in others
        if not isinstance(getattr(room, n), ModuleType)
    ]


def _in(module: str, names: str) -> list[str]:
    return [f"{module}.{name}" for name in names.split()]


def methods() -> tuple[list[str], list[str], list[str]]:
    """Return the methods with a posterior, those with points, and the wrappers."""
    from hierfl.methods.about import About, Wrapper, described

    about = described(About)
    bayesian = [
        name for name in about if not about[name].guide.startswith("points")
    ]
    points = [name for name in about if name not in bayesian]
    kinds = (bayesian, points, list(described(Wrapper)))
    return tuple(_in(METHODS, " ".join(kind)) for kind in kinds)  # type: ignore[return-value]


def groups() -> list[Group]:
    """Return the groups of the reference."""
    bayesian, points, wrappers = methods()
    checks = "Summary summary Check Convergence convergence Corrected corrected LogEvidence log_evidence Reference nuts"
    checks += (
        " AgainstNuts against_nuts Sbc sbc ecdf_band Sensitivity sensitivity"
    )
    scores = (
        "client_scores across_clients crps Gap generalization_gap Loo loo"
    )
    scores += " compare Compared client_rates interval_coverage coverage_p_value CalibrationError"
    scores += " calibration_error confidence equal_mass"
    unknown = "OutOfDistribution out_of_distribution predictive_entropy entropy_density"
    unknown += " mutual_information auroc fpr95"
    rest = "Audit audit Coherence coherence client_gradients loss_deviations PacBayes pac_bayes"
    parts_of_families = "Response ResponseFamily named as_source BetaBinomial Binomial Censored"
    parts_of_families += " Cumulative Hurdle NegativeBinomial Ordered OrderedBeta PiecewiseExponential"
    parts_of_families += " SkewNormal Weibull half_student"
    parts_of_families += " intercept_prior cloglog_logits"
    parts_of_families += " probit_logits acat_logits sratio_logits Dirichlet Multinomial Truncated"
    parts_of_families += " VonMises truncated OverNormal over_normal"
    global_sites = "diagonal_normal full_normal low_rank_normal spline_flow"
    return [
        Group(
            "fit",
            "Fit",
            "Run a method on clients' rows, and read what it found.",
            {
                "Fit and load": _in("hierfl", "fit fit_pooled load Settings"),
                "What a fit returns": [
                    *_in("hierfl", "Fit Prediction predict_from_prior"),
                    *exported("hierfl.report"),
                ],
                "Methods of a fit": [
                    "hierfl.posterior.arviz_groups.posterior",
                    "hierfl.posterior.arviz_groups.prior",
                    "hierfl.posterior.arviz_groups.posterior_predictive",
                    "hierfl.posterior.prediction.predict",
                    "hierfl.posterior.labels.replicate",
                    "hierfl.report.page.report",
                    "hierfl.runs.saved.save",
                    "hierfl.runs.joining.personalize",
                    "hierfl.runs.living.without",
                    "hierfl.runs.joining.updated",
                    "hierfl.posterior.eliminated.infer_discrete",
                    "hierfl.posterior.eliminated.infer_rows",
                    "hierfl.posterior.draws.get_samples",
                ],
                "Errors": _in(
                    "hierfl",
                    "ProgramError ClientError CannotRemake CheckpointError FolderInUse RowsNotSaved "
                    "AnotherRound",
                ),
            },
        ),
        Group(
            "formulas",
            "Formulas",
            "Mixed models as one line of text, and the schema that clients agree on.",
            {
                "Formulas": _in("hierfl", "formula Formula prior_predictive"),
                "Tables of rows": _in(
                    "hierfl",
                    "great_table describe Description kaplan_meier KaplanMeier proportional_hazards "
                    "ProportionalHazards",
                ),
                "Planning": _in("hierfl", "simulate precision Precision"),
                "The schema": [
                    *_in("hierfl", "schema Schema"),
                    *exported("hierfl.formulas", without="Schema"),
                ],
                "Response families": exported(
                    "hierfl.models.families", without=parts_of_families
                ),
                "Parts of families": _in(
                    "hierfl.models.families", parts_of_families
                ),
            },
        ),
        Group(
            "effects",
            "Effects",
            "What a fitted formula says: methods of a fit, and what they return.",
            {
                "Methods of a fit": [
                    "hierfl.effects.conditional_effects.effects",
                    "hierfl.effects.comparisons.predictions",
                    "hierfl.effects.comparisons.comparisons",
                    "hierfl.effects.hypotheses.hypotheses",
                    "hierfl.effects.profile.profile",
                    "hierfl.effects.conditional_effects.survival",
                    "hierfl.effects.variance.r2",
                    "hierfl.effects.variance.icc",
                    "hierfl.effects.imputed.imputed",
                ],
                "What they return": [
                    "hierfl.effects.estimates.Estimates",
                    "hierfl.effects.conditional_effects.ConditionalEffects",
                    "hierfl.effects.profile.Profile",
                    "hierfl.effects.conditional_effects.Survival",
                    "hierfl.effects.drawn.Drawing",
                ],
            },
        ),
        Group(
            "data",
            "Data",
            "Clients' rows, how to split and scale them, and data sets by name.",
            {
                "Clients' rows": _in(
                    "hierfl", "ClientData ClientBatch full_batch"
                ),
                "Prepare": _in("hierfl", "standardize Scaling fill_missing"),
                "Deal rows out to clients": [
                    f"hierfl.partition.{name}"
                    for name in importlib.import_module(
                        "hierfl.data.partition"
                    ).__all__
                ],
                "Data sets": exported("hierfl.datasets"),
            },
        ),
        Group(
            "models",
            "Models and priors",
            "Generative models that are written already, and marks for your own.",
            {
                "Your own": _in("hierfl", "model guide read Program"),
                "Models": exported("hierfl.models"),
                "Likelihoods": exported("hierfl.models.likelihood"),
                "Learned priors": exported("hierfl.models.learned_priors"),
                "Bregman priors": exported("hierfl.models.bregman"),
            },
        ),
        Group(
            "guides",
            "Guides",
            "Families of posteriors.",
            {
                "Families": exported("hierfl.guides", without=global_sites),
                "Families of the global sites": _in(
                    "hierfl.guides", global_sites
                ),
            },
        ),
        Group(
            "methods",
            "Methods",
            "What clients do in a round, what they send, and what the server makes of it.",
            {
                "With a posterior": bayesian,
                "With point estimates": points,
                "Wrappers": wrappers,
                "Write your own": _in(
                    "hierfl",
                    "Method Client Server Phase Share LogShare Clock",
                ),
                "Optimizers": exported("hierfl.optimizers"),
            },
        ),
        Group(
            "diagnostics",
            "Diagnostics",
            "Is the posterior right, and are the predictions good?",
            {
                "Is the posterior right?": _in("hierfl.diagnostics", checks),
                "Are the predictions good?": [
                    *_in("hierfl.diagnostics", scores),
                    "hierfl.compare_models",
                ],
                "Rows unlike any that were seen": _in(
                    "hierfl.diagnostics", unknown
                ),
                "Clients and bounds": _in("hierfl.diagnostics", rest),
            },
        ),
        Group(
            "plots",
            "Plots",
            "Each draws on the Matplotlib Axes that it is given, and returns them.",
            {"Plots": exported("hierfl.plots")},
        ),
        Group(
            "nodes",
            "Nodes",
            "Clients on machines of their own.",
            {
                "A federation": exported("hierfl.nodes"),
                "On Flower": exported("hierfl.flower"),
            },
        ),
    ]


def public_names() -> set[str]:
    """Return every name that hierfl exports, found by walking its modules."""
    names: set[str] = set()
    rooms = ["hierfl", "hierfl.formulas", "hierfl.flower", "hierfl.report"]
    while rooms:
        room = importlib.import_module(rooms.pop())
        for name in room.__all__:
            value = getattr(room, name)
            if isinstance(value, ModuleType):
                rooms.append(value.__name__)
            else:
                names.add(
                    f"{room.__name__.replace('hierfl.data.partition', 'hierfl.partition')}.{name}"
                )
    return names - {"hierfl.formulas.Schema"}  # it is hierfl.Schema

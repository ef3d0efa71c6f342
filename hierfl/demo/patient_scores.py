"""Scores of the demo's predictions: the long and the printed table, sentences, two figures."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from hierfl import plots
from hierfl.posterior.prediction import Prediction

LOCAL, POOLED, MAP, POSTERIOR = METHODS = (
    "local-only",
    "pooled",
    "hierarchical MAP",
    "hierarchical posterior",
)
TRAINED, UNSEEN, JOINED = SETTINGS = ("trained", "unseen", "joined")
METRICS = {
    "log_score": "log score, nats/patient",
    "accuracy": "accuracy",
    "brier": "Brier score",
}
ALL = "all"
UNITS = {
    "age": "age (10 years)",
    "sex": "male",
    "cp_typical": "typical angina",
    "cp_atypical": "atypical angina",
    "cp_nonanginal": "non-anginal pain",
    "trestbps": "blood pressure (20 mm Hg)",
    "chol": "cholesterol (50 mg/dl)",
    "fbs": "fasting sugar > 120 mg/dl",
    "restecg_st_t": "resting ECG: ST-T",
    "restecg_lvh": "resting ECG: hypertrophy",
    "thalach": "max. heart rate (25/min)",
    "exang": "angina on exercise",
    "oldpeak": "ST depression (mm)",
    "slope": "ST slope (a step down)",
    "ca": "vessels seen (each)",
    "thal_fixed": "thallium: fixed defect",
    "thal_reversible": "thallium: reversible",
}


def patients(prediction: Prediction, setting: str, method: str) -> pd.DataFrame:
    """Return a row for each held-out patient, `patient` of its hospital, with probability p, y and scores."""
    data, p = prediction.data, prediction.mean
    y, scores = prediction.known()
    client = data.row_client
    columns: dict[str, Any] = {
        "setting": setting,
        "method": method,
        "hospital": np.asarray(data.names)[client.numpy()],
        "patient": np.arange(data.num_rows) - data.offsets[client].numpy(),
        "p": p.double().numpy(),
        "y": y.double().numpy(),
        "log_score": scores.double().numpy(),
        "accuracy": ((p > 0.5) == (y > 0.5)).double().numpy(),
        "brier": (p - y).square().double().numpy(),
    }
    return pd.DataFrame(columns)


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Average patients' scores by setting, method and hospital ("all": over patients), in long form."""
    keys = ["setting", "method", "hospital", "patient"]
    # unseen, local-only has one score of a patient for each hospital whose model is used
    by_patient = frame.groupby(keys, sort=False)[list(METRICS)].mean().reset_index()
    scopes = [by_patient, by_patient.assign(hospital=ALL)]
    groups = pd.concat(scopes).groupby(keys[:3], sort=False)[list(METRICS)]
    means, rows = groups.mean(), groups.size()
    long = means.reset_index().melt(keys[:3], var_name="metric", value_name="value")
    long["rows"] = rows.loc[list(long[keys[:3]].itertuples(index=False, name=None))].to_numpy()
    order = {
        name: place for names in (SETTINGS, METHODS, METRICS) for place, name in enumerate(names)
    }
    return long.sort_values(
        ["setting", "method", "metric"],
        key=lambda c: c.map(order),
        kind="stable",
        ignore_index=True,
    )


def table(scores: pd.DataFrame) -> Table:
    """Return the table to print: per metric, the hospitals, all patients and a new hospital."""
    shown = Table(box=box.SIMPLE_HEAD, caption=_CAPTION, caption_justify="left", pad_edge=False)
    shown.add_column("held-out patients of", no_wrap=True)
    for method in METHODS:
        shown.add_column(method.replace(" ", "\n"), justify="right", no_wrap=True)
    values = scores.set_index(["metric", "setting", "hospital", "method"]).sort_index()
    hospitals = [h for h in scores.loc[scores.setting == TRAINED, "hospital"].unique() if h != ALL]
    rows = [(h, TRAINED, h) for h in hospitals]
    rows += [
        ("all patients", TRAINED, ALL),
        ("new hospital, no rows", UNSEEN, ALL),
        ("new hospital, own rows", JOINED, ALL),
    ]
    for metric, title in METRICS.items():
        shown.add_section()
        shown.add_row(f"[italic]{title}[/italic]")
        for label, setting, hospital in rows:
            values_shown = [
                round(float(values.loc[(metric, setting, hospital, method), "value"]), 3)
                for method in METHODS
            ]
            best = min(values_shown) if metric == "brier" else max(values_shown)
            shown.add_row(
                f"  {label}", *(f"{v:.3f}{'*' if v == best else ' '}" for v in values_shown)
            )
    return shown


_CAPTION = "* best in its row: the highest log score or accuracy, the lowest Brier score"


def reading(frame: pd.DataFrame) -> list[str]:
    """Compare the posterior's log score with each method's, by paired differences over patients."""
    rows = len(frame[frame.setting == TRAINED].drop_duplicates(["hospital", "patient"]))
    return [
        f"Four hospitals, {rows} held-out patients (difference of log scores ± standard error): "
        f"the hierarchical posterior is {against(frame, TRAINED)}.",
        "At a hospital that was left out of the fit, before any of its rows are seen, the "
        f"hierarchical posterior is {against(frame, UNSEEN)}. After it has fitted its own rows, "
        f"the posterior is {against(frame, JOINED)}.",
    ]


def against(frame: pd.DataFrame, setting: str) -> str:
    """Describe the posterior against each other method; two standard errors are a difference."""
    verdicts: dict[str, list[str]] = {"better than": [], "on par with": [], "worse than": []}
    for other in METHODS:
        if other != POSTERIOR:
            mean, error = difference(frame, setting, other)
            word = "better than" if mean > 0.0 else "worse than"
            word = "on par with" if abs(mean) <= 2.0 * error else word
            verdicts[word].append(f"{other} ({mean:+.3f} ± {error:.3f})")
    return "; ".join(f"{word} {', '.join(others)}" for word, others in verdicts.items() if others)


def difference(frame: pd.DataFrame, setting: str, other: str) -> tuple[float, float]:
    """Return the mean over patients of the posterior's log score minus `other`'s, and its error."""
    within = frame[frame.setting == setting]
    by_method = within.pivot_table("log_score", ["hospital", "patient"], "method", aggfunc="mean")
    gap = by_method[POSTERIOR] - by_method[other]
    return float(gap.mean()), float(gap.std(ddof=1) / np.sqrt(len(gap)))


def pictures(posterior: Any, frame: pd.DataFrame, out: Path) -> list[Path]:
    """Write `coefficients.png` (the posterior) and `calibration.png` (held-out patients)."""
    drawn = {"coefficients.png": coefficients(posterior), "calibration.png": calibration(frame)}
    for name, figure in drawn.items():
        figure.savefig(out / name, dpi=200, bbox_inches="tight")
    return [out / name for name in drawn]


def coefficients(posterior: Any) -> Figure:
    """Draw a forest plot: intercept and features left, indicators of missing values right."""
    noise = np.random.default_rng(0)

    def both(kind: str) -> xr.DataArray:
        intercept = posterior[f"intercept{kind}"].expand_dims(x=["intercept"])
        joined: xr.DataArray = xr.concat([intercept, posterior[f"slope{kind}"]], dim="x")
        return joined

    local, loc, scale = both(""), both("_loc"), both("_scale")
    prior = loc + scale * noise.standard_normal(scale.shape)
    names = [str(name) for name in local.coords["x"].values]
    absent = [name for name in names if name.endswith("_missing")]
    clinical = [name for name in names if name not in absent]
    labels = UNITS | {f"{name}_missing": words.split(" (")[0] for name, words in _FEATURES.items()}
    figure = Figure(figsize=(7.2, 7.0), layout="constrained")
    recorded, right = figure.subplots(1, 2, sharex=True)
    for ax, chosen, title in (
        (recorded, clinical, "recorded value (unit)"),
        (right, absent, "value not recorded"),
    ):
        plots.forest(ax, local.sel(x=chosen), prior.sel(x=chosen), labels=labels)
        ax.set_title(title, loc="left", fontsize=9)
        ax.set_xlabel("change in log odds of heart disease", fontsize=8)
        ax.tick_params(labelsize=7.5)
    handles, labels_of = recorded.get_legend_handles_labels()
    title = (
        "point and line: median and 90% interval of a hospital; "
        "band: 90% interval that the global level predicts for a hospital"
    )
    style: dict[str, Any] = {"fontsize": 7.5, "title_fontsize": 7.5, "frameon": False}
    figure.legend(handles, labels_of, loc="outside lower center", ncols=5, title=title, **style)
    return figure


_FEATURES = {
    "trestbps": "blood pressure",
    "chol": "cholesterol",
    "fbs": "fasting sugar",
    "restecg": "resting ECG",
    "thalach": "max. heart rate",
    "exang": "angina on exercise",
    "oldpeak": "ST depression",
    "slope": "ST slope",
    "ca": "vessels seen",
    "thal": "thallium scan",
}


def calibration(frame: pd.DataFrame) -> Figure:
    """Draw the reliability of local-only and hierarchical predictions on held-out patients."""
    figure = Figure(figsize=(3.6, 3.9), layout="constrained")
    ax = figure.subplots()
    within = frame[frame.setting == TRAINED].set_index("method")
    shown = {
        m: (within.loc[m, "p"].to_numpy(), within.loc[m, "y"].to_numpy())
        for m in (LOCAL, POSTERIOR)
    }
    plots.reliability(ax, shown, colors=(plots.COLORS[1], plots.COLORS[0]))
    rows = len(shown[LOCAL][0])
    ax.set_xlabel("predicted probability of heart disease", fontsize=8)
    ax.set_ylabel("observed share of patients with it", fontsize=8)
    ax.set_title(f"{rows} held-out patients, 8 bins of equal size, 90% intervals", fontsize=7.5)
    ax.tick_params(labelsize=7.5)
    ax.legend(fontsize=7.5, frameon=False, loc="upper left")
    return figure

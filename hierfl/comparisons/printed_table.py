"""A study's table as Markdown or LaTeX, with its caption and what stands under it."""

from pathlib import Path

import pandas as pd

from hierfl.comparisons.result_files import results, study_of, trials_of
from hierfl.comparisons.score_table import FAR, MIN_SEEDS, differences, table_of
from hierfl.comparisons.study_file import Study
from hierfl.studies.baseline_methods import baseline

BAR = r"\|"  # in a cell of Markdown
LATEX = {
    **{c: f"\\{c}" for c in "%_&#${}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
}


def caption(study: Study) -> str:
    """Return what the numbers of a table are, in a sentence or two."""
    run, seen = study.run, study.evaluation
    k = seen.last_rounds
    rounds = "of the last round" if k == 1 else f"are means over the last {k} rounds"
    seeds = len(run.seeds)
    if k > 1 and run.cohort and any(baseline(entry.name).everyone for entry in study.methods):
        rounds += " (the same share of the run of a method that takes fewer)"
    if seen.round_of_all:
        rounds += ", P's of one more in which all clients train"
    return (
        f"{study.title}. {run.rounds} rounds; scores {rounds}, every {seen.weighting[:-1]} counts "
        f"the same; mean ± sd over {seeds} seed{'s' * (seeds > 1)}. Bold: the best"
        + (", and what a paired t-test does not tell from it (5%)." if seeds >= MIN_SEEDS else ".")
    )


def tuned(out: Path) -> str:
    """Return the options that were chosen, in a sentence; "" where nothing was tuned."""
    trials = trials_of(out)
    if trials.empty:
        return ""
    rows = trials[trials["chosen"]]
    by_log_score = study_of(out).tuning.metric == "log_score"
    form = "{} {} ({:.3f} nats)" if by_log_score else "{} {} ({:.1f}%)"
    sentences = [
        form.format(m, o, s)
        for m, o, s in zip(rows["method"], rows["options"], rows["score"], strict=True)
    ]
    return f"Chosen on rows or clients kept from the fit, with their score there: {'; '.join(sentences)}."


def by_chance(scores: pd.DataFrame) -> str:
    """Return the calibration error by chance alone, in a sentence; "" where none was measured."""
    values = scores.loc[scores["metric"] == "calibration_by_chance", "value"]
    if values.empty:
        return ""
    low, high = values.min(), values.max()
    return f"By chance alone the calibration error would be {low:.1f} to {high:.1f}%."


def markdown(out: Path) -> str:
    """Return a study's table as Markdown, with its caption and what was chosen."""
    study, scores = study_of(out), results(out)
    frame = table_of(out).reset_index()
    head = [str(name) for name in frame.columns]
    rule = ["---", *("---:" for _ in head[1:])]
    lines = [
        f"| {' | '.join(' '.join(str(cell).replace('|', BAR).split()) for cell in row)} |"
        for row in (head, rule, *frame.to_numpy().tolist())
    ]
    far = differences(study, scores)
    under = [
        f"More than {FAR} points from the published: {', '.join(far)}." if far else "",
        tuned(out) if study.tuning.rounds else "",
        by_chance(scores),
        *study.notes,
    ]
    under = [f"* {line}" for line in under if line]
    return "\n".join([caption(study), "", *lines, "", *under]).rstrip() + "\n"


def latex(out: Path) -> str:
    """Return a study's table as LaTeX, for booktabs."""
    frame = table_of(out).reset_index().map(_cell_as_latex).rename(columns=_as_latex)
    return frame.to_latex(
        index=False,
        caption=_as_latex(caption(study_of(out))),
        column_format="l" + "r" * (len(frame.columns) - 1),
    )


def _as_latex(text: str) -> str:
    return "".join(LATEX.get(c, c) for c in " ".join(text.split()))


def _cell_as_latex(text: str) -> str:
    bold = text.startswith("**")
    return rf"\textbf{{{_as_latex(text.strip('*'))}}}" if bold else _as_latex(text)


def put_block(page: Path, name: str, block: str) -> None:
    """Replace what stands on a Markdown page between `<!-- name -->` and `<!-- end of name -->`."""
    text, first, last = page.read_text(), f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, opened, following = text.partition(first)
    _, closed, after = following.partition(last)
    if not (opened and closed):
        raise ValueError(f"{page} has no block '{name}': put the lines {first} and {last} into it")
    page.write_text(f"{before}{first}\n{block}\n{last}{after}")

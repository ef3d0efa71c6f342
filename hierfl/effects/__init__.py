"""What a fitted formula says: effects, comparisons, profiles of clients, survival curves, R2."""

# A method of a fit of a formula -> the module of the function, whose first argument is the fit.
METHODS = {
    **dict.fromkeys(("effects", "survival"), "hierfl.effects.conditional_effects"),
    **dict.fromkeys(("predictions", "comparisons"), "hierfl.effects.comparisons"),
    **dict.fromkeys(("r2", "icc"), "hierfl.effects.variance"),
    **{name: f"hierfl.effects.{name}" for name in ("hypotheses", "profile", "imputed")},
}

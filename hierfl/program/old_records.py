"""Descriptions written by earlier releases, rewritten as this release would write them."""

from __future__ import annotations

from typing import Any

from hierfl.program.public_names import public_name

JSON = Any

# Options of methods that are wrappers now, in the order in which they were put around the method. They stand in
# every record of 0.1.0, and ask for nothing at these values.
RETIRED = {"by_rows": False, "averaged": 1.0, "fine_tune": False, "beta": 1.0}

# Options that earlier records do not hold, and what they did: the defaults.
LATER = {"hierfl.methods.fine_tuned": {"own_steps": True}}


def translated(description: JSON) -> JSON:
    """Rewrite a description by an earlier release as it would be written now, so that runs can be compared."""
    if isinstance(description, list):
        return [translated(value) for value in description]
    if not isinstance(description, dict):
        return description
    found: dict[str, Any] = {
        key: public_name(value)
        if key in ("made_by", "family", "named") and isinstance(value, str)
        else translated(value)
        for key, value in description.items()
    }
    name, options = found.get("made_by"), found.get("with")
    if not str(name).startswith("hierfl.methods.") or not isinstance(options, dict):
        return found
    asked = {k: options[k] for k in RETIRED if options.get(k, RETIRED[k]) != RETIRED[k]}
    if str(name).rpartition(".")[2] in ("over_relaxed", "averaging_some", "by_rows"):
        return found  # their own options
    kept = {k: v for k, v in options.items() if k not in RETIRED}
    kept = {**LATER.get(str(name), {}), **kept}
    return _wrapped({**found, "with": kept}, asked)


def _wrapped(method: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the description of a method with the wrappers that its old options stand for."""
    options, name = method["with"], method["made_by"]
    for word, value in asked.items():
        if word == "by_rows":
            wrapper, own = "by_rows", {}
        elif word == "averaged":
            wrapper, own = "averaging_some", {"share": value}
        elif word == "beta":
            wrapper, own = "over_relaxed", {"beta": value}
        elif name == "hierfl.methods.pfedbred":
            wrapper, own = "fine_tuned", _tuning_of_pfedbred(value, options)
        else:
            wrapper, own = "fine_tuned", _tuning_of_fedavg(options)
        method = {"made_by": f"hierfl.methods.{wrapper}", "with": {"method": method, **own}}
    return method


def _tuning_of_fedavg(options: dict[str, Any]) -> dict[str, Any]:
    unit = options.get("unit")
    return {
        "steps": 1 if unit == "epoch" else options.get("steps"),
        "unit": unit,
        "batch_size": options.get("batch_size"),
        "optimizer": options.get("optimizer"),
        "when": "adapting",
        "own_steps": True,
        "mirror": False,
    }


def _tuning_of_pfedbred(steps: Any, options: dict[str, Any]) -> dict[str, Any]:
    rate = {"lr": options.get("lr"), "momentum": 0.0}
    return {
        "steps": steps,
        "unit": "step",
        "batch_size": options.get("batch_size"),
        "optimizer": {"made_by": "hierfl.optimizers.SGD", "with": rate},
        "when": "every round",
        "own_steps": True,
        "mirror": True,
    }

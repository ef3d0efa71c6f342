"""The calls of formulas: tables of their arguments, with what each may be and its default."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from hierfl.formulas.expressions import CODINGS, NUMPY, Call, Expression, Literal, Name
from hierfl.formulas.grammar import check

REQUIRED = object()  # in place of a default
# Scales between SHORT c S / k and LONG (c - 1) S, of a half range S, at which sines give a Gaussian
# process with its covariance within 1.5% of the variance, beside an intercept.
SHORT, LONG = 1.75, 0.66


class Argument(NamedTuple):
    """An argument: an expression of a class, a number of a range, or one of some words; `must_be` says so."""

    kind: type | tuple[str, ...] = Expression
    default: Any = REQUIRED
    low: float = -math.inf
    high: float = math.inf
    must_be: str = ""

    def allows(self, written: Expression) -> bool:
        """Return whether a call may have it as it is written."""
        if isinstance(self.kind, tuple):
            return written.value in self.kind
        if self.kind in (int, float):
            is_number = type(written.value) in (int, self.kind)
            return is_number and self.low <= written.value <= self.high
        return written.value is not None if self.kind is Literal else isinstance(written, self.kind)


Signature = dict[str, Argument]
VALUES: Signature = {"column": Argument()}
COLUMN: Signature = {"column": Argument(Name, must_be="a single column: make one of it first")}
BY = Argument(Name, None, must_be="a single column: make one of it first")
LEVEL = Argument(Literal, None, must_be="a level, written out")
BOUND = Argument(float, None, must_be="a number")
BASIS = "'cr'; s(x, hospital, bs='fs') is a curve of each group, (1 | hospital) is 're'"
TYPE = (
    "'escar' or 'esicar', the exact ones: car(M, gr=county, type='esicar') + (1 | county) is 'bym2'"
)
# Function of a term -> its arguments, of which the second may stand without its name.
TERMS: dict[str, Signature] = {
    **dict.fromkeys(NUMPY, VALUES),
    **{f"np.{name}": VALUES for name in NUMPY},
    **dict.fromkeys(("I", "offset", "scale", "standardize", "center"), VALUES),
    **dict.fromkeys((*CODINGS, "cs", "mi"), COLUMN),
    "S": {**COLUMN, "omit": LEVEL},
    "T": {**COLUMN, "ref": LEVEL},
    "bs": {
        **VALUES,
        "df": Argument(int, low=1, must_be="the number of its columns, 1 or more"),
        "degree": Argument(int, 3, low=0, must_be="an integer, 0 or more"),
        "lower_bound": BOUND,
        "upper_bound": BOUND,
    },
    "poly": {**VALUES, "degree": Argument(int, 1, 1, 6, "an integer from 1 to 6")},
    "s": {
        **VALUES,
        "k": Argument(int, 10, low=3, must_be="an integer, 3 or more"),
        "by": BY,
        "bs": Argument(("cr",), "cr", must_be=BASIS),
    },
    "gp": {
        **VALUES,
        "k": Argument(int, 20, low=4, must_be="an integer, 4 or more"),
        "by": BY,
        # how far its sines reach, in half ranges
        "c": Argument(float, 2.5, low=math.nextafter(1.0, 2.0), must_be="a number above 1"),
    },
}
# Addition to the response -> its columns, and what they hold.
ADDITIONS: dict[str, Signature] = {
    "trials": {"column": Argument(Name, must_be="a column, the number of trials")},
    "weights": {"column": Argument(Name, must_be="a column, how many times a row counts")},
    "event": {"column": Argument(Name, must_be="a column, 1 where a time was observed, else 0")},
    "entry": {"column": Argument(Name, must_be="a column, when observation began")},
    "cens": {
        "column": Argument(Name, must_be="a column, how a time is censored: 0, 1, -1 or 2"),
        "upper": Argument(Name, None, must_be="a column, the upper end of an interval"),
    },
    "trunc": {
        "lb": Argument(float, -math.inf, must_be="a number"),
        "ub": Argument(float, math.inf, must_be="a number"),
    },
}
# Groups with a matrix -> their arguments.
MATRICES: dict[str, Signature] = {
    "gr": {"gr": Argument(), "cov": Argument(Name, must_be="the name of a matrix in data2")},
    "car": {
        "M": Argument(Name, must_be="the name of a matrix in data2"),
        "gr": Argument(),
        "type": Argument(("escar", "esicar"), "escar", must_be=TYPE),
    },
}


def named_arguments(
    call: Call, signatures: Mapping[str, Signature] = TERMS
) -> dict[str, Expression]:
    """Return the arguments of a call as they are written, by name."""
    return {**dict(zip(signatures[call.callee], call.args, strict=False)), **dict(call.options)}


def arguments(call: Call, signatures: Mapping[str, Signature] = TERMS) -> dict[str, Any]:
    """Return the arguments of a call by name, constants by their values, with defaults; refuse wrong ones."""
    name, signature, args = call.callee, signatures[call.callee], call.args
    written = named_arguments(call, signatures)
    first, *others = signature
    usage = f"write {name}({', '.join([first, *(f'{other}=...' for other in others)])})"
    check(written, call, f"{name}() has no argument: {usage}")
    for option, place in call.options:
        is_option = option in {*signature} - {"column"}  # which stands first, without a name
        check(is_option, place, f"{name}() has no option '{option}': {usage}")
    is_right = len(args) <= min(len(signature), 1 if name in ("s", "gp", "gr") else 2)
    is_right &= len(written) == len(args) + len(call.options)
    fix = "; a curve of each group is s(x, hospital, bs='fs')" if name == "s" else ""
    check(is_right, (call, *args)[-1], f"one argument too many: {usage}{fix}")
    values = {}
    for option, argument in signature.items():
        expression = written.get(option)
        if expression is None:
            check(argument.default is not REQUIRED, call, f"{name}() has no '{option}': {usage}")
            values[option] = argument.default
        else:
            what = f"{option} of {name}() is {expression}: it must be {argument.must_be}"
            check(argument.allows(expression), expression, what)
            values[option] = expression if argument.kind in (Expression, Name) else expression.value
    check(not (fault := _fault_of_sizes(name, values)), call, fault)
    return values


def _fault_of_sizes(name: str, values: Mapping[str, Any]) -> str:
    """Return why numbers of columns do not go together; "" where they do."""
    if name == "bs" and values["df"] < values["degree"]:
        fix = f"give the number of its columns, at least its degree {values['degree']}"
        return f"bs() has df {values['df']}: {fix}"
    if name == "gp":
        least = math.ceil(1.25 * SHORT * values["c"] / (LONG * (values["c"] - 1.0)))
        if values["k"] < least:
            return f"too few sines for a range of length scales: use k={least} or more"
    return ""

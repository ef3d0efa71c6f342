"""Data sets by name: three shipped with the package, the rest read from the folder that HIERFL_DATA names.

Sets with clients of their own come as `ClientData`; images that are to be partitioned (`hierfl.data.partition`) as `Labelled`.
"""

from hierfl.datasets.builtin import eight_schools, heart_disease, radon
from hierfl.datasets.images import (
    Labelled,
    cifar10,
    emnist_byclass_test,
    fashion_mnist,
    femnist,
    mnist,
    notmnist,
    usps,
)
from hierfl.datasets.references import Summary, reference
from hierfl.datasets.tables import election88, office_caltech10, rats, school_ilea, wisdm

__all__ = [
    "Labelled",
    "Summary",
    "cifar10",
    "eight_schools",
    "election88",
    "emnist_byclass_test",
    "fashion_mnist",
    "femnist",
    "heart_disease",
    "mnist",
    "notmnist",
    "office_caltech10",
    "radon",
    "rats",
    "reference",
    "school_ilea",
    "usps",
    "wisdm",
]

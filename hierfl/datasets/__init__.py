"""Data sets: three ship with the package, the others are read from the folder named by HIERFL_DATA.

Data sets with clients are returned as `ClientData`. Images without clients are returned as
`Labeled`, to be partitioned with `hierfl.data.partition`.
"""

from hierfl.datasets.builtin import eight_schools, heart_disease, radon
from hierfl.datasets.images import (
    Labeled,
    cifar10,
    emnist_byclass_test,
    fashion_mnist,
    femnist,
    mnist,
    notmnist,
    usps,
)
from hierfl.datasets.references import Summary, reference
from hierfl.datasets.tables import (
    election88,
    lung_cancer,
    office_caltech10,
    rats,
    school_ilea,
    trauma,
    wisdm,
)

__all__ = [
    "Labeled",
    "Summary",
    "cifar10",
    "eight_schools",
    "election88",
    "emnist_byclass_test",
    "fashion_mnist",
    "femnist",
    "heart_disease",
    "lung_cancer",
    "mnist",
    "notmnist",
    "office_caltech10",
    "radon",
    "rats",
    "reference",
    "school_ilea",
    "trauma",
    "usps",
    "wisdm",
]

from .builtin import eight_schools as eight_schools
from .builtin import five_hospitals as five_hospitals
from .builtin import heart_disease as heart_disease
from .builtin import radon as radon
from .images import Labeled as Labeled
from .images import cifar10 as cifar10
from .images import emnist_byclass_test as emnist_byclass_test
from .images import fashion_mnist as fashion_mnist
from .images import femnist as femnist
from .images import mnist as mnist
from .images import notmnist as notmnist
from .references import ReferenceSummary as ReferenceSummary
from .references import reference as reference
from .tables import election88 as election88
from .tables import lung_cancer as lung_cancer
from .tables import office_caltech10 as office_caltech10
from .tables import rats as rats
from .tables import school_ilea as school_ilea
from .tables import trauma as trauma
from .tables import wisdm as wisdm

__all__: list[str]

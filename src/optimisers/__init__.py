"""Training nested models: the optimiser's state follows the model."""

from optimisers import errors, schedules
from optimisers.backends.choose import reference_only
from optimisers.gradients import destructure, global_norm, partition
from optimisers.model import select
from optimisers.model.layout import Parameter
from optimisers.model.paths import Path
from optimisers.model.trees import register
from optimisers.report import summary
from optimisers.rules.adam import Adam, AdamW
from optimisers.rules.base import LIKE, REAL, Hyper, Rule, Slot, rule
from optimisers.rules.chain import Chain
from optimisers.rules.clip import ClipGlobalNorm, ClipGrad, ClipNorm
from optimisers.rules.decay import SignDecay, WeightDecay
from optimisers.rules.descent import SGD, Descent, Momentum, Nesterov
from optimisers.rules.gates import AccumGrad, SkipNonFinite
from optimisers.setup import setup, trainables
from optimisers.state import Leaf, State
from optimisers.update import update, update_

__version__ = "0.1.0"

__all__ = [
    "LIKE",
    "REAL",
    "SGD",
    "AccumGrad",
    "Adam",
    "AdamW",
    "Chain",
    "ClipGlobalNorm",
    "ClipGrad",
    "ClipNorm",
    "Descent",
    "Hyper",
    "Leaf",
    "Momentum",
    "Nesterov",
    "Parameter",
    "Path",
    "Rule",
    "SignDecay",
    "SkipNonFinite",
    "Slot",
    "State",
    "WeightDecay",
    "destructure",
    "errors",
    "global_norm",
    "partition",
    "reference_only",
    "register",
    "rule",
    "schedules",
    "select",
    "setup",
    "summary",
    "trainables",
    "update",
    "update_",
]


def __dir__() -> list[str]:
    return __all__

"""Training nested models: the optimiser's state follows the model."""

from optimisers import errors, schedules
from optimisers.backends.choose import reference_only
from optimisers.by_parameter import layerwise, no_decay
from optimisers.composing import compose
from optimisers.differentiate import grad, value_and_grad
from optimisers.evaluation import averaged, evaluation, training
from optimisers.files.checkpoint import Loaded, load, save
from optimisers.flat import destructure, partition
from optimisers.gradients import global_norm
from optimisers.leaf import Leaf
from optimisers.model import select
from optimisers.model.layout import Parameter
from optimisers.model.nodes import register
from optimisers.model.paths import Path
from optimisers.monitoring.monitor import Monitor
from optimisers.monitoring.recording import Recording
from optimisers.report import summary
from optimisers.rules.adam import Adam, AdamW, AMSGrad
from optimisers.rules.adam_variants import AdaBelief, AdaMax, Adan, NAdam, OAdam, RAdam
from optimisers.rules.adaptive import AdaDelta, AdaGrad, RMSProp, Rprop
from optimisers.rules.averages import Average, Lookahead
from optimisers.rules.base import COPY, LIKE, REAL, Hyper, Rule, Slot
from optimisers.rules.chain import Chain
from optimisers.rules.clip import ClipGlobalNorm, ClipGrad, ClipNorm
from optimisers.rules.decay import SignDecay, WeightDecay
from optimisers.rules.decorator import rule
from optimisers.rules.descent import SGD, Descent, Momentum, Nesterov
from optimisers.rules.gates import AccumGrad, SkipNonFinite
from optimisers.rules.lion import Lion
from optimisers.rules.matrix import Adafactor, Muon
from optimisers.rules.parameter_free import Prodigy, ScheduleFree
from optimisers.rules.precision import MixedPrecision, StochasticRounding
from optimisers.rules.transforms import AddNoise, CentraliseGrad, ClipAdaptive
from optimisers.rules.trust import LAMB, LARS
from optimisers.setup import setup, trainables
from optimisers.state import State
from optimisers.surgery import Adapted, adapt
from optimisers.unfreezing import Unfreezing
from optimisers.update import update, update_

__version__ = "0.1.0"

__all__ = [
    "COPY",
    "LAMB",
    "LARS",
    "LIKE",
    "REAL",
    "SGD",
    "AMSGrad",
    "AccumGrad",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adafactor",
    "Adam",
    "AdamW",
    "Adan",
    "Adapted",
    "AddNoise",
    "Average",
    "CentraliseGrad",
    "Chain",
    "ClipAdaptive",
    "ClipGlobalNorm",
    "ClipGrad",
    "ClipNorm",
    "Descent",
    "Hyper",
    "Leaf",
    "Lion",
    "Loaded",
    "Lookahead",
    "MixedPrecision",
    "Momentum",
    "Monitor",
    "Muon",
    "NAdam",
    "Nesterov",
    "OAdam",
    "Parameter",
    "Path",
    "Prodigy",
    "RAdam",
    "RMSProp",
    "Recording",
    "Rprop",
    "Rule",
    "ScheduleFree",
    "SignDecay",
    "SkipNonFinite",
    "Slot",
    "State",
    "StochasticRounding",
    "Unfreezing",
    "WeightDecay",
    "adapt",
    "averaged",
    "compose",
    "destructure",
    "errors",
    "evaluation",
    "global_norm",
    "grad",
    "layerwise",
    "load",
    "no_decay",
    "partition",
    "reference_only",
    "register",
    "rule",
    "save",
    "schedules",
    "select",
    "setup",
    "summary",
    "trainables",
    "training",
    "update",
    "update_",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return __all__

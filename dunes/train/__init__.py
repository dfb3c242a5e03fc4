"""The training loop, losses, optimizers and schedules for any `nn.Module`, without models or tokenizers.

Start with `Trainer`, a loss (`next_token`, `cross_entropy`), an optimizer (`adamw`, `muon`) and a `Schedule`.
Small networks train faster with `fast_run`.
"""

from dunes.ops.cross_entropy import IGNORE
from dunes.train.fast import fast_run
from dunes.train.loss import cross_entropy, mean_squared, next_token
from dunes.train.optim import RuleOptimizer, adamw, muon, muon_split, rmsprop, scale_rates, sgd
from dunes.train.schedule import Clock, Record, Schedule
from dunes.train.trainer import Diverged, Step, Trainer, cast_frozen, mutable_buffers

__all__ = [
    "IGNORE", "Clock", "Diverged", "Record", "RuleOptimizer", "Schedule", "Step", "Trainer", "adamw",
    "cast_frozen", "cross_entropy", "fast_run", "mean_squared", "muon", "muon_split", "mutable_buffers",
    "next_token", "rmsprop", "scale_rates", "sgd",
]  # fmt: skip

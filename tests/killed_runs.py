"""Runs in processes of their own, which may be killed."""

import multiprocessing
import sys

import torch

from conftest import display
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.train import TrainTask, train

PROCESSES = multiprocessing.get_context("forkserver")  # what takes seconds to import is imported once
PROCESSES.set_forkserver_preload(
    ["dunes.runs.train", "dunes.runs.finetune", "torch._dynamo", "matplotlib.pyplot", "pytest"]
)


def start(config, folder, save_seconds):
    """A training in a new process, which goes on where an earlier one in the folder has stopped."""
    process = PROCESSES.Process(target=_train, args=(config, folder, save_seconds))
    process.start()
    return process


def _train(config, folder, save_seconds):
    torch.set_num_threads(1)
    saving.SAVE_SECONDS = save_seconds
    TrainTask.sample, run_module.loss_picture = lambda *_: "", lambda *_: None
    resume = (folder / "state" / "plan.json").exists()
    sys.exit(train(config, folder, display()[0], resume=resume))

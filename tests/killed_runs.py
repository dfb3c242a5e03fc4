"""Runs in processes of their own, which may be killed."""

import multiprocessing
import os
import signal
import sys
import time

import torch

import expansion
from conftest import display
from dunes import checkpoint
from dunes.augment import CHANGES
from dunes.runs import run as run_module
from dunes.runs import saving
from dunes.runs.finetune import FinetuneTask
from dunes.runs.train import TrainTask, train

PROCESSES = multiprocessing.get_context("forkserver")  # what takes seconds to import is imported once
PROCESSES.set_forkserver_preload(
    ["dunes.runs.train", "dunes.runs.finetune", "torch._dynamo", "matplotlib.pyplot", "pytest"]
)


def exit_code(verb, config, folder, **options):
    """The exit code of `train` or `finetune` in a new process; minus the number of the signal that killed it."""
    process = PROCESSES.Process(target=_run, args=(verb, config, folder), kwargs=options)
    process.start()
    process.join(120)
    return process.exitcode


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


def _run(verb, config, folder, kill_after=None, resume=False):
    CHANGES["expand"] = expansion
    torch.set_num_threads(1)
    saving.SAVE_SECONDS, log_step = 0.0, run_module._log_step
    TrainTask.sample = FinetuneTask.sample = FinetuneTask._answer = lambda *_: ""  # for people, as pictures are
    run_module.loss_picture = lambda *_: None

    def log_or_die(path, step, score):
        log_step(path, step, score)
        if step.number == kill_after:
            while checkpoint.latest_state(folder) is None:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    run_module._log_step = log_or_die
    sys.exit(verb(config, folder, display()[0], resume=resume))

"""The verbs that train."""

import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import tyro

from dunes.cli.command import GIVEN
from dunes.cli.process import drop_lost_output
from dunes.cli.user_config import FROM_FILE, file_path
from dunes.flags import flag
from dunes.runs.config import Hardware, RunConfig, RunOptions
from dunes.runs.finetune_config import Adapter, ExampleData, FinetuneConfig, FinetuneOptimization
from dunes.runs.objectives import Preference
from dunes.runs.train_config import Completion, ModelShape, TextData, TrainConfig, TrainOptimization

Quiet = Annotated[bool, tyro.conf.arg(help="Print warnings and results only.")]
RunFolder = Annotated[Path | None, tyro.conf.arg(metavar="RUN", help_behavior_hint="(required)")]


def train(
    data: TextData,
    model: ModelShape,
    completion: Completion,
    optimization: TrainOptimization,
    hardware: Hardware,
    run: RunOptions,
    *,
    out: RunFolder = None,
    no_complete: bool = False,
    plan: Annotated[Path | None, flag("FILE", "none")] = None,
    quiet: Quiet = False,
) -> int:
    """Train a model on files and folders, from scratch or from a model.

    With --minutes (or --steps), the model size is chosen to fit the time, the text and this machine.

    Example: dunes train ~/code/project --out runs/project --minutes 15

    Example: dunes train ~/code/other --from runs/project --out runs/other --minutes 5

    Args:
        out: Output folder for the model, its metrics and its training state.
        no_complete: Treat source code like plain text: train left to right only, without line completion.
        plan: Estimate the loss of runs of 1 to 480 minutes, draw its curve as this file, .png, and exit.
    """
    if no_complete and completion.complete:
        raise ValueError("--complete and --no-complete exclude each other; set one of them")
    complete = {"complete": False} if no_complete else {}
    config = TrainConfig(
        **vars(data), **vars(model), **vars(completion) | complete, **vars(optimization), **vars(hardware)
    )
    from dunes.runs.train import train as work

    return _run(work, config, out, quiet, replace(run, plan=plan, dry_run=run.dry_run or plan is not None))


def finetune(
    data: ExampleData,
    adapter: Adapter,
    preference: Preference,
    optimization: FinetuneOptimization,
    hardware: Hardware,
    run: RunOptions,
    *,
    out: RunFolder = None,
    show: Annotated[int, flag("EXAMPLES")] = 0,
    quiet: Quiet = False,
) -> int:
    """Finetune a model on instructions, chats, prompts and completions, plain text, or preferences.

    Before the first step, prints a report on the data. At the end, prints the validation loss, the forgetting
    (loss on other text), and answers before and after finetuning.

    Example: dunes finetune runs/project --data alpaca.json --out runs/helper

    Args:
        out: Output folder for the adapter (with --method full: the model), its metrics and its training state.
        show: Print this many tokenized examples, with trained tokens highlighted.
    """
    config = FinetuneConfig(
        **vars(data), **vars(adapter), **vars(preference), **vars(optimization), **vars(hardware)
    )
    from dunes.runs.finetune import finetune as work

    return _run(work, config, out, quiet, run, examples=show)


def _run(
    work: Callable[..., int], config: RunConfig, out: Path | None, quiet: bool, options: RunOptions, **more: int
) -> int:
    """Call `work` for the run; its argument `asked` names all options on the command line, including options set
    to their defaults, but no options from the user's file."""
    if not options.dry_run:
        drop_lost_output()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save may come before the first step
    if out is None and not options.dry_run:
        raise ValueError("--out is missing; pass a folder for the run, with --resume too: --out RUN --resume")
    from dunes.measure import ranks
    from dunes.progress import Display
    from dunes.runs.saving import was_started_by_job

    added = {"base" if name == "from" else name: words for name, words in FROM_FILE.get({}).items()}
    set_options = config.changed() - added.keys() | GIVEN.get() & vars(config).keys()
    display = Display(quiet=(quiet and not options.dry_run) or not ranks.is_first(), silent=not ranks.is_first())
    if options.dry_run and added:
        display.line(f"from {file_path()}: {shlex.join(chain(*added.values()))}")
    folder = out or Path("runs/none")
    if not 0 < options.rank_timeout < 1e6:
        raise ValueError(f"--rank-timeout is {options.rank_timeout} minutes; expected more than 0")
    limit, by_node = 60 * options.rank_timeout, options.shard == "node"
    with ranks.process_group(config.device, limit, folder / "state", by_node):
        if ranks.broadcast(was_started_by_job(folder)):
            options = replace(options, resume=True)
        return work(config, folder, display, **vars(options) | {"asked": set_options} | more)

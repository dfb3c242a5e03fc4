"""astral dunes: build, train, change and use small transformers on your own machine.

Each room (subpackage) is imported at its first use, so `import dunes` is fast and does not import torch.
`help(dunes.train)` begins with the main names of the room `train`. Names that contain a dot are imported from
their module: `train.train` of the room `runs` is `from dunes.runs.train import train`. `make docs` makes pages of
all public names. The rooms:
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from dunes.cores import OWN_CHOICE, reports_waits

__version__: str  # the installed package's, found at first use: importlib.metadata takes 30 ms to import
_ROOMS = {
    "files": "bytes on disk: atomic writes, staging folders, locks, JSON and JSON lines, and trust in cards",
    "text": "text to ids and back: tokenizers, chat templates, lines, incremental decoding",
    "measure": "speed, threads and memory of this machine, and the memory of tensors",
    "tree": "find, replace, freeze, move, count, watch and print the modules of any `nn.Module`",
    "ops": "tensor operations with a fast implementation beside the plain one, and checks of operations",
    "parts": "parts of a transformer, which take plain arguments or built parts, never a config",
    "data": "data for training: files and folders, shards of tokens, windows, examples, batches",
    "models": "whole architectures, one file each, and their names and configs in Hugging Face",
    "generate": "ids in, ids out: decoding, sampling, speculation, the prefix cache, compiled decoding",
    "train": "the training loop, losses, optimizers and schedules for any `nn.Module`; no model, no tokenizer",
    "augment": "changes to a built model, recorded so that a checkpoint repeats them",
    "checkpoint": "model folders that other tools open too, and the states of runs",
    "inference": "text in, text out with a loaded model: prompts, stops, chat, samples, adapters per request",
    "completion": "line completion: engine, index, copies, gate, simulated typing and the thresholds fitted by it",
    "evaluate": "scores: loss on text, tasks, lines, a model before and after a change",
    "runs": "training, finetuning and changing a folder: configs, sizes, loops, metrics, pictures",
    "serve": "servers for editors and programs: one worker that owns a model, behind HTTP and LSP",
    "bench": "benchmarks, profiles of time and memory, tables, plots, comparisons",
    "studio": "a page in the browser: runs, writing, chats, the model, measurements",
}
__doc__ = f"{__doc__}\n" + "\n".join(f"    {room:12}{line}" for room, line in _ROOMS.items())

# If the system does not report how long threads wait for cores, `share_cores` does nothing. GOMP_SPINCOUNT then
# makes waiting threads always sleep early; OpenMP reads it once, when torch is loaded.
if "torch" not in sys.modules and not os.environ.keys() & OWN_CHOICE and not reports_waits():
    os.environ["GOMP_SPINCOUNT"] = "3000"

if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute name

    def __getattr__(name: str) -> Any:
        if name in _ROOMS:
            return importlib.import_module(f"{__name__}.{name}")
        if name == "__version__":
            from importlib import metadata

            found = metadata.distributions(name="astral-dunes")  # none if `sys.path` has a folder of sources only
            return next((package.version for package in found), "0+unknown")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*_ROOMS, "__version__", *(name for name in globals() if name.startswith("__"))]

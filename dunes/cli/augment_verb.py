"""`dunes augment ...`: one command per modification. A command reads a model folder and writes another one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, get_args

import tyro

from dunes.augment.options import COMMANDS as CHANGES
from dunes.augment.options import OPTIONS, Options
from dunes.cli.command import keyword, with_parameters, with_trust
from dunes.cli.process import drop_lost_output
from dunes.cli.verbs import AnyBase, Model, Out
from dunes.flags import Dtype, flag

Into = Literal["dequantized", "original"]
VALIDATION = Annotated[
    tuple[str, ...],
    flag("SOURCE", "the validation text of the model's training", "Text to score before and after the change."),
]


def merge(
    model: Model,
    out: Out,
    *,
    into: Annotated[Into | None, flag("|".join(get_args(Into)), "dequantized")] = None,
    dtype: Annotated[
        Dtype | None, flag("|".join(get_args(Dtype)), "the base's", "Dtype of the merged weights.")
    ] = None,
    any_base: AnyBase = False,
) -> None:
    """Merge an adapter into its base model, and verify the result; tokenizer and chat template are copied.

    Example: dunes augment merge runs/chat ~/models/chat

    Args:
        into: If the adapter was trained on a quantized base, merge it into dequantized or original weights.
    """
    import torch

    from dunes import checkpoint
    from dunes.checkpoint.export import export
    from dunes.text import templates

    drop_lost_output()
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    folder = checkpoint.locate_model(model).folder
    print("\n".join(export(folder, out, into, torch_dtype, any_base, reader="dunes").lines()))
    loaded = checkpoint.load(out)
    if loaded.tokenizer is not None:
        verb = "generate" if templates.find_template(loaded.tokenizer, loaded.card) is None else "chat"
        print(f'next: dunes {verb} {quote(str(out))} "..."')


def _command(name: str, options_type: type[Options]) -> Callable[..., None]:
    """The command for the change `name`, with flags for the options in `options_type`."""
    group = name.replace("-", "_")

    def command(model: str, out: Path, **settings: Any) -> None:
        drop_lost_output()
        settings = {p.name: p.default for p in parameters[2:]} | settings
        options = settings.pop(group)
        if settings.pop("undo", False):
            _undo(name, model, out, options, settings)
        else:
            _augment(name, model, out, options, settings)
            print(options_type.NEXT.format(out=quote(str(out))))

    parameters = [
        Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, annotation=Model),
        Parameter("out", Parameter.POSITIONAL_OR_KEYWORD, annotation=Out),
        keyword(group, options_type(), Annotated[options_type, tyro.conf.arg(help="Options of the change.")]),
    ]
    if options_type.TEXT:
        calibration = flag("SOURCE", "the text of the model's training", options_type.TEXT)
        parameters.append(keyword("calibration", (), Annotated[tuple[str, ...], calibration]))
    if options_type.SCORED:
        parameters.append(keyword("validation", (), VALIDATION))
    if options_type.UNDO:
        parameters.append(keyword("undo", False, Annotated[bool, tyro.conf.arg(help=options_type.UNDO)]))
    command.__doc__, command.__name__ = options_type.__doc__, name
    return with_parameters(command, parameters)


def _augment(name: str, model: str, out: Path, options: Options, settings: dict[str, Any]) -> None:
    """Make a change to the model in a folder, write the result to `out`, and print a report."""
    from dunes import checkpoint, measure
    from dunes.runs.augment import augment_folder, quantize_folder

    make = quantize_folder if name == "quantize" else partial(augment_folder, name=name)
    if name != "quantize" and not options.reads_text and settings.pop("calibration", ()):
        raise ValueError(f"with these options {name} reads no text; omit --calibration")
    measure.use_best_threads()
    with _shown():
        folder = checkpoint.locate_model(model).folder
        request = {option: value for option, value in vars(options).items() if option != "where" or value}
        lines = make(folder, out, **request, **settings)
    print("\n".join(lines))


def _undo(name: str, model: str, out: Path, options: Options, settings: dict[str, Any]) -> None:
    """Undo the last change, write `out`, and print a report. Raises ValueError if any option but --undo is set."""
    from dunes import checkpoint
    from dunes.runs.augment import undo_folder

    if unsupported := [*options.changed(), *(flag for flag, value in settings.items() if value)]:
        raise ValueError(f"--undo undoes the complete change; omit --{' and --'.join(unsupported)}")
    with _shown():
        print(undo_folder(checkpoint.locate_model(model).folder, out, name))


@contextmanager
def _shown() -> Iterator[None]:
    """Inside the `with` block, show progress as a bar on a terminal, or as a line every ten seconds elsewhere."""
    from rich.console import Console

    from dunes.progress import EVERY, Display, shown_by

    with Display(Console(stderr=True, highlight=False), patience=EVERY) as display, shown_by(display.time_left):
        yield


COMMANDS: dict[str, Callable[..., Any]] = {"merge": merge} | {n: _command(n, OPTIONS[n]) for n in CHANGES}

ABOUT = """Modify models: each command reads a folder and writes another.

Example: dunes augment merge runs/chat ~/models/chat"""


def commands() -> dict[str, Callable[..., Any]]:
    """The subcommands of `dunes augment`, by name."""
    return {name: with_trust(command) for name, command in COMMANDS.items()}

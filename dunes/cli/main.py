"""The command. Torch is loaded by the verb that needs it, so that help comes at once."""

import os
import sys
import warnings
from typing import Any, TextIO

VERBS = (
    "train", "finetune", "generate", "chat", "complete", "eval",
    "inspect", "convert", "export", "augment", "bench",
)  # fmt: skip


def main() -> None:
    """Run the command line; exit with 2 and one line for a user's mistake."""
    from dunes.cli import verbs

    warnings.showwarning = _warn
    try:
        if sys.argv[1:2] == ["bench"]:
            from dunes.cli import bench

            sys.exit(bench.run(sys.argv[2:]))
        if sys.argv[1:2] == ["augment"]:
            from dunes.cli import augment

            sys.exit(augment.run(sys.argv[2:]))
        status = run(sys.argv[1:], {verb: getattr(verbs, verb.replace("eval", "evaluate")) for verb in VERBS})
    except (ValueError, OSError) as error:
        if os.environ.get("DUNES_TRACEBACK"):
            raise
        print(f"dunes: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as a line of its own, without the place in our code."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def run(arguments: list[str], verbs: dict[str, Any]) -> int:
    """Parse the arguments and call the verb they name."""
    import tyro

    description = "Build, train, change and use small transformers on your own machine."
    chosen = tyro.extras.subcommand_cli_from_dict(
        verbs, args=arguments, prog="dunes", description=description, config=(tyro.conf.FlagCreatePairsOff,)
    )
    return int(chosen or 0)

"""dunes/cli/completion.bash (also for zsh) and .fish: what `dunes --completion SHELL` prints.

`python .ci/completion_scripts.py` writes them from the verbs, their flags and the pages of docs/; with --check it
fails where a script is out of date. A script is a list of cases, each a pattern of the words before the cursor and
the words that can follow; where no case matches, the shell completes files. Thus Tab starts no Python. tyro's own
scripts start one, offer hidden flags, and complete no files for MODEL and SOURCE.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from dunes.cli import GROUPS, VERBS  # noqa: E402 - the package beside this file, not an installed one
from dunes.cli.main import load_command  # noqa: E402
from dunes.cli.manual import topics  # noqa: E402
from dunes.flags import option  # noqa: E402

NOTE = "# Written by .ci/completion_scripts.py; printed by dunes --completion.\n"
BASH = """[ -z "${ZSH_VERSION-}" ] || eval 'autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit; bashcompinit'
_dunes() {
  local words= cur=${COMP_WORDS[COMP_CWORD]}
  case "${COMP_WORDS[*]:1:$((COMP_CWORD-1))} " in
"""
BASH_END = """  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _dunes dunes
"""
FISH = """function __dunes
  set -l words (commandline -opc)
  string match -q -- $argv[1] "$words[2..] "
end
"""


def flags_of(command: Callable[..., Any]) -> dict[str, Any]:
    """The types of the flags of a command, or of a dataclass of options, by name without leading dashes."""
    flags, hints = dict[str, Any](), get_type_hints(command, include_extras=True)
    for name, parameter in signature(command).parameters.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        if isinstance(kind, type) and is_dataclass(kind):
            flags |= flags_of(kind)
        elif tyro.conf.Positional not in marks and tyro.conf.Suppress not in marks:
            shown = option(next(filter(None, (getattr(mark, "name", None) for mark in marks)), name))
            flags[f"no-{shown}" if parameter.default is True else shown] = kind
    return flags


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of the Literal in an annotation; empty if the annotation has no Literal."""
    parts = get_args(annotation)
    return parts if get_origin(annotation) is Literal else tuple(c for part in parts for c in choices(part))


def cases() -> Iterator[tuple[str, list[str]]]:
    """Patterns of the words before the cursor, and the words that can follow; the more special patterns first."""
    yield " ", [*VERBS]
    yield "help ", [*VERBS, *topics()]
    for verb in VERBS:
        commands = {verb: load_command(verb)}
        if verb in GROUPS:
            subcommands = import_module(f"dunes.cli.{GROUPS[verb]}").commands()
            commands = {f"{verb} {name}": command for name, command in subcommands.items()}
            yield f"{verb} ", [words.split()[1] for words in commands]
        for words, command in commands.items():
            flags = flags_of(command)
            for name, kind in flags.items():
                if known := choices(kind):
                    yield f"{words} *--{name} ", [*known]
            yield f"{words} *", [f"--{name}" for name in (*flags, "help")]


def bash_case(pattern: str, words: list[str]) -> str:
    """A branch of the `case` statement; flags are offered after a dash only, so that Tab alone lists files."""
    condition = "[[ $cur == -* ]] && " if words[0].startswith("--") else ""
    escaped = pattern.replace(" ", r"\ ")
    return f"    {escaped}) {condition}words='{' '.join(words)}' ;;\n"


def fish_lines(pattern: str, words: list[str]) -> str:
    """The commands for a case; fish offers flags after a dash only."""
    begin = f"complete -c dunes -n \"__dunes '{pattern}'\""
    if words[0].startswith("--"):
        return "".join(f"{begin} -l {word[2:]}\n" for word in words)
    return f"{begin} -f -a '{' '.join(words)}'\n"


def main() -> int:
    rows = [*cases()]
    bash = BASH + "".join(bash_case(*row) for row in rows) + BASH_END
    scripts = {"bash": bash, "fish": FISH + "".join(fish_lines(*row) for row in rows)}
    status = 0
    for shell, script in scripts.items():
        path = ROOT / "dunes" / "cli" / f"completion.{shell}"
        if "--check" not in sys.argv:
            path.write_text(NOTE + script)
        elif not path.exists() or path.read_text() != NOTE + script:
            print(f"{path} is out of date: python .ci/completion_scripts.py writes it", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

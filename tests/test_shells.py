"""The Tab key: the scripts that `dunes --completion` prints, in bash, zsh and fish."""

import os
import shutil
import subprocess

import pytest

from dunes.cli.main import run_command

WORDS = {
    "fine": "finetune", "train --sha": "--shared-experts --shard", "train code --shard n": "node", "train ": "",
    "train --minutes ": "", "finetune m --no-p": "--no-packing", "augment quant": "quantize",
    "augment quantize a b --kind nf": "nf4", "bench train --by": "--by-module", "help quantiz": "quantization",
}  # fmt: skip
"""The words that can follow; where there are none, a shell offers files."""
SHELLS = {"bash": "bash --norc --noprofile -i", "zsh": "zsh -f -i", "fish": "fish --no-config -i"}
ECHO = {"fish": 'function dunes; echo "<$argv>"; end'}
"""A command that shows its arguments, for shells that define functions in their own way."""


def test_the_words_that_can_follow_are_verbs_flags_choices_and_topics(capsys):
    assert run_command(["--completion", "bash"]) == 0
    lines = [
        f"COMP_WORDS=(dunes {line}) COMP_CWORD={line.count(' ') + 1}; _dunes; echo ${{COMPREPLY[@]}}"
        for line in WORDS
    ]
    done = subprocess.run(
        ["bash", "-c", "\n".join([capsys.readouterr().out, *lines])], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert dict(zip(WORDS, done.stdout.splitlines(), strict=True)) == WORDS


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_in_a_terminal(shell, tmp_path, capsys):
    pexpect = pytest.importorskip("pexpect")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    assert run_command(["--completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    env = os.environ | {"TERM": "xterm", "HOME": str(tmp_path)}
    function = ECHO.get(shell, 'dunes() { echo "<$*>"; }')
    child = pexpect.spawn(SHELLS[shell], cwd=tmp_path, env=env, encoding="utf-8", timeout=20)
    child.send(f"source ./script; {function}; echo read'y'\r")
    child.expect_exact("ready")
    lines = {line: completed for line, completed in WORDS.items() if len(completed.split()) == 1}
    for line, completed in (lines | {"train x --out folder/in": "folder/inside"}).items():
        child.send(f"dunes {line}\t\r")
        child.expect(rf"<{line.rpartition(' ')[0]} ?{completed}/? ?>")
    child.close(force=True)

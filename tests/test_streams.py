"""Commands whose output, input or process is taken away: the exit status is right, and nothing is half done."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from textwrap import dedent

import pytest

from conftest import eventually
from dunes.cli import augment_verb, main, serve, studio, training, verbs

PRINTS = """
    import sys
    from dunes.cli.process import drop_lost_output, exit_with

    def work():
        {is_result} or drop_lost_output()
        print("résumé 漢 🙂 \\ud83d" if {wide} else "line")
        print("note", file=sys.stderr)
        with open("file", "w") as file:
            assert file.fileno() > 2
            file.write("done" + sys.stdin.read())

    exit_with(work, "program")
"""
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
EACH = pytest.mark.parametrize("is_result", [True, False])


def shell(line, folder, *, is_result=True, wide=False, **environment):
    """The status, output and errors of a shell's line in which PROGRAM prints and writes a file."""
    (folder / "program.py").write_text(dedent(PRINTS.format(wide=wide, is_result=is_result)))
    line = line.replace("PROGRAM", f"'{sys.executable}' program.py")
    options = {"capture_output": True, "cwd": folder, "env": os.environ | environment}
    done = subprocess.run(["bash", "-c", line], **options, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


@EACH
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error_and_its_number_goes_to_no_file(closed, is_result, tmp_path):
    status, out, errors = shell(f"PROGRAM {closed}", tmp_path, is_result=is_result)
    assert status == 0
    assert (tmp_path / "file").read_text() == "done"
    assert out == ("" if ">&-" in closed.replace("2>&-", "") else "line\n"), "errors are not printed as output"
    assert errors == ("" if "2>&-" in closed else "note\n")


@EACH
@pytest.mark.parametrize(("place", "result"), [
    ("| true", 141),
    pytest.param("> /dev/full", 2, marks=FULL),
    pytest.param("2> /dev/full", 0, marks=FULL),
])  # fmt: skip
def test_output_that_cannot_be_written_is_an_error_only_if_it_is_the_result(place, result, is_result, tmp_path):
    line = f"set -o pipefail; (sleep 0.2; exec PROGRAM) {place}" if "|" in place else f"PROGRAM {place}"
    status, _, errors = shell(line, tmp_path, is_result=is_result)
    assert status == (result if is_result else 0)
    assert (tmp_path / "file").exists() == (status == 0)
    if status == 2:
        assert re.fullmatch("program: .*standard output.*\n", errors)
    else:
        assert errors in ("", "note\n")


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}])
def test_characters_that_the_output_lacks_are_escaped(variables, tmp_path):
    status, out, errors = shell("PROGRAM", tmp_path, wide=True, **variables)
    assert (status, errors) == (0, "note\n")
    assert out.endswith("\\ud83d\n")
    assert out.isascii() == ("ascii" in variables.values())


@EACH
def test_a_full_pipe_that_does_not_block_is_waited_for(is_result, tmp_path):
    work = f"({is_result} or drop_lost_output()) and 0 or print('x' * 300_000)"
    script = f"from dunes.cli.process import drop_lost_output, exit_with; exit_with(lambda: {work}, 'p')"
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETFL, os.O_NONBLOCK)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    with open(read, "rb") as file:
        assert len(file.read()) == 300_001
    assert process.communicate()[1] == b""
    assert process.returncode == 0


@pytest.mark.parametrize(("words", "is_result"), [
    ("train code --out run", False), ("train code --dry-run", True), ("train -h", True), ("serve run", False),
    ("serve run --config=vim", True), ("generate run", True), ("", True), ("--version", True), ("eval run", True),
    ("finetune m --out run", False), ("finetune m --dry-run", True), ("lsp run", False), ("compile m", False),
    ("convert m out", False), ("export m out", False), ("augment merge m out", False), ("inspect m", True),
    ("augment prune m out", False), ("augment prune -h", True), ("studio run", False),
])  # fmt: skip
def test_the_output_of_these_commands_is_their_result(words, is_result, monkeypatch, tmp_path):
    dropped = []
    for module in (augment_verb, serve, studio, training, verbs):
        monkeypatch.setattr(module, "drop_lost_output", lambda: dropped.append(True))
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit, ValueError):
        main.run_command(words.split())
    assert (not dropped) == is_result


CLEANS = """
    import sys, time
    from pathlib import Path
    from dunes.cli.process import exit_with
    from dunes.files.atomic import staging_folder

    def work():
        with staging_folder(Path("out")) as staged:
            (staged / "half").write_text("")
            Path("ready").touch()
            try:
                time.sleep(60)
            finally:
                if "slow" in sys.argv:
                    Path("cleaning").touch()
                    time.sleep(60)

    exit_with(work, "program")
"""


def cleaning(folder, *arguments, ignored=()):
    """A process in a staging folder; some signals were ignored at its start."""
    ignore = lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored]
    command = [sys.executable, "-c", dedent(CLEANS), *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, preexec_fn=ignore)
    assert eventually((folder / "ready").exists)
    return process


def assert_ends(process, number, status):
    """This signal ends the process with this status and without a word."""
    process.send_signal(number)
    assert process.communicate(timeout=20) == (None, b"")
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_without_leaving_half_a_folder(number, tmp_path):
    assert_ends(cleaning(tmp_path), number, 128 + number)
    assert {path.name for path in tmp_path.iterdir()} == {"ready"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_command_at_once(number, tmp_path):
    process = cleaning(tmp_path, "slow")
    process.send_signal(signal.SIGTERM)
    assert eventually((tmp_path / "cleaning").exists)
    assert_ends(process, number, -number)


def test_a_hangup_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    process = cleaning(tmp_path, ignored=[signal.SIGHUP])
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


SWALLOWS = """
    import time
    from pathlib import Path

    try:
        Path("ready").touch()
        time.sleep(60)
    except BaseException:  # as torch does around its import of numpy
        Path("swallowed").touch()
"""


CALLS = {
    "swallows": "from dunes.cli.process import exit_with; exit_with(lambda: __import__('swallows') and 0, 'p')",
    "tyro": "from dunes.cli.main import main; main()",
}


@pytest.mark.parametrize(
    ("number", "module"), [(signal.SIGINT, "tyro"), (signal.SIGINT, "swallows"), (signal.SIGTERM, "swallows")]
)
def test_a_signal_during_an_import_is_not_lost_in_it(number, module, tmp_path):
    (tmp_path / f"{module}.py").write_text(dedent(SWALLOWS))
    script = f"import sys; sys.path.insert(0, ''); {CALLS[module]}"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE)
    assert eventually((tmp_path / "ready").exists)
    assert_ends(process, number, 128 + number)
    assert not (tmp_path / "swallowed").exists()

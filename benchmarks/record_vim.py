"""A recording of Vim that completes lines from a served run, as an animated SVG.

    python benchmarks/record_vim.py RUN FILE OUT.svg --plugin FOLDER [--port 8012]

FILE is copied, and keys are typed at its end: each of `--typed` is the beginning of a line, and Tab accepts its
suggestion. FOLDER has llama.vim; `dunes serve RUN` must run at the port. Needs vim, pexpect and pyte.
"""

import os
import shutil
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import pexpect
import pyte
import tyro
from tyro.conf import Positional

ROWS, COLUMNS, WIDTH, HEIGHT = 20, 92, 8.4, 18
COLORS = {"default": "#d8dee9", "brown": "#ebcb8b", "green": "#a3be8c", "blue": "#81a1c1", "cyan": "#88c0d0"}
COLORS |= {"magenta": "#b48ead", "red": "#bf616a", "black": "#4c566a", "brightblack": "#7b88a1"}


class Screen(pyte.Screen):
    """A screen that takes Vim's private sequences."""

    def select_graphic_rendition(self, *attributes: int, private: bool = False) -> None:
        """Set attributes; private ones are left out."""
        if not private:
            super().select_graphic_rendition(*attributes)


class Recorder:
    """Vim in a terminal, and the frames that it has shown: the time (s) and the lines in colours."""

    def __init__(self, file: Path, settings: Path) -> None:
        self.screen = Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        command = ["-u", str(settings), "-i", "NONE", str(file)]
        self.child: Any = pexpect.spawn(
            "vim", command, dimensions=(ROWS, COLUMNS), env=os.environ | {"TERM": "xterm-256color"}
        )
        self.frames: list[tuple[float, list[str]]] = []
        self.start = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Take in what Vim writes, and keep a frame where it differs."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.stream.feed(self.child.read_nonblocking(1 << 16, timeout=0.02))
            except pexpect.TIMEOUT:
                lines = [self._line(row) for row in range(ROWS - 1)]
                if not self.frames or self.frames[-1][1] != lines:
                    self.frames.append((time.monotonic() - self.start, lines))
            except pexpect.EOF:
                return

    def type(self, text: str, pause: float = 0.09) -> None:
        """Send keys one by one."""
        for key in text:
            self.child.send(key)
            self.wait(pause)

    def _line(self, row: int) -> str:
        """A line of the screen as spans of one colour."""
        spans, text, color = [], "", ""
        for column in range(COLUMNS):
            cell = self.screen.buffer[row][column]
            fill = COLORS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else COLORS["default"])
            if fill != color and text:
                spans.append((color, text))
                text = ""
            text, color = text + cell.data, fill
        spans = [*spans, (color, text)]
        while spans and not spans[-1][1].strip():
            spans.pop()
        return "".join(f'<tspan fill="{fill}">{escape(part)}</tspan>' for fill, part in spans)


def animation(frames: list[tuple[float, list[str]]], hold: float = 3.0) -> str:
    """The frames as an SVG that shows one after another, again and again."""
    first, total = frames[0][0], frames[-1][0] - frames[0][0] + hold
    width, height = COLUMNS * WIDTH + 20, (ROWS - 1) * HEIGHT + 20
    rules, groups, known = [], [], dict[str, int]()
    ends = [*(when for when, _ in frames[1:]), frames[-1][0] + hold]
    for i, ((when, lines), end) in enumerate(zip(frames, ends, strict=True)):
        a, b = 100 * (when - first) / total, 100 * (end - first) / total
        later = f"{min(b + 0.001, 100):.3f}%,100%{{opacity:0}}"
        shown = f"0%,{a:.3f}%{{opacity:0}}{a + 0.001:.3f}%,{b:.3f}%{{opacity:1}}{later}"
        if i == 0:
            shown = f"0%,{b:.3f}%{{opacity:1}}{later}"
        rules.append(f"@keyframes f{i}{{{shown}}}.f{i}{{animation:f{i} {total:.2f}s step-end infinite;opacity:0}}")
        rows = [
            f'<use href="#l{known.setdefault(line, len(known))}" y="{10 + HEIGHT * (n + 0.75):.1f}"/>'
            for n, line in enumerate(lines)
            if line
        ]
        groups.append(f'<g class="f{i}">{"".join(rows)}</g>')
    texts = "".join(f'<text id="l{n}" x="10">{line}</text>' for line, n in known.items())
    style = "text{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre}" + "".join(rules)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
        f'<style>{style}</style><rect width="100%" height="100%" rx="6" fill="#2e3440"/>'
        f"<defs>{texts}</defs>{''.join(groups)}</svg>\n"
    )


def main(
    run: Positional[Path],
    file: Positional[Path],
    out: Positional[Path],
    plugin: Path,
    typed: tuple[str, ...] = (),
    port: int = 8012,
) -> None:
    """Record.

    Args:
        run: The served run, for the page's title only.
        file: The file that is edited.
        out: The SVG.
        plugin: The folder of llama.vim.
        typed: Beginnings of lines; a line without `|` is typed to its end.
        port: The server's port.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, settings = Path(folder) / file.name, Path(folder) / "vimrc"
        shutil.copy(file, copy)
        address = f"http://127.0.0.1:{port}/infill"
        settings.write_text(
            f"set nocompatible noswapfile noshowmode noruler noautoindent expandtab shiftwidth=4\n"
            f"set rtp^={plugin}\nsyntax on\nset background=dark\n"
            f"let g:llama_config = {{'endpoint_fim': '{address}', 'show_info': 0}}\n"
        )
        vim = Recorder(copy, settings)
        vim.wait(1.0)
        vim.frames.clear()
        vim.type("G", 0.3)
        vim.type("o", 0.3)
        for n, line in enumerate(typed):
            beginning, bar, _ = line.partition("|")
            vim.type("\r" * bool(n), 0.25)
            vim.type(beginning)
            if bar:
                vim.wait(1.2)
                vim.type("\t", 0.8)
        vim.wait(0.5)
        out.write_text(animation(vim.frames))
        vim.child.send("\x1b:q!\r")
        print(f"{out}: {len(vim.frames)} frames, {out.stat().st_size / 1e3:.0f} kB, {run}")


if __name__ == "__main__":
    tyro.cli(main)

"""The lines and files of each room of the package, against budget.toml.

`python .ci/budget.py` fails where a room has more of either; with --write it sets the budget to what is there plus
2 percent.
"""

import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHARE = 1.02


def measured(root: Path) -> dict[str, tuple[int, int]]:
    """Lines and Python files by room; those beside the rooms are `top`."""
    rooms = defaultdict[str, list[int]](list)
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root).parts
        rooms[inside[0] if len(inside) > 1 else "top"].append(len(file.read_text().splitlines()))
    return {room: (sum(lines), len(lines)) for room, lines in rooms.items()}


def exceeded(found: dict[str, tuple[int, int]], budget: dict[str, list[int]]) -> list[str]:
    """A line for each room that has more than its budget, or none."""
    over = []
    for room, (lines, files) in found.items():
        most = budget.get(room, [0, 0])
        if lines > most[0] or files > most[1]:
            over.append(
                f"{room}: {lines} lines in {files} files; budget.toml has {most[0]} in {most[1]}: delete "
                "elsewhere in the room, or raise it, lower another, and say why in docs/decisions.md"
            )
    return over


def main() -> int:
    found, file = measured(ROOT / "dunes"), ROOT / "budget.toml"
    if "--write" in sys.argv:
        rows = [f"{room} = [{round(lines * SHARE)}, {files}]" for room, (lines, files) in sorted(found.items())]
        file.write_text("# Most lines and Python files of each room (.ci/budget.py).\n" + "\n".join(rows) + "\n")
    budget = tomllib.loads(file.read_text())
    for room, (lines, files) in sorted(found.items()):
        print(f"{room:12}{lines:6} lines {files:4} files")
    lines, files = map(sum, zip(*found.values(), strict=True))
    print(f"{'all':12}{lines:6} lines {files:4} files")
    over = exceeded(found, budget)
    print("\n".join(over), file=sys.stderr, end="\n" if over else "")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare all that users can see of two checkouts, so that a cleanup can prove that it changed nothing.

python benchmarks/oracle.py ../before . --out runs/oracle --templates llama_cpp_python-0.3.36.tar.gz

Each checkout runs `oracle_side.py`. A scenario gives a record, all of whose values are compared; `oracle.toml` has
what they run. Records of a clean OLD are kept in --out by its commit. The whole takes twelve minutes of one core.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import tyro

Record = dict[str, Any]
FILES = tuple(Path(__file__).with_name(name) for name in ("oracle_side.py", "oracle.toml", "oracle.py"))
TABLE = tomllib.loads(FILES[1].read_text(encoding="utf-8"))


def masked(text: str) -> list[str]:
    for pattern, replacement in TABLE["masks"]:
        text = re.sub(pattern, replacement, text)
    return text.replace(os.environ["ORACLE_CHECKOUT"], "CHECKOUT").split("\n")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def described_file(path: Path) -> Any:
    """The lines of a short text, or the digests of a file and of the tensors in it."""
    data = path.read_bytes()
    if path.suffix != ".safetensors":
        with suppress(UnicodeDecodeError):
            return masked(data.decode()) if len(data) < 50_000 else digest(data)
        return digest(data)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    tensors = {name: digest(data[start + begin : start + end]) for name, (begin, end) in places.items()}
    return {"header": header, "tensors": tensors, "sha256": digest(data)}


def described(path: Path) -> Record:
    """All files of a folder, or one file, by name; of pictures and compiled code the name alone."""
    files = {str(f.relative_to(path)): f for f in (sorted(path.rglob("*")) if path.is_dir() else [path])}
    read = {name: f for name, f in files.items() if f.is_file() and name[:2] != ".d" and f.name != "lock"}
    return {name: f.suffix in TABLE["unread"] or described_file(f) for name, f in read.items()}


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Place and both values of all that differs; of lists of different lengths, the first difference alone."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from differences(old.get(key, "(absent)"), new.get(key, "(absent)"), f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip([*old, "(end)"], [*new, "(end)"], strict=False))
        found = (d for i, pair in pairs for d in differences(*pair, f"{path}/{i}"))
        yield from found if len(old) == len(new) else [next(found)]
    elif old != new or type(old) is not type(new):
        yield path, old, new


def records(checkout: Path, out: Path, names: Sequence[str], options: Record, keeps: bool) -> dict[str, Record]:
    """The records of a checkout. With `keeps`, those of a clean commit are kept in `out`, and read from there."""
    git = lambda *words: subprocess.run(
        ["git", *words], cwd=checkout, capture_output=True, text=True
    ).stdout.strip()
    commit, work = git("rev-parse", "HEAD"), Path(options["folder"])
    key = json.dumps([commit, sys.version, options]).encode() + b"".join(file.read_bytes() for file in FILES)
    keeps = keeps and commit != "" and not git("status", "--porcelain")
    results = out / (f"{commit[:12]}-{digest(key)[:8]}" if keeps else "not kept")
    for folder in (work, *(() if keeps else (results,))):
        shutil.rmtree(folder, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    kept = {file.stem for file in results.glob("*.json") if '"failed": ' not in file.read_text()}
    if missing := [name for name in names if name not in kept]:
        print(f"{checkout} at {commit[:12]}: {' '.join(missing)}", flush=True)
        work.mkdir()
        variables = {"PYTHONPATH": str(checkout), "ORACLE_CHECKOUT": str(checkout), "DUNES_HOME": f"{work}/home"}
        command = [sys.executable, FILES[0], str(results), " ".join(missing), json.dumps(options)]
        subprocess.run(command, env=os.environ | TABLE["environment"] | variables, cwd=work, check=True)
    return {name: json.loads((results / f"{name}.json").read_text()) for name in names}


def main(
    old: Annotated[Path, tyro.conf.Positional],
    new: Annotated[Path, tyro.conf.Positional],
    out: Path = Path("runs/oracle"),
    scenarios: tuple[str, ...] = tuple(TABLE["scenarios"]),
    kills: int = 1000,
    templates: Path | None = None,
    expected: tuple[str, ...] = (),
) -> int:
    """Compare two checkouts; the status is 1 if anything differs or a scenario fails.

    Args:
        out: Folder for the records of OLD, `differences.json`, and the work.
        kills: Number of saves that are killed.
        templates: Folder of .jinja files, or the source archive of llama-cpp-python.
        expected: Globs of differences that the commit names, like 'help/*'.
    """
    options = {
        "folder": str(out.absolute() / "work"),
        "kills": kills,
        "templates": templates and str(templates.absolute()),
    }
    before, after = (
        records(side.absolute(), out.absolute(), scenarios, options, side is old) for side in (old, new)
    )
    rows, status = {}, 0
    for name in scenarios:
        sides = before[name], after[name]
        found = [d for d in differences(*sides, name) if not any(fnmatch(d[0], glob) for glob in expected)]
        failures = [r["failed"] for s in sides for r in (s, *s.values()) if isinstance(r, dict) and "failed" in r]
        verdict = "equal" if not found else f"{len(found)} differences"
        print(f"{name:12} {verdict}" + "".join(f"\n    FAILED {failure}" for failure in failures))
        for place, *values in found[:1]:
            print(f"    {place}\n    old {json.dumps(values[0])[:300]}\n    new {json.dumps(values[1])[:300]}")
        rows[name], status = found, status or int(bool(found or failures))
    (out / "differences.json").write_text(json.dumps(rows, indent=1))
    print(json.dumps({"benchmark": "oracle", **{name: len(found) for name, found in rows.items()}}))
    return status


if __name__ == "__main__":
    sys.exit(tyro.cli(main))

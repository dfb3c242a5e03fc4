"""A training run as one self-contained HTML page."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dunes.bench import plot
from dunes.checkpoint.forms.card import read_card
from dunes.measure import fingerprint
from dunes.runs import timings
from dunes.runs.config import RunConfig
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.picture import is_drawable
from dunes.runs.run import METRICS, read_config, read_metrics
from dunes.runs.tensorboard import SAMPLES, read_samples
from dunes.runs.train_config import TrainConfig
from dunes.text import json_file
from dunes.units import format_count, format_seconds, plural

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$name</title>
<style>
  body { font-family: sans-serif; max-width: 70rem; margin: auto } img { width: 49% } pre { overflow: auto }
</style>
</head><body><h1>$name</h1><p>$about</p>
$sections
</body></html>
""")


def page(run: Path) -> str:
    """The page of the run in this folder. Raises ValueError if there is no run, or no finite loss yet."""
    config, lines = _config(run), read_metrics(run / METRICS)
    if config is None:
        raise ValueError(f"{run}: not a training run; create one with: dunes train SOURCE --out {run}")
    points = plot.run_points(lines)
    if not any(is_drawable(point["loss"]) for point in points):
        raise ValueError(f"{run}: no step with a finite loss yet")
    card = read_card(run)
    sections = {
        "Results": _table(_results(points, card)),
        "Training": _images(run, lines, points),
        "Timings": _text("\n".join(timings.lines(_numbers(card, "timings")))),
        "Samples": _samples(run),
        "Config": _table(_facts(config)),
        "Machine that drew this page": _table(fingerprint()),
    }
    return PAGE.substitute(
        name=escape(run.resolve().name),
        about=escape(config.about),
        sections="".join(f"<h2>{title}</h2>\n{body}\n" for title, body in sections.items()),
    )


def _config(run: Path) -> RunConfig | None:
    """The config of a training or finetuning run, if any. Raises ValueError for a damaged one."""
    path = run / "state" / "plan.json"
    kind = FinetuneConfig if path.is_file() and "model" in json_file.read(path) else TrainConfig
    return read_config(run, kind, f"its losses are in {run / METRICS}")


def _results(points: Sequence[Mapping[str, Any]], card: Mapping[str, Any]) -> dict[str, str]:
    last, measured = points[-1], _numbers(card, "measured")
    best = min((p["bits_per_byte"] for p in points if p["bits_per_byte"] is not None), default=None)
    bits = measured.get("bits_per_byte", best)
    perplexity = {"perplexity": f"{measured['perplexity']:.1f}"} if "perplexity" in measured else {}
    seconds = 60 * last["minutes"]
    return {
        "validation bits/byte": f"{bits:.3f}" if bits else "not measured",
        **perplexity,
        "steps": str(last["steps"]),
        "training tokens": format_count(last["tokens"]),
        "training tokens/s": format_count(last["tokens"] / seconds),
        "training time": format_seconds(seconds),
    }


def _numbers(card: Mapping[str, Any], name: str) -> dict[str, float]:
    """The numeric entries of a part of the card."""
    part = card.get(name)
    return {k: v for k, v in part.items() if type(v) in (int, float)} if isinstance(part, dict) else {}


def _images(run: Path, lines: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> str:
    title = "training loss (validation: dashed), nats/token"
    pictures = [("training loss", plot.loss_over_tokens(points, title))]
    if any(p["bits_per_byte"] is not None for p in points):
        pictures.insert(0, ("validation loss", plot.losses({run.resolve().name: lines})))
    pictures.append(("speed", plot.over_tokens(points, "speed", "tokens/s")))
    pictures.append(
        ("learning rate", plot.over_tokens(points, "lr_scale", "learning rate, share of its peak", keep=0.0))
    )
    for name in sorted({name for point in points for name in point if name.startswith("metrics/")}):
        pictures.append((escape(name), plot.over_tokens([p for p in points if name in p], name, name)))
    images = ((name, base64.b64encode(plot.to_svg(picture)).decode()) for name, picture in pictures)
    return "\n".join(f'<img alt="{name}" src="data:image/svg+xml;base64,{image}">' for name, image in images)


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _samples(run: Path) -> str:
    samples = read_samples(run / SAMPLES).items()
    return "\n".join(f"<h3>After {plural(step, 'step')}</h3>{_text(text)}" for step, text in samples)


def _facts(config: RunConfig) -> dict[str, Any]:
    known = {k: v for k, v in vars(config).items() if v not in (None, "", ()) and k != "matmul"}
    return {k: ", ".join(v) if isinstance(v, tuple) else v for k, v in known.items()}


def _table(facts: Mapping[str, Any]) -> str:
    lines = (f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{''.join(lines)}</table>"

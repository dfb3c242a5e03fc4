"""A training run as one self-contained HTML page."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from dunes.bench import plot
from dunes.checkpoint.card import read_card
from dunes.measure import fingerprint
from dunes.runs.config import RunConfig
from dunes.runs.finetune_config import FinetuneConfig
from dunes.runs.picture import is_drawable
from dunes.runs.run import METRICS, read_config, read_metrics
from dunes.runs.tensorboard import SAMPLES, read_samples
from dunes.runs.train_config import TrainConfig
from dunes.text import json_file
from dunes.units import format_count, format_seconds, plural

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$name</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
         max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
  h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
  .about { color: #666; margin-top: .2rem; }
  .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr));
           gap: .8rem; margin: 1.5rem 0; }
  .card { border: 1px solid #ddd; border-radius: .5rem; padding: .6rem .9rem; }
  .card b { display: block; font-size: 1.5rem; } .card span { color: #666; font-size: .85rem; }
  .pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem; }
  img { width: 100%; } table { border-collapse: collapse; }
  td { padding: .15rem 1.5rem .15rem 0; vertical-align: top; } td.figure { text-align: right; }
  td .bar { display: inline-block; height: .7rem; background: #0072B2; }
  pre { background: #f6f6f6; padding: .8rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem; }
  summary { cursor: pointer; margin: .5rem 0; }
</style></head><body>
<h1>$name</h1><p class="about">$about</p>
<div class="cards">$cards</div>
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
    sections = [
        ("Training", _images(run, lines, points)),
        ("Timings", _timings(_numbers(card, "timings"))),
    ]
    sections += [
        ("Samples", _samples(run)),
        ("Config", _table(_facts(config))),
        ("Machine that drew this page", _table(fingerprint())),
    ]
    return PAGE.substitute(
        name=escape(run.resolve().name),
        about=escape(config.about),
        cards="".join(
            f'<div class="card"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in _cards(points, card)
        ),
        sections="".join(f"<h2>{title}</h2>\n{body}\n" for title, body in sections if body),
    )


def _config(run: Path) -> RunConfig | None:
    """The config of a training or finetuning run, if any. Raises ValueError for a damaged one."""
    path = run / "state" / "plan.json"
    kind = FinetuneConfig if path.is_file() and "model" in json_file.read(path) else TrainConfig
    return read_config(run, kind, f"`dunes bench plot {run}` plots its losses without it")


def _cards(points: Sequence[Mapping[str, Any]], card: Mapping[str, Any]) -> list[tuple[str, str]]:
    last, measured = points[-1], _numbers(card, "measured")
    best = min((p["bits_per_byte"] for p in points if p["bits_per_byte"] is not None), default=None)
    bits = measured.get("bits_per_byte", best)
    results = [("validation bits/byte", f"{bits:.3f}" if bits else "not measured")]
    results += [("perplexity", f"{measured['perplexity']:.1f}")] if "perplexity" in measured else []
    seconds = 60 * last["minutes"]
    return [
        *results,
        ("steps", str(last["steps"])),
        ("training tokens", format_count(last["tokens"])),
        ("training tokens/s", format_count(last["tokens"] / seconds)),
        ("training time", format_seconds(seconds)),
    ]


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
    shown = "\n".join(
        f'<img alt="{name}" src="data:image/svg+xml;base64,{_to_base64(p)}">' for name, p in pictures
    )
    return f'<div class="pictures">{shown}</div>'


def _to_base64(picture: Any) -> str:
    return base64.b64encode(plot.to_svg(picture)).decode()


def _timings(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values()) or 1.0
    lines = [
        f'<tr><td>{escape(what)}</td><td class="figure">{taken:.1f} s</td>'
        f'<td class="figure">{taken / total:.1%}</td>'
        f'<td><span class="bar" style="width:{20 * taken / total:.2f}rem"></span></td></tr>'
        for what, taken in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _samples(run: Path) -> str:
    """The samples in collapsible sections, the last one open."""
    results = read_samples(run / SAMPLES).items()
    shown = [f"<summary>After {plural(step, 'step')}</summary><pre>{escape(text)}</pre>" for step, text in results]
    return "".join(f"<details{' open' if i == len(shown) - 1 else ''}>{s}</details>" for i, s in enumerate(shown))


def _facts(config: RunConfig) -> dict[str, Any]:
    known = {k: v for k, v in vars(config).items() if v not in (None, "", ()) and k != "matmul"}
    return {k: ", ".join(v) if isinstance(v, tuple) else v for k, v in known.items()}


def _table(facts: Mapping[str, Any]) -> str:
    lines = (f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table>{''.join(lines)}</table>"

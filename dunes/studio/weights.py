"""A model's modules and tensors in rows, histograms of its weights, and the attention and experts of a text."""

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dunes import checkpoint, tree
from dunes.checkpoint.card import read_card
from dunes.checkpoint.formats.adapter import attach_adapter, is_reference
from dunes.checkpoint.inspect import describe_adapter, describe_folder, open_to_describe
from dunes.checkpoint.open import base_folder, is_adapter
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, in_memory
from dunes.parts import Attention, MoE
from dunes.runs.task import selects

BINS, TOKENS = 80, 64
"""Bins of a histogram, and tokens of a text whose attention is computed."""
FIGURES: dict[str, Any] = {"mean": np.mean, "std": np.std, "min": np.min, "max": np.max}
Rows = dict[str, dict[str, Any]]
"""Rows by place. The row "" is the model, and the `children` of a row are the rows inside."""


def read_rows(folder: Path) -> tuple[Rows, Weights]:
    """Rows of a model's modules and tensors, or of an adapter with its base, and the tensors by place.

    `trained` is the number of parameters that the model's last run trained; without a run, its last change added.
    No values are read, except those of an adapter, which is attached to tensors without memory. Raises ValueError
    if the model, or the base of an adapter, cannot be opened.
    """
    card, adapted = read_card(folder), is_adapter(folder)
    opened = open_to_describe(base_folder(folder, fetch=False) if adapted else folder)
    model, tensors = opened.outline(), dict(opened.comparison[0])
    run = card.get("finetuned", card.get("trained", {}))
    new = [glob for change in card.get("changes", [])[-1:] for glob in change.get("new", [])]
    if adapted and not is_reference(card):
        model._apply(lambda t: t.new_zeros((), device="cpu").expand(t.shape))  # type: ignore[no-untyped-call]
        new = [*attach_adapter(model, folder, any_base=True).new]
        tensors |= {name: t for name, t in in_memory(model.state_dict()).items() if ".adapters." in name}
    globs = run.get("trainable") or (["all"] if run and run.get("method", "full") == "full" else ["new"])
    globs = [name for glob in globs for name in {"all": ["**"], "new": new}.get(glob, [glob])]
    trained = {name.replace(".base.", ".") for name, _ in model.named_parameters() if selects(globs, name)}
    weights = {name.replace(".base.", "."): tensor for name, tensor in tensors.items()}
    rows: Rows = {m.name: {**vars(m), "selectable": False} for m in tree.layers(model)}
    rows |= {name: {"type": f"{[*w.shape]} {w.dtype}", "parameters": prod(w.shape)} for name, w in weights.items()}
    rows = {name: row | {"id": name, "bytes": 0, "trained": 0, "children": []} for name, row in rows.items()}
    for name in [*rows][1:]:
        *above, row = (rows[p] for p in ("", *accumulate(name.split("."), "{}.{}".format)) if p in rows)
        above[-1]["children"].append(row)
        for each in (*above, row) if name in weights else ():
            each["bytes"] += weights[name].nbytes
            each["trained"] += row["parameters"] * (name in trained)
    return rows, weights


def describe(folder: Path) -> list[str]:
    """Lines on a model or an adapter, whose files are verified: contents, origin, changes, and measured cost."""
    lines = describe_adapter(folder)[0] if is_adapter(folder) else describe_folder(open_to_describe(folder))
    card = read_card(folder)
    run = card.get("finetuned", card.get("trained", {}))
    facts = {"origin": {key: run.get(key) for key in ("method", "model", "base", "data", "sources")}}
    for number, change in enumerate([*card.get("history", []), *card.get("changes", [])], 1):
        facts[f"change {number}"] = {"name": change["name"], "places": len(change["places"]), **change["request"]}
    facts |= {key: card.get(key, {}) for key in ("converted", "measured", "augmented", "comparison")}
    lines = [line for line in lines if not line.startswith("change ")]
    return [*lines, *(f"{key:12}{text(fact)}" for key, fact in facts.items() if text(fact))]


def text(value: Any) -> str:
    """A value of JSON without brackets; empty entries are left out."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {text(entry)}" for key, entry in value.items() if entry not in (None, "", [], {}))
    return f"{value:.5g}" if isinstance(value, float) else str(value).strip("[]")


def differences(models: Mapping[str, Rows]) -> list[dict[str, str]]:
    """Rows of the modules and tensors that only one of two models has, then of those whose types differ."""
    types = {model: {place: row["type"] for place, row in rows.items()} for model, rows in models.items()}
    a, b = types.values()
    places = sorted((p for p in {**a, **b} if a.get(p) != b.get(p)), key=lambda p: p in a and p in b)
    return [{"place": p} | {model: of.get(p, "") for model, of in types.items()} for p in places]


def histograms(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[list[tuple[float, int]], dict[str, float]]]:
    """For each tensor: the edges of BINS common bins with the number of finite values in each, and figures."""
    values = {name: tensor.read().float().numpy() for name, tensor in tensors.items()}
    finite = {name: v[np.isfinite(v)] for name, v in values.items()}
    edges, shown = np.histogram_bin_edges(np.concatenate([*finite.values()]), BINS), {}
    for name, v in finite.items():
        counts = np.histogram(v, BINS, (edges[0], edges[-1]))[0]
        figures = {key: float(figure(v)) for key, figure in FIGURES.items() if v.size}
        figures |= {"zeros": int((v == 0).sum()), "not finite": values[name].size - v.size}
        shown[name] = [*zip(edges.tolist(), [*counts.tolist(), 0], strict=True)], figures
    return shown


@torch.no_grad()
def attention(folder: Path, text: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """A text's first tokens; for each attention its weights (H, T, T), and for each mixture its tokens per expert.

    The model is loaded for this. Raises ValueError, before it is loaded, if there is too little memory.
    """
    loaded = checkpoint.load_with_tokenizer(folder)
    tokenizer, maps, loads = loaded.require_tokenizer(), dict[str, Any](), dict[str, Any]()
    ids = tokenizer.prompt(text)[: min(TOKENS, loaded.context_length)]
    for name, module in loaded.model.named_modules():
        if isinstance(module, Attention):
            vars(module)["attend"] = partial(_attend, maps, name, module.attend)
        elif isinstance(module, MoE):
            module.router.register_forward_hook(partial(_count, loads, name, module))
    loaded.model(torch.tensor([ids]))
    return [tokenizer.decode([i]) or str(i) for i in ids], maps, loads


def _attend(maps: dict[str, Any], name: str, attend: Any, q: Tensor, k: Tensor, v: Tensor, ctx: Any) -> Any:
    """Attend, and record the weights, which are the output if the values are the identity."""
    identity = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    maps[name] = attend(q.float(), k.float(), identity, ctx)[0].tolist()
    return attend(q, k, v, ctx)


def _count(loads: dict[str, Any], name: str, mixture: MoE, *call: Any) -> None:
    """Record the number of tokens of each expert by the router's output, the last element of `call`."""
    loads[name] = mixture.route(call[-1])[0].flatten().bincount(minlength=len(mixture.experts)).tolist()

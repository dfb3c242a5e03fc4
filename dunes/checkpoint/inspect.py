"""Describe the folders of models and adapters, and check that they can be loaded."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.checkpoint.base_digests import BaseRecord, is_unchanged
from dunes.checkpoint.card import ADAPTER, read_card, verified_card
from dunes.checkpoint.formats.adapter import WEIGHTS, PeftConfig, is_reference
from dunes.checkpoint.open import (
    OpenedModel,
    check_memory,
    check_vocabulary,
    load,
    load_decoder,
    open_base,
    open_model,
    prepare_base,
    readable_folder,
)
from dunes.checkpoint.weights.files import tensors
from dunes.checkpoint.weights.lazy_tensor import Weights
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files.model_file import cards_trusted, find_file
from dunes.parts import Attention
from dunes.parts.decoder import recurrent_part
from dunes.text import Tokenizer, chat_template
from dunes.units import format_bytes, format_count, plural

BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "4 bits": 4}
SHOWN = 40


@dataclass(frozen=True)
class Verdict:
    """The tokenizer, if it can be read, and the reasons why `load` would refuse the folder.

    `built` is False if the function that builds the model failed or was not imported, so no structure was
    compared.
    """

    tokenizer: Tokenizer | None
    reasons: tuple[str, ...]
    built: bool = True


def open_to_describe(folder: Path) -> OpenedModel:
    """Open a folder; a function that raises ValueError replaces a build function that may not be imported."""
    try:
        return open_model(folder)
    except ValueError as error:
        family, reason = read_card(folder).get("family"), str(error)
        name = next((family[key] for key in ("function", "class") if key in family), None) if family else None
        if not isinstance(name, str) or cards_trusted():
            raise

    def refuse(**arguments: Any) -> nn.Module:
        raise ValueError(reason)

    opened = open_model(folder, build=refuse)
    return replace(opened, architecture=replace(opened.architecture, family=name))


def judge(opened: OpenedModel) -> Verdict:
    """The verdict on a folder, whose files of any size are compared with the digests in its card."""
    tokenizer, reasons, built = None, [], True
    try:
        _ = opened.expected  # raises if the model cannot be built
        kinds = Counter("of another shape" if d.kind == "shape" else d.kind for d in opened.comparison[1])
        reasons += [", ".join(f"{n} {kind}" for kind, n in kinds.items())] if kinds else []
    except ValueError as error:
        if not opened.architecture.function:
            raise
        built = False
        reasons.append(str(error))
    try:
        tokenizer = Tokenizer.load_if_present(opened.folder)
    except (ValueError, OSError) as error:
        reasons.append(str(error))
    checks: list[Callable[[], object]] = [
        partial(verified_card, opened.folder, math.inf),
        partial(check_memory, opened),
        partial(check_vocabulary, opened, tokenizer),
    ]
    network = opened.architecture.function is not None and opened.card.get("context_length") is None
    if built and not network:
        checks.append(lambda: opened.context_length)
    for check in checks:
        try:
            check()
        except ValueError as error:
            reasons.append(str(error))
    return Verdict(tokenizer, tuple(reasons), built)


def describe_folder(opened: OpenedModel, verdict: Verdict | None = None) -> Iterator[str]:
    """Lines that describe a folder, with family, config, sizes, differences and the verdict."""
    verdict = verdict or judge(opened)
    files, config = opened.files, opened.config
    size = f"{plural(len(files), 'tensor')}, {format_bytes(sum(w.nbytes for w in files.values()))}"
    yield f"family      {opened.family}, {opened.format} format: {size}"
    values = config if isinstance(config, dict) else {f.name: getattr(config, f.name) for f in fields(config)}
    yield f"config      {', '.join(f'{key} {_format(value)}' for key, value in values.items()) or 'none'}"
    for change in opened.architecture.changes:
        settings = ", ".join(f"{k} {quote(v)}" for k, v in change.request.items() if k != "where")
        yield f"change      {change.name} at {plural(len(change.places), 'place')}: {settings}"
    if verdict.built:
        yield from _parameters(opened)
    else:
        total = sum(prod(tensor.shape) for tensor in files.values())
        yield f"parameters  {total:,} ({format_count(total)}) and buffers, in its files"
    dtypes = Counter[str]()
    for w in files.values():
        dtypes[str(w.dtype).removeprefix("torch.")] += w.nbytes
    yield f"dtypes      {', '.join(f'{dtype} {format_bytes(n)}' for dtype, n in dtypes.most_common())}"
    missing = "none that can be read" if Tokenizer.find_file(opened.folder) else "none"
    yield f"tokenizer   {f'{verdict.tokenizer.vocab:,} ids' if verdict.tokenizer else missing}"
    for note in opened.assumed if verdict.built else opened.notes:
        yield f"assumed     {note}"
    differences = opened.comparison[1] if verdict.built else []
    for difference in differences[:SHOWN]:
        yield f"difference  {difference}"
    if len(differences) > SHOWN:
        yield f"            and {len(differences) - SHOWN} more"
    yield f"loads       {'no: ' + '; '.join(verdict.reasons) if verdict.reasons else 'yes'}"


def _parameters(opened: OpenedModel) -> Iterator[str]:
    model = opened.architecture.outline()
    total = tree.count(model)
    if opened.architecture.function:
        yield f"parameters  {total:,} ({format_count(total)}) in {plural(len([*tree.places(model)]), 'module')}"
        return
    ends = tree.count(model.get_submodule("embed")) + (tree.count(h) if (h := getattr(model, "head", None)) else 0)
    parts = f"{format_count(total - ends)} in blocks, {format_count(ends)} in embedding and head"
    yield f"parameters  {total:,} ({format_count(total)}): {parts}"
    if not opened.is_own:
        sizes = ", ".join(f"{name} {format_bytes(total * bits // 8)}" for name, bits in BITS.items())
        yield f"memory      {sizes}"
    if widths := [m.cache_width for m in model.modules() if isinstance(m, Attention)]:
        yield f"KV cache    {format_bytes(2 * sum(widths) * 1000)} for each 1,000 tokens in bfloat16"
    if name := recurrent_part(model):
        yield f"states      of {name} and similar parts, whose size does not depend on the number of tokens"


def _format(value: Any) -> str:
    if is_dataclass(value):  # a rotary scaling's name, and fields that differ from their defaults
        changed = [f"{f.name} {_format(x)}" for f in fields(value) if (x := getattr(value, f.name)) != f.default]
        return " ".join([type(value).__name__.lower(), *changed])
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


CHUNK = 1 << 20
"""Number of elements that are checked at a time."""


def odd_values(weights: Weights) -> Iterator[str]:
    """A line for each tensor that has non-finite or denormal elements, or rows of zeros."""
    for name, lazy in weights.items():
        counts = _count_odd(lazy.read())
        lazy.release()
        if listed := ", ".join(f"{kind} {n:,}" for kind, n in counts.items() if n):
            yield f"{name}: {listed}"


def _count_odd(tensor: Tensor) -> Counter[str]:
    counts = Counter[str]()
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or not tensor.numel():
        return counts
    matrix = tensor.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
    for rows in torch.split(matrix, max(1, CHUNK // matrix.shape[1])):
        size = rows.abs()
        counts["not finite"] += int((~size.isfinite()).sum())
        counts["denormal"] += int(((size > 0) & (size < torch.finfo(size.dtype).smallest_normal)).sum())
        counts["rows of zeros"] += int((size == 0).all(1).sum()) if tensor.dim() > 1 else 0
    return counts


def describe_adapter(folder: Path, values: bool = False) -> tuple[list[str], str | None]:
    """Lines that describe an adapter's folder, and the reason why `load` would refuse it, or None.

    The base's files are compared with the digests in the base's card. With `values`, the adapter is loaded, and
    the base's weights are compared with the digests in the adapter's card. Raises ValueError if the folder has no
    adapter.
    """
    folder = readable_folder(folder)
    card = verified_card(folder)
    lines = list(_adapter_lines(folder, PeftConfig.read(folder / ADAPTER), card))
    try:
        opened, _, _ = open_base(folder, card, math.inf)
        lines.append(f"base        {opened.folder}: {opened.family}, {plural(len(opened.weights()), 'tensor')}")
        check = "done when the adapter is loaded, or with --values"
        if is_unchanged(opened.folder, card):
            check = "its files have the recorded sizes and times"
        if values:
            load(folder)  # hashes files only if their sizes or times differ from the record
            prepare_base(load_decoder(opened), [folder])
            check = "its weights match the adapter's digests"
        if BaseRecord.read(card, folder) is None:
            check = "not possible: the adapter's card has no digests of the base"
        lines.append(f"base check  {check}")
        reason = None
    except ValueError as error:
        reason = str(error)
    return [*lines, f"loads       {'yes' if reason is None else f'no: {reason}'}"], reason


def _adapter_lines(folder: Path, peft: PeftConfig, card: Mapping[str, Any]) -> Iterator[str]:
    stored = [w for name in WEIGHTS if (path := find_file(folder, name)) for w in tensors(path).items()]
    size = f"{plural(len(stored), 'tensor')}, {format_bytes(sum(w.nbytes for _, w in stored))}"
    if is_reference(card):
        yield "adapter     none; the base is used unchanged"
        return
    method = peft.variant.__name__.replace("Adapter", "rsLoRA" if peft.options.rslora else "LoRA")
    yield f"adapter     {method}, rank {peft.options.rank}, alpha {peft.options.alpha:g}: {size}"
    modules = [k.split(".lora_")[0] for k, _ in stored if ".lora_A" in k or ".lora_embedding_A" in k]
    module_ends = Counter(module.rpartition(".")[2] for module in modules)
    counts = [f"{end} {plural(n, 'time')}" for end, n in module_ends.items()]
    yield f"modules     {', '.join(counts)}"
    for note in card.get("changes", []):
        if isinstance(note, dict) and isinstance(request := note.get("request"), dict) and "kind" in request:
            yield f"base dtype  {quote(request['kind'])}"
    yield f"template    {_template_name(folder, card)}"
    yield f"tokenizer   {'its own' if Tokenizer.find_file(folder) else 'from the base'}"


def _template_name(folder: Path, card: Mapping[str, Any]) -> str:
    if isinstance(name := card.get("template"), str):
        return name
    return "in its files" if chat_template.read_template(folder) is not None else "none here"

"""Save and load adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment import Change, lora
from dunes.augment.adapted import Adapter, EmbeddingAdapter, dense, is_embedding, sides
from dunes.augment.options import VARIANTS, Lora
from dunes.augment.quantized import Quantized
from dunes.checkpoint.architecture import hf_config_of
from dunes.checkpoint.base_digests import ANY_BASE_HINT, BaseWeights, base_identity, check_base, read_base_record
from dunes.checkpoint.card import (
    ADAPTER,
    CONFIG,
    finish_save,
    listed_files,
    read_card,
    read_consistently,
    verified_card,
    write_card,
    write_files,
)
from dunes.checkpoint.formats.adapter_layout import Factors, Target, join_factors, peft_targets, split_factors
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.files import tensors
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, in_memory
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.checkpoint.write import write_tokenizer
from dunes.context import prefix_errors
from dunes.files import json_file
from dunes.files.model_file import find_file
from dunes.models import FAMILIES, weight_names
from dunes.models.names import for_heads
from dunes.text import Tokenizer
from dunes.units import plural

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."
PARAMETERS = {name: spec for cls in lora.VARIANTS.values() for name, spec in cls.PARAMETERS.items()}
"""Tensors of all LoRA variants by name: the dimensions, such as (R, I), and the name in PEFT's files."""
SETTINGS = {cls.PEFT_SETTING: name for name, cls in lora.VARIANTS.items() if cls.PEFT_SETTING}
"""Maps settings of PEFT's adapter_config.json, such as `use_dora`, to LoRA variants."""


@dataclass(frozen=True)
class AdapterBase:
    """The base of a model's adapters: linear layers and embeddings by name, and PEFT's targets by weight name.

    `settings` is the base's config.json; in it, quantized layers count as dense layers.
    """

    family: str
    modules: Mapping[str, nn.Module]
    targets: Mapping[str, Target]
    settings: Mapping[str, Any]


def adapter_base_of(model: nn.Module, family: str | None = None) -> AdapterBase:
    """The base of a model's adapters. `family` names the family whose tensor names are used (default: the family
    that the modules match).

    Raises ValueError if no Hugging Face config describes the base.
    """
    plain = lora.base_model(model)
    modules = {p.name: p.module for p in tree.places(plain) if tree.linear(p.module) or is_embedding(p.module)}
    for p in list(tree.places(plain)):
        setattr(p.parent, p.key, _dense_module(tree.innermost(p.module)))
    config = hf_config_of(plain, 2048, loads=False)  # names of weights do not depend on the context length
    if isinstance(config, str):
        raise ValueError(
            f"the base of these adapters has no Hugging Face config: {config}; save the whole model, "
            "as dunes finetune --method full and lora-experts do"
        )
    settings = json.loads(json.dumps(FAMILIES[config.family].to_hf(config.config)))  # types of JSON
    family = family or config.family
    names = for_heads(weight_names(family), config.config.heads)
    return AdapterBase(family, modules, peft_targets(names, modules), settings)


def _dense_module(module: nn.Module) -> nn.Module:
    """The module itself, or for a quantized layer a linear layer of the same shape on the meta device."""
    if not isinstance(module, Quantized):
        return module
    with torch.device("meta"):
        return nn.Linear(module.in_features, module.out_features, module.bias is not None)


def save_adapter(
    model: nn.Module,
    folder: Path | str,
    name: str | None = lora.NAME,
    base: Path | str | None = None,
    *,
    identity: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    context_length: int | None = None,
    facts: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> None:
    """Write a model's adapter to a folder; `base` is the folder or Hub name of the adapter's base model.

    `identity` is the model's `base_identity` before its weights were rounded; for quantized weights, it is `before
    | after`, the union of the `base_identity` before and after quantization. Tokenizer and context length are
    saved for use with the adapter. `family` is the family of the base's files, if the modules match another family
    (a "phi3" model has LLaMA's modules). `facts` go into the card; their "changes" are records of earlier changes
    to the base, which loading repeats. PiSSA is written as plain LoRA of twice the rank, for the original base. If
    `name` is None, only a reference to the base is written, and loading the folder loads the base. The save is
    atomic, as in `save`. Raises ValueError, naming the module, for an adapter that PEFT's format cannot express,
    and for a folder with a model that dunes did not save, which would hide the adapter.
    """
    folder, adapter_base = Path(folder), adapter_base_of(model, family)
    factors, adapters = list[tuple[Target, Factors]](), list[Adapter]()
    if name is not None:
        factors = peft_factors(model, name, family)
        adapters = [outer[name] for outer in lora.adapted_modules(model, name).values()]
    read_consistently(folder, _refuse_foreign_model)
    config = _peft_config(factors, adapter_base, adapters)
    config["base_model_name_or_path"], recorded_base = _locate_base(base, folder)
    dropouts = [] if config["target_parameters"] else [a.config.dropout for a in adapters]  # PEFT: not on experts
    config["lora_dropout"] = max(dropouts, default=0.0)
    weights = in_memory({PREFIX + k: w for k, w in _peft_keys(factors, adapter_base)})
    card = {
        "adapter": name,
        "family": adapter_base.family,
        "base": {**(identity or base_identity(model)), **recorded_base, "config": adapter_base.settings},
        "changes": [],
        **({} if context_length is None else {"context_length": context_length}),
        **(facts or {}),
    }

    def fill(staged: Path) -> None:
        if name is not None:
            safetensors_file.write_file(staged / WEIGHTS[0], weights)
        (staged / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
        write_tokenizer(staged, tokenizer, context_length)
        write_card(staged, card)

    write_files(folder, fill, sum(w.nbytes for w in weights.values()))


def _refuse_foreign_model(folder: Path) -> None:
    readable = finish_save(folder)
    if (readable / CONFIG).is_file() and CONFIG not in listed_files(readable, read_card(readable)):
        raise ValueError(f"{folder}: contains a model that was not saved by dunes; save the adapter elsewhere")


def peft_factors(
    model: nn.Module, name: str = lora.NAME, family: str | None = None
) -> list[tuple[Target, Factors]]:
    """An adapter's targets and factors in PEFT's layout; `family` as in `save_adapter`.

    Call this function before training, since it raises ValueError for an adapter that `save_adapter` cannot write.
    """
    base = adapter_base_of(model, family)
    modules = lora.adapted_modules(model, name)
    if any(outer[name].depends_on_input for outer in modules.values()):
        raise ValueError(
            f"{name!r} is a mixture of LoRA experts, which PEFT has no layout for; save the whole model"
        )
    factors = {module: _factors(outer[name]) for module, outer in modules.items()}
    return [(target, join_factors(target, factors, base.modules)) for target in _peft_targets(base, factors)]


def _locate_base(base: Path | str | None, folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The base's absolute path or Hub name, and a card entry with the path relative to the adapter's folder.

    The relative path stays valid if both folders are moved together.
    """
    if base is None or not Path(base).exists():
        return None if base is None else str(base), {}
    absolute = Path(base).resolve()
    return str(absolute), {"folder": os.path.relpath(absolute, folder.resolve())}


def _factors(adapter: Adapter) -> Factors:
    a, b = (t.detach() for t in adapter.factors())
    others = {name: getattr(adapter, name).detach() for name in adapter.PARAMETERS.keys() - {"A", "B"}}
    return Factors(a, b, adapter.config.scale, others)


def _peft_targets(base: AdapterBase, modules: Iterable[str]) -> list[Target]:
    """The targets that contain these modules; experts are stacked, as in recent PEFT versions."""
    target_of: dict[str, Target] = {}
    for target in base.targets.values():
        for module in target.modules:
            if module not in target_of or target.stacked:
                target_of[module] = target
    for module in modules:
        if module.endswith(".router"):
            raise ValueError(f"{module}: PEFT versions disagree on the name of a router's adapter; detach it")
    return list({target_of[module].weight: target_of[module] for module in modules}.values())


def _peft_keys(factors: list[tuple[Target, Factors]], base: AdapterBase) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors to write into the adapter's file."""
    # PEFT nests the wrappers of a module's parameters; the last parameter's wrapper is outermost.
    stacked = {target for target, _ in factors if target.stacked}
    outermost = {t.parent: t for t in base.targets.values() if t in stacked}
    for target, f in factors:
        path = target.path
        if target.stacked:
            path = target.parent + ("" if target == outermost[target.parent] else ".base_layer")
        embedding = is_embedding(base.modules[target.modules[0]])
        names = PARAMETERS | (EmbeddingAdapter.PARAMETERS if embedding else {})
        yield from ((f"{path}.{names[part][1]}", t) for part, t in {"A": f.A, "B": f.B, **f.others}.items())


MISREAD = {"gate_proj", "up_proj", "down_proj"}


def _peft_config(
    factors: Sequence[tuple[Target, Factors]], base: AdapterBase, adapters: Sequence[Adapter]
) -> dict[str, Any]:
    """The content of adapter_config.json.

    `target_modules` lists "q_proj" instead of complete names if every module called `q_proj` is adapted. `r` and
    `lora_alpha` are the most common values; modules with other values are listed in `rank_pattern` and
    `alpha_pattern`.
    """
    rslora = any(a.config.rslora for a in adapters)
    paths = {t.path for t, _ in factors if not t.stacked}
    adaptable = _peft_targets(base, [module for module in base.modules if not module.endswith(".router")])
    left_out = {_leaf(t.path) for t in adaptable if not t.stacked and t.path not in paths}
    if (misread := MISREAD & {*map(_leaf, paths)}) and any(t.stacked for t in adaptable):
        warnings.warn(
            f"PEFT with transformers 5 treats every {', '.join(sorted(misread))} of this mixture as an expert's, "
            "and loads no adapter of another MLP; for PEFT, leave out dense and shared MLPs, or merge the adapter",
            stacklevel=2,
        )
    if any(path.endswith(".mixer.out_proj") for path in paths):
        warnings.warn("PEFT refuses a Mamba-2's out_proj; for PEFT, leave out blocks.*.attn.out", stacklevel=2)
    ranks = {t.path: f.rank // len(t.rows) for t, f in factors}
    # Rounding restores the alpha that the scale was computed from.
    alphas = {t.path: round(f.scale * _divisor(ranks[t.path], rslora), 10) for t, f in factors}
    pairs = [(ranks[path], alphas[path]) for path in ranks] or [(1, 1.0)]  # a reference has no factors
    usual = Counter(pairs).most_common(1)[0][0]
    others = [path for path in ranks if (ranks[path], alphas[path]) != usual]
    # With stacked experts, PEFT takes modules (but not parameters) with these names for parts of the experts.
    of_experts = any(t.path.endswith("experts.gate_up_proj") for t in base.targets.values())
    shared = {p for p in paths if of_experts and _leaf(p) in ("gate_proj", "up_proj", "down_proj")}
    if shared and any(f.others for _, f in factors):
        raise ValueError(
            f"{min(shared)}: PEFT treats it as an expert's, which supports only plain LoRA; use plain LoRA"
        )
    names = {path: f"{path}.weight" if path in shared else path for path in others}
    # Older versions of PEFT match a pattern only after a dot.
    patterns = {path: re.escape(name.partition(".")[2] or name) for path, name in names.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted({p if _leaf(p) in left_out else _leaf(p) for p in paths - shared}),
        "target_parameters": sorted([*(t.path for t, _ in factors if t.stacked), *(f"{p}.weight" for p in shared)])
        or None,
        "fan_in_fan_out": any(t.transposed and not t.stacked for t, _ in factors),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "r": usual[0],
        "lora_alpha": usual[1],
        "rank_pattern": {pattern: ranks[path] for path, pattern in patterns.items()},
        "alpha_pattern": {pattern: alphas[path] for path, pattern in patterns.items()},
        "use_rslora": rslora,
        **{key: any(isinstance(a, lora.VARIANTS[v]) for a in adapters) for key, v in SETTINGS.items()},
    }


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _divisor(rank: int, rslora: bool) -> float:
    """The quotient `alpha / scale` of an adapter of this rank."""
    return rank**0.5 if rslora else rank


def load_adapter(model: nn.Module, folder: Path | str, name: str = lora.NAME, any_base: bool = False) -> Change:
    """Load an adapter from a folder, activate it under this name, and return the record of this change to the
    model.

    Raises ValueError, before the model is changed, for a damaged file, an unsupported method, an unexpected
    tensor, and a shape or rank that does not fit. Also raises ValueError if the adapter's base is another model or
    cannot be compared; `any_base` skips this check. Warns if the adapter has no digests of its base, for example
    because PEFT wrote it.
    """
    folder = finish_save(Path(folder))
    if not any_base and (record := read_base_record(verified_card(folder), folder)) is not None:
        check_base(BaseWeights(model), record, folder)
    return attach_adapter(model, folder, name, any_base)


def attach_adapter(model: nn.Module, folder: Path, name: str = lora.NAME, any_base: bool = False) -> Change:
    """Load an adapter, like `load_adapter`, for a base whose weights the caller has verified."""
    card = verified_card(folder)
    peft = PeftConfig.read(folder / ADAPTER)
    base = adapter_base_of(model)
    factors = _read_factors(folder, peft, base)
    change = peft.change(factors, name)
    if not any_base:
        check_settings(base, card, folder)
    lora.shape(model, change)
    _copy_factors(model, factors, name)
    return change


def is_reference(card: Mapping[str, Any]) -> bool:
    """True if a card names a base, but the folder has no adapter; `save_adapter` with `name=None` writes such a
    folder.
    """
    return "base" in card and card.get("adapter", "") is None  # a card of our own form has adapter: null, too


@dataclass(frozen=True)
class PeftConfig:
    """Settings from the adapter_config.json at `path`; `ranks` and `alphas` map patterns of targets to values."""

    path: Path
    options: Lora
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    modules: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> "PeftConfig":
        """The settings in a file. Raises ValueError for methods other than LoRA and for unsupported settings."""
        config = json_file.read(path)
        with prefix_errors(path, (AttributeError, TypeError, ValueError, re.error)):
            _refuse_unsupported(config)
            variants = [name for setting, name in SETTINGS.items() if config.get(setting)]
            options = Lora(
                rank=_positive_number("r", config.get("r", 8), int),
                alpha=_positive_number("lora_alpha", config.get("lora_alpha", 8), float),
                rslora=bool(config.get("use_rslora")),
                dropout=float(config.get("lora_dropout") or 0.0),
                **{key: value for name in variants for key, value in VARIANTS[name].items()},
            )
            ranks = _read_patterns("rank_pattern", config, int)
            alphas = _read_patterns("alpha_pattern", config, float)
        return cls(path, options, ranks, alphas, _target_modules(config))

    @property
    def variant(self) -> type[Adapter]:
        return lora.adapter_class(self.options.request())

    def of(self, target: Target) -> tuple[int, float]:
        """Rank and scale of a target."""
        rank = next((r for key, r in self.ranks.items() if _matches(key, target.path)), self.options.rank)
        alpha = next((a for key, a in self.alphas.items() if _matches(key, target.path)), self.options.alpha)
        return rank, alpha / _divisor(rank, self.options.rslora)

    def change(self, factors: Mapping[str, Factors], name: str) -> Change:
        """The change that `augment.lora.decide` would return for these modules."""
        alphas = {place: f.scale * _divisor(f.rank, self.options.rslora) for place, f in factors.items()}
        places = {place: {"rank": f.rank, "alpha": alphas[place]} for place, f in factors.items()}
        request = replace(self.options, where=tuple(factors), adapter=name).request()
        return Change("lora", lora.VERSION, request, places, (f"**.adapters.{name}.*",))


KNOWN_SETTINGS = {
    *("peft_type", "init_lora_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "lora_dropout", *SETTINGS),
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "target_modules", "target_parameters", "task_type"),
}
"""Accepted settings: they are read, affect only training, or follow from the tensors' names and shapes."""
PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
"""Values of `init_lora_weights` that do not change the base."""


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the first unsupported setting that affects the adapter's outputs."""
    if (peft_type := config.get("peft_type")) != "LORA":
        raise ValueError(
            f"peft_type is {quote(peft_type)}; only 'LORA' is supported; merge this adapter with PEFT"
        )
    if (init := config.get("init_lora_weights", True)) not in PLAIN_INITS:
        raise ValueError(
            f"init_lora_weights is {quote(init)}, which also changes the base; "
            "convert it to plain LoRA with PEFT (save_pretrained(path_initial_model_for_weight_conversion=...))"
        )
    for key, value in config.items():
        if key not in KNOWN_SETTINGS and value and (key, value) != ("bias", "none"):
            raise ValueError(f"{quote(key)} is {quote(value)}; this is not supported; merge the adapter with PEFT")


def _positive_number(key: str, value: Any, number: type[int] | type[float]) -> Any:
    with suppress(TypeError, ValueError, OverflowError):
        if 0 < number(value) < math.inf and number(value) == value:
            return number(value)
    raise ValueError(f"{key} is {quote(value)}; expected a positive number")


def _read_patterns(key: str, config: Mapping[str, Any], number: type[int] | type[float]) -> dict[str, Any]:
    patterns: Mapping[str, Any] = config.get(key) or {}
    return {
        re.compile(p).pattern: _positive_number(f"{key} of {quote(p)}", n, number) for p, n in patterns.items()
    }


def _target_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The suffixes listed in `target_modules`; empty if `target_modules` is no list, or if other settings exclude
    modules.
    """
    modules = config.get("target_modules")
    narrowed = [config.get(k) for k in ("exclude_modules", "layers_to_transform", "layers_pattern")]
    if not isinstance(modules, list) or any(setting not in (None, []) for setting in narrowed):
        return ()
    return tuple(modules) if all(isinstance(name, str) for name in modules) else ()


def _matches(pattern: str, path: str) -> bool:
    """True if the regular expression matches the name, or the end of the name after a dot, as in PEFT."""
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def check_settings(base: AdapterBase, card: Mapping[str, Any], folder: Path) -> None:
    """Raise ValueError if the card's config.json differs from the base's; PEFT's folders have no card."""
    recorded = (card.get("base") or {"config": base.settings}).get("config")
    before, now = (recorded if isinstance(recorded, dict) else {}), base.settings
    if differing := [key for key in (*before, *now) if before.get(key) != now.get(key)]:
        key = differing[0]
        raise ValueError(
            f"{folder}: made for a base with other settings: {quote(key)} was {quote(before.get(key))}, not "
            f"{quote(now.get(key))}; load the original base, {ANY_BASE_HINT}"
        )


_NAMES = [(key, name) for table in (PARAMETERS, EmbeddingAdapter.PARAMETERS) for name, (_, key) in table.items()]
PARTS = {"base_layer.weight": "base", **dict(_NAMES), **{f"{key}.weight": name for key, name in _NAMES}}
"""The part of an adapter, by the end of its tensor's name in a file; some versions of PEFT append `.weight`."""


def _group_tensors(folder: Path) -> dict[str, dict[str, LazyTensor]]:
    """The adapter file's tensors, by module and part. Raises ValueError for names that no adapter has."""
    path = next(filter(None, (find_file(folder, name) for name in WEIGHTS)), None)
    if path is None:
        raise ValueError(f"{folder}: no weights: neither {' nor '.join(WEIGHTS)}")
    groups: dict[str, dict[str, LazyTensor]] = {}
    for key, stored in tensors(path).items():
        end = next((e for e in PARTS if key.endswith(f".{e}")), "")
        group = groups.setdefault(key.removesuffix(f".{end}"), {})
        if not end or PARTS[end] in group:
            raise ValueError(f"{path}: {quote(key)} does not belong to an adapter")
        group[PARTS[end]] = stored
    return groups


def _read_factors(folder: Path, peft: PeftConfig, base: AdapterBase) -> dict[str, Factors]:
    """Factors of each module, from the adapter's file. Raises ValueError for a tensor that does not fit."""
    factors, adapted = dict[str, Factors](), set[str]()
    expected = peft.variant.PARAMETERS.keys()
    for module, group in _group_tensors(folder).items():
        target = _find_target(folder, module, group, base)
        if "base" in group:
            _check_embedding(folder, module, group.pop("base"), base.modules[target.modules[0]])
            if not group:
                continue
        if group.keys() != expected:
            raise ValueError(
                f"{folder}: {module} has {', '.join(sorted(group))}; by {ADAPTER}, expected "
                f"{', '.join(sorted(expected))}; download the files again"
            )
        adapted.update(target.modules)
        read = _read_target(module, group, target, peft, base)
        for name, part in split_factors(target, read, base.modules).items():
            if name in factors:
                raise ValueError(f"{folder}: {name} is adapted twice, the second time by {module}")
            factors[name] = part
    _check_complete(folder, peft, adapted, base.targets.values())
    return factors


def _check_complete(folder: Path, peft: PeftConfig, adapted: set[str], targets: Collection[Target]) -> None:
    """Raise ValueError if the file has no tensors for modules that the config lists."""
    experts = {m for t in targets if t.stacked for m in t.modules}  # stacked or separate
    named = [t for t in targets if any(f".{t.path}".endswith(f".{end}") for end in peft.modules)]
    missing = [t for t in named if not adapted.issuperset(t.modules) and experts.isdisjoint(t.modules)]
    if missing:
        raise ValueError(
            f"{folder}: {ADAPTER} lists {plural(len(named), 'module')}, and the file has no tensors for "
            f"{len(missing)} of them, such as {missing[0].path}; download the files again"
        )


def _find_target(folder: Path, module: str, group: Weights, base: AdapterBase) -> Target:
    """The target that `module` names in the file. Stacked experts are found by shape, as PEFT's nesting varies."""
    path = module.removeprefix(PREFIX)
    if (plain := base.targets.get(f"{path}.weight")) is not None:
        return plain
    path = re.sub(r"(\.base_layer)+$", "", path)
    for target in base.targets.values():
        if target.stacked and target.parent == path and not _misfits(target, group, base):
            return target
    names = ", ".join(list(base.targets)[:3])
    raise ValueError(
        f"{folder}: {module} with {', '.join(f'{p} {tuple(w.shape)}' for p, w in group.items())} does not exist "
        f"in this {base.family} model, whose weights are {names}, ...; was it made for another model?"
    )


def _misfits(target: Target, group: Weights, base: AdapterBase) -> list[str]:
    """A line for each part with an unexpected shape; the line has the actual and the expected shape."""
    inputs = sides(base.modules[target.modules[0]])[0]
    outputs = sum(sides(base.modules[module])[1] for module in target.rows[0])
    rank = group["A"].shape[0] if "A" in group and group["A"].shape else 0
    size = {"R": rank, "I": inputs, "O": outputs}
    expected = {name: tuple(size[dim] for dim in dims) for name, (dims, _) in PARAMETERS.items()}
    return [
        f"{part} is {w.shape}, expected {expected.get(part)}"
        for part, w in group.items()
        if w.shape != expected.get(part)
    ]


def _read_target(module: str, group: Weights, target: Target, peft: PeftConfig, base: AdapterBase) -> Factors:
    """Factors of a target, in float32. Raises ValueError for a wrong shape or rank, and for non-finite values."""
    rank, scale = peft.of(target)
    if misfits := _misfits(target, group, base):
        raise ValueError(f"{module}: {misfits[0]}; is it for another base?")
    if group["A"].shape[0] != rank * len(target.rows):
        raise ValueError(
            f"{peft.path}: rank {rank} for {target.path}, whose A has {plural(group['A'].shape[0], 'row')} for "
            f"{plural(len(target.rows), 'matrix', 'matrices')}; the config belongs to another file"
        )
    read = {part: stored.read().float() for part, stored in group.items()}
    if infinite := [part for part, tensor in read.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{module}: {infinite[0]} has values that are not finite; training diverged")
    return Factors(read.pop("A"), read.pop("B"), scale, read)


def _check_embedding(folder: Path, module: str, stored: LazyTensor, base: nn.Module) -> None:
    """Raise ValueError if the embedding that PEFT saves beside an adapter differs from the base's embedding."""
    table = dense(base)
    if stored.shape != table.shape or not torch.equal(stored.read().to(table), table):
        raise ValueError(
            f"{folder}: {module} has weights that differ from this base's; merge the adapter with PEFT"
        )


@torch.no_grad()
def _copy_factors(model: nn.Module, factors: Mapping[str, Factors], name: str) -> None:
    wrapped = lora.adapted_modules(model, name)
    for module, f in factors.items():
        for part, tensor in {"A": f.A, "B": f.B, **f.others}.items():
            getattr(wrapped[module][name], part).copy_(tensor)

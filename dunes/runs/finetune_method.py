"""Apply a finetuning config to a model: its changes, trainable weights and learning rate.

LoRA https://arxiv.org/abs/2106.09685, QLoRA https://arxiv.org/abs/2305.14314
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dunes import tree
from dunes.augment import Change, make_change, repeat_structure
from dunes.augment.changes import decide_change
from dunes.augment.options import NAME
from dunes.augment.quantized import Quantized
from dunes.checkpoint import LoadedModel
from dunes.data.examples import Records
from dunes.parts import Decoder
from dunes.runs.augment import resolve_new
from dunes.runs.finetune_config import FinetuneConfig
from dunes.text import Tokenizer, templates

EXPERTS = {"router": "router", "experts": "experts", "experts_per_token": "top_k"}
"""Options of --method lora-experts, and their names in its change."""

TOKENS, STEPS = 4096, 32
"""Tokens per step, and minimum steps per epoch: LoRA learns less well with large batches
(https://thinkingmachines.ai/blog/lora/)."""

MAX_CONTEXT, MIN_CONTEXT = 2048, 128
"""Bounds of the default context length."""

MAX_ADAPTER_LR = 0.005
"""The largest default learning rate of adapters."""

DEFAULT_TEMPLATES = {"alpaca": "alpaca", "completion": "plain", "text": "plain"}
"""The default template of each format; conversations use one whose tokens the tokenizer has."""

PLAIN_KINDS = ("completion", "text")
"""Formats whose rows are complete text: no chat template is applied."""


@dataclass(frozen=True)
class Method:
    """How the base weights are stored, and which adapter is trained, if any, by which change."""

    adapter: Mapping[str, Any] | None = None
    quantize: Mapping[str, Any] | None = None
    change: str = "lora"

    @property
    def saves_model(self) -> bool:
        """Whether a run leaves a whole model, and not an adapter in PEFT's layout."""
        return self.adapter is None or self.change != "lora"


_NF4 = {"kind": "nf4", "double": True}
METHODS = {
    "full": Method(),
    "lora": Method({}),
    "rslora": Method({"rslora": True}),
    "dora": Method({"dora": True}),
    "pissa": Method({"init": "pissa"}),
    "qlora": Method({}, _NF4),
    "qdora": Method({"dora": True}, _NF4),
    "qlora-int8": Method({}, {"kind": "int8"}),
    "lora-experts": Method({}, change="lora-experts"),
}


def unused_options(config: FinetuneConfig, asked: Collection[str]) -> list[str]:
    """Options that were set although they belong to another method."""
    method = METHODS[config.method]
    others = () if method.adapter is not None else ("rank", "alpha", "ranks", "dropout")
    return [n for n in (*others, *(EXPERTS if method.change != "lora-experts" else ())) if n in asked]


def main_records(files: Sequence[Records]) -> Records:
    """The records that decide the template: conversations first, which a single-turn template cannot write, then
    single answers, then plain text."""
    return min(files, key=lambda r: (r.format in PLAIN_KINDS, _single_tasks(r)))


def _single_tasks(records: Records) -> bool:
    """True for Alpaca's records without a system prompt and without a history, which its template can write."""
    return records.format == "alpaca" and all(len(row.turns) == 2 for row in records.rows)


def choose_template(
    config: FinetuneConfig, records: Records, tokenizer: Tokenizer, card: Mapping[str, Any]
) -> templates.Template:
    """The template: the configured one, the model's own, or the default for these records."""
    if config.template:
        return templates.get_template(config.template)
    own = None if records.format in PLAIN_KINDS else templates.find_template(tokenizer, card)
    if own is not None:
        return own
    has_chatml = all(tokenizer.inner.token_to_id(t) is not None for t in templates.get_template("chatml").needs)
    chat = "chatml" if has_chatml else "mistral"
    single = _single_tasks(records) or records.format in PLAIN_KINDS
    return templates.get_template(DEFAULT_TEMPLATES[records.format] if single else chat)


def apply_method(model: nn.Module, config: FinetuneConfig, fill: bool = True) -> list[Change]:
    """Make the changes of the method, freeze all other weights, and return the changes.

    Without `fill` no values are read or initialised, for a model on fake tensors. Raises ValueError for a model
    that the method cannot change.
    """
    method, changes = METHODS[config.method], list[Change]()
    if method.adapter is None:
        set_trainable(model, config.target_modules or ("**",))
        return changes
    requests = {"quantize": method.quantize, method.change: _request(config) | {**method.adapter}}
    for name, request in requests.items():
        if request is not None:
            changes.append(decide_change(model, name, **request))
            (make_change if fill else repeat_structure)(model, changes[-1])
    set_trainable(model, changes[-1].new)
    return changes


def _request(config: FinetuneConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"where": config.target_modules} if config.target_modules else {}
    options |= {"rank": config.rank, "alpha": config.alpha, "ranks": config.pairs, "dropout": config.dropout}
    if METHODS[config.method].change == "lora-experts":
        options |= {key: getattr(config, option) for option, key in EXPERTS.items()}
    return options | {"adapter": NAME, "seed": config.seed}


def resolve_targets(config: FinetuneConfig, base: LoadedModel) -> FinetuneConfig:
    """The config with the parameters that the base's last change added in place of `new` in its target modules."""
    return replace(config, target_modules=resolve_new(config.target_modules, base))


def set_trainable(model: nn.Module, globs: Sequence[str]) -> None:
    """Make the parameters trainable whose own or module's names match the globs.

    Raises ValueError that lists the names if none match, and if all are to be trained and some are quantized.
    """
    if tuple(globs) == ("**",) and any(isinstance(module, Quantized) for module in model.modules()):
        raise ValueError("all weights are to be trained, and some are quantized; train an adapter on them instead")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(selects(globs, name))
    if not any(p.requires_grad for p in model.parameters()):
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"{' '.join(globs)} matches no parameter; the model has {names[:300]}")


def selects(globs: Iterable[str], name: str) -> bool:
    """Whether the last of the globs that matches the name of a parameter, or of its module, has no !."""
    names, selected = (name, name.rpartition(".")[0]), False
    for glob in globs:
        if any(tree.matches(glob.removeprefix("!"), n) for n in names):
            selected = not glob.startswith("!")
    return selected


def learning_rate(config: FinetuneConfig, width: int) -> float:
    """The configured learning rate, or the default for a model of this width.

    The default of full finetuning is a power of the width through two points: Alpaca's 2e-5 at 4,096
    (https://github.com/tatsu-lab/stanford_alpaca) and the best of our sweep, 1e-3 at 192 (docs/log/finetuning.md,
    "LoRA against full"). That of adapters has the exponent of https://thinkingmachines.ai/blog/lora/ and 0.7 times
    its rate, above which the validation loss rises during training; it is at most MAX_ADAPTER_LR, divided by
    `_adapter_scale`. The same file, "Learning rates of finetuning", has results from 100 to 5,000 steps, and the
    limits of these defaults.
    """
    if config.lr is not None:
        return config.lr
    if METHODS[config.method].adapter is None:
        full_lr: float = 2e-5 * (4096 / width) ** 1.28
        return full_lr
    adapter_lr: float = min(3.5e-4 * (2000 / width) ** 0.78, MAX_ADAPTER_LR)
    return max(adapter_lr / _adapter_scale(config), config.MINIMUM["lr"])


def _adapter_scale(config: FinetuneConfig) -> float:
    """The adapter's scale relative to LoRA with alpha 32, by which updates of B are multiplied."""
    adapter = METHODS[config.method].adapter or {}
    return config.alpha / 32 * (config.rank**0.5 if adapter.get("rslora") else 1.0)


def choose_context_length(config: FinetuneConfig, longest: int, model: Decoder, trained_length: int) -> int:
    """The configured context length, or one that fits the longest example.

    Learned position embeddings limit it to the model's own; rotary embeddings do not.
    """
    limit = trained_length if model.embed.place is not None else max(trained_length, MAX_CONTEXT)
    if config.context_length > limit:
        length = config.context_length
        raise ValueError(f"--context-length is {length}; this model supports at most {limit} tokens")
    power = 1 << (max(1, longest - 2)).bit_length()
    return config.context_length or min(limit, MAX_CONTEXT, max(MIN_CONTEXT, power))


def choose_batch(config: FinetuneConfig, context: int, rows_per_epoch: int) -> int:
    """The configured batch size, or one with TOKENS per step and at least STEPS per epoch."""
    return config.batch or max(1, min(TOKENS // context, rows_per_epoch // STEPS))


def choose_steps(config: FinetuneConfig, rows_per_epoch: int, batch: int) -> int | None:
    """The number of steps, or None if the run ends after --minutes."""
    if config.stops_by_time:
        return None
    return config.steps or max(1, round(config.epochs * rows_per_epoch / batch))

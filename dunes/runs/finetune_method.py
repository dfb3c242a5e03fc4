"""Finetuning methods: changes to the model, trainable weights, and default options.

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
"""Names in the change lora-experts by option of --method lora-experts."""

TOKENS, STEPS = 4096, 32  # per step; least per epoch, as LoRA learns less well with large batches

MAX_CONTEXT, MIN_CONTEXT = 2048, 128  # of the default context length

MAX_ADAPTER_LR = 0.005
"""Largest default learning rate of adapters."""

DEFAULT_TEMPLATES = {"alpaca": "alpaca", "completion": "plain", "text": "plain"}
"""Default template by format; conversations use a template whose special tokens the tokenizer has."""

PLAIN_KINDS = ("completion", "text")
"""Formats whose rows are complete text, without a chat template."""


@dataclass(frozen=True)
class Method:
    """A finetuning method: options of the `change` that adds an adapter, and of quantizing the base, or None."""

    adapter: Mapping[str, Any] | None = None
    quantize: Mapping[str, Any] | None = None
    change: str = "lora"

    @property
    def saves_model(self) -> bool:
        """True if a run saves the complete model instead of an adapter in PEFT's format."""
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
    """Options that the user set (`asked`) although they belong to another method."""
    method = METHODS[config.method]
    others = () if method.adapter is not None else ("rank", "alpha", "ranks", "dropout")
    return [n for n in (*others, *(EXPERTS if method.change != "lora-experts" else ())) if n in asked]


def main_records(files: Sequence[Records]) -> Records:
    """The records that determine the template: conversations if any, as a single-turn template cannot express
    them, else single answers, else plain text."""
    return min(files, key=lambda r: (r.format in PLAIN_KINDS, _single_tasks(r)))


def _single_tasks(records: Records) -> bool:
    """True for Alpaca records without system prompt or history, which Alpaca's template can express."""
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

    Without `fill`, for a model on fake tensors, no values are read or initialised. Raises ValueError for a model
    that the method does not apply to.
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
    """The config with `new` in its target modules replaced by the parameters that the base's last change added."""
    return replace(config, target_modules=resolve_new(config.target_modules, base))


def set_trainable(model: nn.Module, globs: Sequence[str]) -> None:
    """Make the parameters trainable whose own or module's names match the globs, and freeze the others.

    Raises ValueError if none matches, listing the names, and for "**" if some weights are quantized.
    """
    if tuple(globs) == ("**",) and any(isinstance(module, Quantized) for module in model.modules()):
        raise ValueError("all weights are to be trained, and some are quantized; train an adapter on them instead")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(selects(globs, name))
    if not any(p.requires_grad for p in model.parameters()):
        names = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(f"{' '.join(globs)} matches no parameter; the model has {names[:300]}")


def selects(globs: Iterable[str], name: str) -> bool:
    """True if the last glob that matches a parameter's name, or its module's, has no !."""
    names, selected = (name, name.rpartition(".")[0]), False
    for glob in globs:
        if any(tree.matches(glob.removeprefix("!"), n) for n in names):
            selected = not glob.startswith("!")
    return selected


def learning_rate(config: FinetuneConfig, width: int) -> float:
    """The configured learning rate, or the default for a model of this width.

    For full finetuning, the default is a power law of the width through two points: Alpaca's 2e-5 at 4,096
    (https://github.com/tatsu-lab/stanford_alpaca) and the best of our sweep, 1e-3 at 192 (docs/log/finetuning.md,
    "LoRA against full"). For adapters, it has the exponent of https://thinkingmachines.ai/blog/lora/ and 0.7 times
    its rate, above which the validation loss rises during training, at most MAX_ADAPTER_LR, all divided by
    `_adapter_scale`. "Learning rates of finetuning" in the same file has results for 100 to 5,000 steps, and the
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
    """The adapter's scale relative to LoRA with alpha 32, which multiplies updates of B."""
    adapter = METHODS[config.method].adapter or {}
    return config.alpha / 32 * (config.rank**0.5 if adapter.get("rslora") else 1.0)


def choose_context_length(config: FinetuneConfig, longest: int, model: Decoder, trained_length: int) -> int:
    """The configured context length, or a power of two that fits the longest example.

    Learned position embeddings limit it to `trained_length`; rotary embeddings do not. Raises ValueError above.
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

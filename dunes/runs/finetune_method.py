"""What follows for a model from a finetune's config: its changes, which weights train, and how fast.

LoRA https://arxiv.org/abs/2106.09685, QLoRA https://arxiv.org/abs/2305.14314
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dunes import tree
from dunes.augment import lora
from dunes.augment.quantize import decide as decide_quantized
from dunes.augment.quantize import shape as shape_quantized
from dunes.data.examples import Records
from dunes.parts import Decoder
from dunes.runs.finetune_config import FinetuneConfig
from dunes.text import Tokenizer, templates

ADAPTER = lora.NAME

TOKENS, STEPS = 4096, 32
"""Tokens in a step, and steps in an epoch at least: LoRA learns less well from large batches
(https://thinkingmachines.ai/blog/lora/)."""

MAX_CONTEXT, MIN_CONTEXT = 2048, 128
"""Of a context that is chosen."""

MAX_ADAPTER_LR = 0.005
"""The largest learning rate of adapters that is chosen."""

DEFAULT_TEMPLATES = {"alpaca": "alpaca", "completion": "plain", "text": "plain"}
"""The template of each kind of records; of conversations it is one that the tokenizer has the tokens for."""

PLAIN_KINDS = ("completion", "text")
"""Kinds whose rows are written as they should be read: a model's own template has nothing to add."""


@dataclass(frozen=True)
class Method:
    """What is done to the base: how its weights are kept, and which adapter stands beside them, if one does."""

    adapter: Mapping[str, Any] | None = None
    quantize: Mapping[str, Any] | None = None


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
}


def unused_options(config: FinetuneConfig, asked: Collection[str]) -> list[str]:
    """What was asked of an adapter where the method has none."""
    return (
        [n for n in ("rank", "alpha", "ranks", "dropout") if n in asked]
        if METHODS[config.method].adapter is None
        else []
    )


def main_records(files: Sequence[Records]) -> Records:
    """The records by which a template is chosen: conversations, which one for single answers could not write, then
    single answers, then those that are written as they should be read."""
    order = sorted(files, key=lambda r: (r.format in PLAIN_KINDS, r.format == "alpaca"))
    return order[0]


def choose_template(
    config: FinetuneConfig, records: Records, tokenizer: Tokenizer, card: Mapping[str, Any]
) -> templates.Template:
    """The template: the one asked for, the model's own, or the usual one for such records."""
    if config.template:
        return templates.get_template(config.template)
    own = None if records.format in PLAIN_KINDS else templates.find_template(tokenizer, card)
    if own is not None:
        return own
    known = all(tokenizer.inner.token_to_id(t) is not None for t in templates.get_template("chatml").needs)
    return templates.get_template(DEFAULT_TEMPLATES.get(records.format, "chatml" if known else "mistral"))


def changed(model: nn.Module, config: FinetuneConfig, fill: bool = True) -> list[dict[str, Any]]:
    """Change the model as the method says, freeze what is not to learn, and return the notes.

    Without `fill` no number is read or drawn, for a model that has none.
    """
    method, notes = METHODS[config.method], []
    if method.quantize is not None:
        note = decide_quantized(model, **method.quantize)
        shape_quantized(model, fill=fill, **note)
        notes.append(note)
    if method.adapter is None:
        only(model, config.target_modules or ("**",))
        return notes
    note = lora.decide(model, **_request(config), **method.adapter)
    lora.shape(model, **note)
    if fill:
        lora.fill(model, **note)
    lora.set_adapter(model, ADAPTER)
    only(model, note["new"])
    return [*notes, note]


def _request(config: FinetuneConfig) -> dict[str, Any]:
    asked: dict[str, Any] = {"where": config.target_modules} if config.target_modules else {}
    asked |= {"rank": config.rank, "alpha": config.alpha, "ranks": config.pairs, "dropout": config.dropout}
    return asked | {"adapter": ADAPTER, "seed": config.seed}


def only(model: nn.Module, where: Sequence[str]) -> None:
    """Let those parameters learn that the globs select, by their own names or by their modules' places.

    Raises ValueError, with what there is, if these are none.
    """
    for name, parameter in model.named_parameters():
        chosen = False
        for glob in where:
            if any(tree.matches(glob.removeprefix("!"), n) for n in (name, name.rpartition(".")[0])):
                chosen = not glob.startswith("!")
        parameter.requires_grad_(chosen)
    if not any(p.requires_grad for p in model.parameters()):
        some = ", ".join(name for name, _ in model.named_parameters())
        raise ValueError(
            f"--target-modules {' '.join(where)} selects nothing to train here; there are {some[:300]}"
        )


def learning_rate(config: FinetuneConfig, width: int) -> float:
    """The rate that was asked for, or the usual one for a model of this width.

    Full finetuning's is a power of the width through two points: Alpaca's 2e-5 at 4,096
    (https://github.com/tatsu-lab/stanford_alpaca) and the best of our sweep, 1e-3 at 192 (LOG.md, "LoRA against
    full"). Adapters' has the exponent of https://thinkingmachines.ai/blog/lora/ and seven tenths of its rate,
    since above that validation begins to rise on the way; at most STEEPEST, divided by `_gain`. LOG.md, "Learning
    rates of finetuning", has what these do from 100 to 5,000 steps, and where they do not hold.
    """
    if config.lr is not None:
        return config.lr
    if METHODS[config.method].adapter is None:
        full: float = 2e-5 * (4096 / width) ** 1.28
        return full
    lora: float = min(3.5e-4 * (2000 / width) ** 0.78, MAX_ADAPTER_LR)
    return max(lora / _gain(config), config.MINIMUM["lr"])


def _gain(config: FinetuneConfig) -> float:
    """The adapter's scale over that of LoRA with an alpha of 32: a change of B is multiplied by as much."""
    adapter = METHODS[config.method].adapter or {}
    return config.alpha / 32 * (config.rank**0.5 if adapter.get("rslora") else 1.0)


def choose_context_length(config: FinetuneConfig, longest: int, model: Decoder, known: int) -> int:
    """The context asked for, or one that the longest example fits into.

    Where the model learned a vector for each position it can look no further than it `known`; angles go on.
    """
    most = known if model.embed.place is not None else max(known, MAX_CONTEXT)
    if config.context_length > most:
        raise ValueError(f"--context-length is {config.context_length}; this model supports at most {most} tokens")
    return config.context_length or min(
        most, MAX_CONTEXT, max(MIN_CONTEXT, 1 << (max(1, longest - 2)).bit_length())
    )


def choose_batch(config: FinetuneConfig, context: int, epoch: int) -> int:
    """The rows asked for, or so many that a step has TOKENS and an epoch STEPS."""
    return config.batch or max(1, min(TOKENS // context, epoch // STEPS))


def choose_steps(config: FinetuneConfig, epoch: int, batch: int) -> int | None:
    """How many steps, if not the clock ends the run."""
    if config.stops_by_time:
        return None
    return config.steps or max(1, round(config.epochs * epoch / batch))

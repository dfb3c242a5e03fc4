"""Autosize: choose model size, batch size and sequence length from the minutes, the corpus and this machine.

The rules come from a sweep (docs/log/training.md, "The dial"), which `benchmarks/autosize.py` repeats. A model's
speed is estimated from its FLOPs and memory traffic, and its loss from the numbers of parameters and training
tokens. The loss follows Chinchilla's formula (https://arxiv.org/abs/2203.15556), in which repeated tokens count
less (https://arxiv.org/abs/2305.16264), times a factor of the text (`text_entropy`).
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dunes import measure, tree
from dunes.augment.adapted import sides
from dunes.augment.changes import decide_change
from dunes.checkpoint import Architecture
from dunes.checkpoint.architecture import import_build
from dunes.completion.copy_gate import PLACE_BYTES
from dunes.completion.fit import FitSize
from dunes.completion.index import MOST as INDEXED
from dunes.flags import Dtype
from dunes.measure import ranks
from dunes.models import FAMILIES, named_parts
from dunes.models.mixtral import expert_width
from dunes.ops.float32_products import float32_is_faster, repeat_choice
from dunes.parts import Attention, Decoder, MoE
from dunes.runs.config import RunConfig, T, adamw_rate
from dunes.runs.memory import Build, Shape, TrainSetup, describe_memory, process_memory
from dunes.runs.train_config import EXPERT_OPTIONS, VOCABULARY, TrainConfig, parse_size
from dunes.text.tokenizer import SPECIAL
from dunes.train.optim import named_optimizer
from dunes.units import format_count, plural

BYTES_PER_TOKEN = 3.9
"""Bytes of source code per token of a BPE tokenizer with a few thousand tokens. With --tokenizer bytes or chars, a
token counts as 1 byte."""

OVERHEAD_SECONDS = 15.0
"""Seconds that a run spends outside its steps: reading, tokenizing, validation, saving."""

TOKENS_PER_PARAMETER = 3.0
"""Training tokens per parameter in the best models of the sweep."""

MAX_PARAMETERS_PER_TOKEN = 2.0
"""Maximum number of parameters per unique training token; a larger model memorises the text."""

FLOOR = 0.086
"""Irreducible loss (bits/byte) in the loss formula; the formula was fitted to the sweep."""
NARROW = (16.3, 0.25)
"""Factor and exponent of the loss formula's term for the number of parameters."""
SHORT = (62.8, 0.30)
"""Factor and exponent of the loss formula's term for the number of training tokens."""

EPOCH_DECAY = 5.0
"""Epochs of repetition after which repeated text has lost 63 % of its value (15 in
https://arxiv.org/abs/2305.16264)."""

ARITHMETIC = 0.79
"""Factor of the FLOPs in the formula for a step's time; the formula was fitted to timings of 16 models."""
PASSES = 24.1
"""Factor of the activation bytes in the formula for a step's time."""

INDEX = 18
"""Memory of the completion index, in bytes per byte of text."""
INDEXING = 60
"""Additional memory while the text is indexed again, in bytes per byte of text."""

FIT = "fitting the completion gate"
WHY = "; a larger model would be undertrained, a smaller one has less capacity"

BYTES_PER_ENTRY = 300
"""Bytes of training text per entry of the vocabulary of a small text (docs/log/training.md, "Small texts")."""
SIZES = [round(300_000 * 1.2**i) for i in range(45)]
BATCH = 16
BIAS_RATE = 1e-3
"""Update rate of the selection bias, as in https://arxiv.org/abs/2408.15664."""
CONTEXT = 256
COMPLETION_CONTEXT, COMPLETION_BATCH = 512, 8  # in the same time, a longer context gives better completion
DROPOUT, WEIGHT_DECAY = 0.2, 0.15  # repeated text needs more weight decay: https://arxiv.org/abs/2509.14786
FEW_EPOCHS = 3.0
"""Number of epochs above which a new model gets DROPOUT and WEIGHT_DECAY."""


@dataclass(frozen=True)
class Machine:
    """Rates of a machine: `matmul` (FLOP/s of matrix products in `dtype`) and `read` (bytes/s of memory reads).

    `planned` contains the two rates to use for planning (`measure.Rate.planned`); None stands for the measured
    rates. `guessed` marks unmeasured rates.
    """

    threads: int
    dtype: Dtype
    matmul: float
    read: float
    planned: tuple[float, float] | None = None
    guessed: tuple[bool, bool] = (False, False)

    @property
    def plan(self) -> "Machine":
        """The machine with its `planned` rates, which do not depend on other running programs."""
        matmul, read = self.planned or (self.matmul, self.read)
        return replace(self, matmul=matmul, read=read)


def with_hardware(config: T) -> T:
    """The config, with threads and dtype chosen for this machine if they are unset.

    Also sets PyTorch's number of threads. Raises ValueError for more than four threads per processor.
    """
    threads, cores = config.threads or measure.choose_threads(), os.cpu_count() or 1
    if threads > 4 * cores:
        raise ValueError(f"--threads is {threads}; this machine has {cores} processors, so at most {4 * cores}")
    torch.set_num_threads(threads)
    dtype = config.dtype or str(measure.choose_dtype(measure.device())).removeprefix("torch.")
    repeat_choice(config.float32_products)
    return replace(config, threads=threads, dtype=cast(Dtype, dtype), float32_products=float32_is_faster())


def autocast_dtype(config: RunConfig) -> torch.dtype:
    """The dtype of matrix products, as chosen by `with_hardware`."""
    assert config.dtype, "chosen before"
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def measure_machine(config: TrainConfig) -> Machine:
    """Measure the rates of this machine in the config's dtype; takes a few seconds the first time."""
    assert config.threads, "chosen before"
    assert config.dtype, "chosen before"
    device = measure.device()
    matmul, read = measure.peak_matmul_rate(autocast_dtype(config), device), measure.peak_read_rate(device)
    planned, guessed = (matmul.planned, read.planned), (not matmul.sure, not read.sure)
    return Machine(config.threads, config.dtype, matmul.value, read.value, planned, guessed)


def with_machine(config: TrainConfig, context_length: int = 0) -> tuple[TrainConfig, Machine]:
    """Measure this machine; returns the config with threads, dtype and matmul rate, and the machine.

    Sets an unset context length to `context_length` (0: to its default), and an unset batch size to its default.
    """
    config = with_hardware(config)
    machine = measure_machine(config)
    measured = replace(config, dtype=machine.dtype, threads=machine.threads, matmul=machine.matmul)
    batch = config.batch or (COMPLETION_BATCH if config.complete else BATCH)
    batch += 0 if config.batch else -batch % ranks.count()
    default = COMPLETION_CONTEXT if config.complete else CONTEXT
    context_length = config.context_length or context_length or default
    return replace(measured, batch=batch, context_length=context_length), machine


def autosize_run(config: TrainConfig, size: int) -> tuple[TrainConfig, list[str]]:
    """Choose all unset options for `size` bytes of training text; returns the config and lines with the reasons.

    If all options are set, the machine is not measured.
    """
    complete = config.dtype and config.threads and config.size and config.batch and config.context_length
    if complete and None not in (config.dropout, config.weight_decay):
        return with_hardware(config), []
    if complete and config.steps:  # the number of epochs does not depend on the machine
        tokens = config.steps * config.batch * config.context_length
        return with_hardware(_regularized(config, tokens / unique_tokens(config, size))), []
    config, machine = with_machine(config)
    full, expected = choose_size(config, size, machine.plan)
    full = _regularized(full, expected.epochs)
    full = replace(full, rate=estimate(full, size, machine).rate)
    return full, describe_choice(full, machine, expected, size, "" if config.size or config.steps else WHY)


def _regularized(config: TrainConfig, epochs: float) -> TrainConfig:
    """The config with `dropout`, and for text that is repeated often `weight_decay`, chosen if they are unset."""
    repeated = {"dropout": DROPOUT, "weight_decay": WEIGHT_DECAY}
    chosen: dict[str, Any] = repeated if epochs > FEW_EPOCHS else {"dropout": 0.0}
    return replace(config, **{name: value for name, value in chosen.items() if getattr(config, name) is None})


@dataclass(frozen=True)
class Estimate:
    """Estimates for a model: parameters, training speed (tokens/s), training tokens, epochs, validation bits/byte.

    `active` is the number of parameters used per token; in a mixture, `active` is below `parameters`.
    """

    parameters: int
    active: int
    rate: float
    tokens: float
    epochs: float
    bits: float


def choose_size(config: TrainConfig, size: int, machine: Machine) -> tuple[TrainConfig, Estimate]:
    """Choose the model size with the lowest estimated validation loss; returns the config and its estimate.

    If the size is configured, it is kept. With --steps, the choice depends on the number of training tokens, but
    not on the machine's speed.
    """
    unique = unique_tokens(config, size)
    sizes = [s for s in SIZES if s <= max(SIZES[0], MAX_PARAMETERS_PER_TOKEN * unique)]
    if config.steps:
        target = config.steps * config.batch * config.context_length / TOKENS_PER_PARAMETER
        sizes = [min(sizes, key=lambda s: abs(s - target))]
    candidates = [config] if config.size else [replace(config, size=str(s)) for s in sizes]
    estimates = [(estimate(each, size, machine), each) for each in candidates]
    best, sized = min(estimates, key=lambda pair: pair[0].bits)
    return sized, best


def estimate(config: TrainConfig, size: int, machine: Machine) -> Estimate:
    model = meta_model(config)
    rate = 1 / seconds_per_token(model, config, machine)
    size_of_step = config.batch * config.context_length
    steps = config.steps or max(1.0, config.seconds - OVERHEAD_SECONDS) * rate / size_of_step
    tokens = steps * config.batch * config.context_length
    unique = unique_tokens(config, size)
    parameters, active = tree.count(model), active_parameters(model)
    # Rule of thumb: a mixture is about as good as a dense model of sqrt(total * active) parameters.
    bits = expected_bits(math.isqrt(parameters * active), tokens, unique)
    return Estimate(parameters, active, rate, tokens, tokens / unique, bits)


def size_warning(config: TrainConfig) -> str:
    """A warning if --size is too small for the vocabulary or the number of experts, else ""."""
    count = tree.count(meta_model(config))
    if config.shape or count < 1.25 * parse_size(config.size):
        return ""
    remedy = "set fewer --experts" if config.experts else "set a smaller --vocab-size"
    return (
        f"warning: --size is {config.size}, but the smallest {config.family} model with a vocabulary "
        f"of {vocabulary(config)} has {format_count(count)} parameters; {remedy}"
    )


def unique_tokens(config: TrainConfig, size: int) -> float:
    """Approximate number of tokens in `size` bytes of text."""
    return max(1.0, size / (BYTES_PER_TOKEN if config.tokenizer == "bpe" else 1.0))


def meta_model(config: TrainConfig) -> Decoder:
    """The model of a config on the meta device, with the vocabulary size expected before tokenizing."""
    with torch.device("meta"):
        return architecture_for(config, vocabulary(config)).outline()


def architecture_for(config: TrainConfig, vocab: int) -> Architecture:
    """The architecture of a new model. Shared experts and a selection bias are added by the change `routing`; only
    dunes can read such a model.

    Raises ValueError if the function of --parts cannot be imported or builds no Decoder.
    """
    if config.parts:
        return _named_parts(config, vocab)
    plain = Architecture(config.family, config_for(config, vocab))
    if not config.has_own_form:
        return plain
    bias_rate = BIAS_RATE if config.balancing == "bias" else 0.0
    routing = decide_change(plain.outline(), "routing", shared=config.shared_experts, bias_rate=bias_rate)
    return replace(plain, changes=(routing,))


def _named_parts(config: TrainConfig, vocab: int) -> Architecture:
    size, chosen = config_for(config, vocab), config.chosen_parts
    shape = {"vocab": vocab, "dim": size.dim, "depth": size.depth, "context_length": config.context_length}
    if not isinstance(chosen, str):
        return Architecture.of_function(named_parts.build, **shape, **chosen)
    if ranks.count() > 1:
        raise ValueError(f"--parts {chosen}: torchrun cannot use a function; name parts, or use a single process")
    described = replace(Architecture.of_function(import_build(chosen, Path("--parts")), **shape), family=chosen)
    try:
        with torch.device("meta"):
            model = described.build()
    except (Exception, SystemExit) as error:  # whatever the function raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"--parts {chosen}: {reason} (it is called on torch's meta device first)") from error
    if not isinstance(model, Decoder):
        raise ValueError(f"--parts {chosen}: returned a {type(model).__name__}; expected a Decoder")
    return described


def active_parameters(model: nn.Module) -> int:
    """Number of parameters used per token, without unselected experts."""
    idle = [(m.experts, 1 - m.top_k / len(m.experts)) for m in model.modules() if isinstance(m, MoE)]
    return tree.count(model) - sum(round(share * tree.count(experts)) for experts, share in idle)


def with_vocabulary(config: TrainConfig, size: int) -> TrainConfig:
    """The config with a vocabulary size for `size` bytes of training text, if a BPE tokenizer is to be trained."""
    if config.tokenizer != "bpe" or config.base or config.vocab_size:
        return config
    entries = min(VOCABULARY, max(512, size / BYTES_PER_ENTRY))
    return replace(config, vocab_size=2 ** round(math.log2(entries)))


def vocabulary(config: TrainConfig) -> int:
    """The expected vocabulary size, before the text is tokenized."""
    return {"bpe": config.vocab_size or VOCABULARY, "bytes": 256 + len(SPECIAL), "chars": 110}[config.tokenizer]


def config_for(config: TrainConfig, vocab: int) -> Any:
    """The family's model config, with the configured shape or with about the configured number of parameters.

    The number includes embeddings. The width is 32 or a multiple of 64. The number of layers is about width / 64.
    The hidden widths of all experts add up to the hidden width of a dense model.
    """
    dense = _dense_config(config, vocab)
    if not set(EXPERT_OPTIONS) & config.changed():
        return dense
    count, balance = config.expert_count, {"balance": 0.0} if config.balancing == "bias" else {}
    return replace(dense, experts=count, top_k=config.top_k, hidden=expert_width(dense.dim, count), **balance)


def _dense_config(config: TrainConfig, vocab: int) -> Any:
    from_size = FAMILIES[config.family].Config.from_size
    if config.shape:
        layers, width = config.shape
        return from_size(vocab, width, layers, config.context_length)
    size, block = parse_size(config.size), getattr(FAMILIES[config.family], "BLOCK_SIZE", 12)

    def depth(dim: int) -> int:
        return max(2, round((size - vocab * dim) / (block * dim * dim)))

    def cost(dim: int) -> float:
        count = vocab * dim + block * dim * dim * depth(dim)
        return 5 * abs(math.log(count / size)) + abs(math.log(dim / depth(dim) / 64))

    dim = min([32, *range(64, 8193, 64)], key=cost)
    return from_size(vocab, dim, depth(dim), config.context_length)


def expected_bits(parameters: int, tokens: float, unique: float) -> float:
    """Validation bits/byte on code, estimated by the formula fitted to the sweep."""
    repetitions = max(0.0, tokens / unique - 1)
    effective = min(tokens, unique) * (1 + EPOCH_DECAY * (1 - math.exp(-repetitions / EPOCH_DECAY)))
    bits: float = FLOOR + NARROW[0] * parameters ** -NARROW[1] + SHORT[0] * effective ** -SHORT[1]
    return bits


def seconds_per_token(model: Decoder, config: TrainConfig, machine: Machine) -> float:
    """Seconds per training token over all ranks, including the optimizer; estimated by the formula fitted to
    timings."""
    tokens = config.batch * config.context_length
    optimizer = named_optimizer(config.optimizer).flops(model)
    work = flops(model, config.context_length) + optimizer / tokens
    width = 1.0 if machine.dtype == "bfloat16" else 2.0
    traffic = PASSES * width * activation_bytes(model, config.context_length)
    return (ARITHMETIC * work / machine.matmul + traffic / machine.read) / ranks.count()


def flops(model: nn.Module, context: int) -> float:
    """Training FLOPs per token if all weights are trained: 6 per weight of each matrix, plus attention.

    Masked attention scores are included, since they are computed, except in `pair_attention`. The optimizer is not
    included.
    """
    weights = sum(share * inputs * outputs for inputs, outputs, share in products(model))
    if isinstance(model, Decoder) and model.head is None:
        weights += model.embed.token.num_embeddings * model.embed.token.embedding_dim
    attentions = (m for m in model.modules() if isinstance(m, Attention))
    across = sum((m.head_count * m.head_dim + m.out.in_features) * _span(m, context) for m in attentions)
    return 6.0 * weights + 6.0 * across


def _span(attention: Attention, context: int) -> int:
    """Number of scores per token that attention computes."""
    return 2 if attention.window == 2 else context


def products(model: nn.Module) -> Iterator[tuple[int, int, float]]:
    """Yields (input width, output width, share) for each matrix; `share` is the fraction of tokens that pass
    through it.

    Adapters and recurrent parts list their additional products in `added_products`.
    """
    mixtures = [m for m in model.modules() if isinstance(m, MoE)]
    shares = {e: m.top_k / len(m.experts) for m in mixtures for e in m.experts.modules()}
    for m in tree.linears(model):
        yield *sides(m), shares.get(m, 1.0)
    for m in model.modules():
        for added in getattr(m, "added_products", ()):
            yield *added, shares.get(m, 1.0)


def activation_bytes(model: nn.Module, context: int) -> float:
    """Bytes of activations per token in a forward pass, at two bytes per number."""
    linear = sum(share * (inputs + outputs) for inputs, outputs, share in products(model))
    scores = sum(m.head_count * _span(m, context) for m in model.modules() if isinstance(m, Attention))
    vocab = model.embed.token.num_embeddings if isinstance(model, Decoder) else 0
    return 2.0 * (linear + scores + vocab)


def learning_rate(config: TrainConfig, model: Decoder) -> float:
    """The configured peak learning rate, or the optimizer's default for this model."""
    if config.lr is not None:
        return config.lr
    lr = named_optimizer(config.optimizer).lr
    return lr[bool(config.base)] if isinstance(lr, tuple) else lr * adamw_rate(sides(model.embed.token)[1])


def build_optimizer(model: Decoder, config: TrainConfig) -> Optimizer:
    """The optimizer of a run; an unset learning rate or weight decay gets the optimizer's default.

    Muon computes in the run's dtype, so that a run resumed on another machine gives the same results.
    """
    dtype = getattr(torch, config.dtype or "float32")
    return named_optimizer(config.optimizer).build(model, learning_rate(config, model), config.weight_decay, dtype)


def memory_advice(config: TrainConfig, build: Build | None = None, **trained: Any) -> str:
    """A sentence with the estimated memory of a run, its largest parts, and the options that reduce the memory.

    With --from, `build()` returns the model to train. `trained` contains further arguments of `estimate_memory`.
    """
    options = "--batch, --context-length or --size" if build is None else "--batch or --context-length"
    return f"{describe_memory(estimate_memory(config, build, **trained))}; reduce {options} to need less"


def estimate_memory(
    config: TrainConfig, build: Build | None = None, text: int = 0, trainable: int | None = None
) -> dict[str, float]:
    """Bytes that each process of a run needs, by purpose, estimated on fake tensors.

    With --complete, the result includes the memory to fit the completion gate and to index `text` bytes of text.
    With --from, `build()` returns the model. `trainable` is the size of the trainable weights in bytes (None: all
    weights).
    """
    shape = Shape(config.batch // ranks.count(), config.context_length, autocast_dtype(config))
    setup = TrainSetup(partial(build_optimizer, config=config))
    parts = process_memory(build or architecture_for(config, vocabulary(config)).build, shape, setup, trainable)
    if config.complete:  # the gate is fitted after the last step, on the saved model
        steps = sum(parts.get(purpose, 0) for purpose in ("gradients", "activations", "temporaries"))
        parts |= fit_memory(FitSize.of(config.seconds).places, text)
        parts[FIT] = max(0.0, parts[FIT] + parts.get("parameters", 0) - steps)
    return parts


def fit_memory(places: int, text: int) -> dict[str, float]:
    """Bytes of memory, by purpose: for an index of `text` bytes of text, and for fitting the gate on `places`
    positions."""
    indexed = min(text, INDEXED)
    return {"index of the text": INDEX * indexed, FIT: max(2 * places * PLACE_BYTES, INDEXING * indexed)}


def describe_machine(machine: Machine) -> str:
    """One line of text with the measured rates of the machine."""
    matmul, read = (" (a guess, typical of such processors)" * guessed for guessed in machine.guessed)
    return (
        f"this machine: {plural(machine.threads, 'thread')}, {machine.dtype} at "
        f"{machine.matmul / 1e12:.2f} TFLOP/s{matmul}, memory read at {machine.read / 1e9:.0f} GB/s{read}"
    )


def format_parameters(total: int, active: int) -> str:
    """Text like "3.0m parameters"; for a mixture, also the number of active parameters."""
    suffix = f", {format_count(active)} active" if active < total else ""
    return f"{format_count(total)} parameters{suffix}"


def describe_choice(config: TrainConfig, machine: Machine, expected: Estimate, size: int, why: str) -> list[str]:
    """Lines that report the options chosen for `size` bytes of text; `why` is the reason for the size."""
    steps = round(expected.tokens / (config.batch * config.context_length))
    return [
        describe_machine(machine),
        f"chosen for {config.length}: {format_parameters(expected.parameters, expected.active)}, "
        f"batch size {config.batch}, context length {config.context_length}",
        f"at about {format_count(expected.rate)} tokens/s, trains on {format_count(expected.tokens)} tokens "
        f"({plural(steps, 'step')}, {expected.epochs:.1f} epochs){why}",
        memory_advice(config, text=size),
    ]

"""The named benchmarks. To add a benchmark, decorate a function `(subject, setting) -> Work` with `@benchmark`:

    from dunes.bench import Work, benchmark

    @benchmark(memory=inference_allocations)
    def embed(subject, setting):
        "Token embeddings alone."
        ...

As in the inference benchmarks of gpt-fast and nanochat, `Work.bytes` counts each weight once per batch, and also
the keys and values of earlier tokens. An expert's bytes are multiplied by the probability that uniform routing
selects the expert for at least one token.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, cast

import torch
from torch import nn

from dunes import checkpoint, measure, tree
from dunes.augment import Adapted
from dunes.bench.subject import Setting, Subject, Work, scratch
from dunes.checkpoint import LoadedModel
from dunes.completion.engine import CompletionEngine
from dunes.data import collect_corpus
from dunes.evaluate.text_loss import evaluate
from dunes.generate import CompiledStep, PrefixCache, Request, generate, generate_all
from dunes.generate.decode_packages import load_step, make_step
from dunes.measure import Allocations
from dunes.parts import Attention, Cache, Decoder, MoE
from dunes.runs.autosize import flops
from dunes.runs.memory import Build, Shape, inference_allocations, train_allocations
from dunes.text import Tokenizer
from dunes.train import Trainer, muon
from dunes.train.loss import next_token_loss

Make = Callable[[Subject, Setting], Work]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: `make` builds the workload, `reads` names the options that affect it, and `batch` is the
    default batch size.

    `memory` estimates the memory of the workload; None if the benchmark has no estimate.
    """

    make: Make
    batch: int
    memory: Callable[[Build, Shape], Allocations] | None
    reads: tuple[str, ...]

    @property
    def about(self) -> str:
        """A one-line description of the benchmark, from its function's docstring."""
        return (self.make.__doc__ or self.make.__name__).strip().splitlines()[0]


BENCHMARKS: dict[str, Benchmark] = {}
"""The registered benchmarks, by name."""


def benchmark(
    batch: int = 1,
    memory: Callable[[Build, Shape], Allocations] | None = None,
    reads: tuple[str, ...] = ("batch", "context-length", "dtype"),
) -> Callable[[Make], Make]:
    """Register a benchmark under its function's name. Raises ValueError if the name is taken."""

    def register(make: Make) -> Make:
        if make.__name__ in BENCHMARKS:
            raise ValueError(f"a benchmark named {make.__name__} exists already; choose another name")
        BENCHMARKS[make.__name__] = Benchmark(make, batch, memory, reads)
        return make

    return register


@benchmark(batch=16, memory=train_allocations)
def train(subject: Subject, setting: Setting) -> Work:
    """Training steps of `dunes train`, including the optimizer."""
    model = subject.model()
    trainer = Trainer(model, muon(model), next_token_loss, dtype=getattr(torch, setting.dtype))
    ids = _random_ids(model, setting.batch, setting.context + 1).to(measure.device())
    steps = trainer.run(repeat(ids))
    tokens = setting.batch * setting.context
    return Work(lambda _: next(steps), tokens, flops=tokens * flops(model, setting.context), model=model)


@benchmark(memory=inference_allocations)
def prefill(subject: Subject, setting: Setting) -> Work:
    """Prefill of a prompt of `context` tokens into an empty cache, up to the logits of the next token."""
    model, tokens = subject.model(setting.dtype), setting.batch * setting.context
    ids = _random_ids(model, setting.batch, setting.context).to(measure.device())

    @torch.no_grad()
    def run(cache: Cache) -> None:
        model(ids, cache=cache, last=1)

    setup = lambda: Cache(setting.batch, setting.context, measure.device())
    head = 2.0 * _table(model).numel()
    work = tokens * flops(model, setting.context) / 3 - (tokens - setting.batch) * head
    return Work(run, tokens, setup=setup, flops=work, bytes=weight_bytes(model, tokens), model=model)


@benchmark(memory=inference_allocations, reads=("batch", "context-length", "dtype", "compile"))
def decode(subject: Subject, setting: Setting) -> Work:
    """Decoding token by token: the first half of a context is the prompt, the second half is generated.

    A single row on a CPU is decoded as by `dunes generate`: by native code if it exists, otherwise by the modules.
    `dunes compile` and --compile create the native code (one to five minutes per model shape).
    """
    model, half = subject.model(setting.dtype), setting.context // 2
    if half < 2:
        raise ValueError(f"a context of {setting.context} leaves nothing to decode; at least 4 tokens are needed")
    count = setting.context - half
    prompts = _random_ids(model, setting.batch, half).tolist()
    step = _compiled_step(model, setting.compile) if setting.batch == 1 else None

    def prefill_prompts() -> Any:
        requests = [Request(ids, count) for ids in prompts]
        cache = PrefixCache(model, setting.batch, step=step)
        tokens = generate_all(model, requests, context_length=setting.context, cache=cache)
        next(tokens)  # reads the prompt
        return tokens

    def run(tokens: Any) -> None:
        for _ in tokens:
            pass

    steps, middle = count - 1, half + count / 2
    work = setting.batch * steps * flops(model, int(middle)) / 3
    cached = setting.batch * cache_elements(model, middle) * _table(model).element_size()
    size = steps * (weight_bytes(model, setting.batch) + cached)
    form = None if step is None else "native"
    return Work(run, setting.batch * steps, setup=prefill_prompts, flops=work, bytes=size, model=model, form=form)


def _compiled_step(model: Decoder, anew: bool) -> CompiledStep | None:
    dtype = next(model.parameters()).dtype
    if measure.device().type != "cpu":
        return None
    try:
        return make_step(model, dtype) if anew else load_step(model, dtype)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}; decoding without a compiled step", stacklevel=2)
        return None


@benchmark(batch=16)
def score(subject: Subject, setting: Setting) -> Work:
    """The loss on random ids (nats/token), computed as by `dunes eval`."""
    model, tokenizer = subject.model(), Tokenizer.train("bytes", ())
    ids = _random_ids(model, 1, setting.batch * setting.context + 1)[0].numpy() % 256
    run = lambda _: evaluate(LoadedModel(model, tokenizer, setting.context), ids, getattr(torch, setting.dtype))
    tokens = setting.batch * setting.context
    return Work(run, tokens, flops=tokens * flops(model, setting.context) / 3, model=model)


@benchmark(reads=("context-length", "dtype"))
def complete(subject: Subject, setting: Setting) -> Work:
    """Completion of a truncated line of Python's standard library."""
    loaded = LoadedModel(subject.model(setting.dtype), subject.tokenizer, setting.context)
    text = _text(4 * setting.context)
    run = lambda _: CompletionEngine(loaded).complete(text)
    return Work(run, 1, "lines", model=loaded.model)


@benchmark(reads=())
def tokenize(subject: Subject, setting: Setting) -> Work:
    """Tokenization of Python's standard library."""
    tokenizer, text = subject.tokenizer, _text(300_000)
    return Work(lambda _: tokenizer.encode(text), len(text.encode()), "bytes")


@benchmark(reads=())
def load(subject: Subject, setting: Setting) -> Work:
    """Loading a model folder from the page cache, and the time to first token."""
    folder = subject.saved_folder
    run = lambda _: checkpoint.load(folder, measure.device())
    to_first = lambda loaded: next(generate(loaded.model, [0], max_tokens=1, context_length=loaded.context_length))
    return Work(run, _stored_bytes(checkpoint.load(folder).model), "bytes", then=to_first)


@benchmark(reads=())
def save(subject: Subject, setting: Setting) -> Work:
    """Saving a model folder, with digests and fsync."""
    loaded, folder = checkpoint.load(subject.saved_folder, measure.device()), scratch()
    arguments = loaded.model, folder, loaded.tokenizer, loaded.context_length
    run = lambda _: checkpoint.save(*arguments, architecture=loaded.architecture)
    return Work(run, _stored_bytes(loaded.model), "bytes")


def _stored_bytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def weight_bytes(model: Decoder, tokens: int = 1) -> float:
    """Bytes of weights, codes and scales that a forward pass over `tokens` tokens reads.

    An embedding table is counted only if the head is tied to it; otherwise, only a few of its rows are read. Only
    active adapters are counted. An expert's bytes are multiplied by the probability that uniform routing selects
    the expert for at least one token.
    """
    tied = _table(model).nbytes if model.head is None else 0
    all_weights, embeddings = _active_bytes(model), _active_bytes(model.embed)
    mixtures = (m for m in model.modules() if isinstance(m, MoE))
    idle = sum(_active_bytes(m.experts) * (1 - m.top_k / len(m.experts)) ** tokens for m in mixtures)
    return all_weights - embeddings + tied - idle


def _active_bytes(module: nn.Module) -> int:
    places = [m for m in module.modules() if isinstance(m, Adapted)]
    idle = [a for m in places for name, a in m.adapters.items() if name != m.active]
    return _stored_bytes(module) - sum(map(_stored_bytes, idle))


def _table(model: Decoder) -> torch.Tensor:
    return cast(torch.Tensor, tree.innermost(model.embed.token).weight)


def cache_elements(model: Decoder, tokens: float) -> float:
    """Number of KV-cache elements that the token after `tokens` tokens of a sequence reads, at most a window per
    layer."""
    layers = (m for m in model.modules() if isinstance(m, Attention))
    return sum(m.cache_width * min(tokens, m.window or tokens) for m in layers)


def _random_ids(model: Decoder, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.embed.token.num_embeddings, (batch, length), generator=generator)


def _text(size: int) -> str:
    """The first `size` characters of the training files of Python's standard library."""
    text = ""
    for document in collect_corpus(["stdlib"]).train:
        text += "".join(document.text())
        if len(text) >= size:
            break
    return text[:size]

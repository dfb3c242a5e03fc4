"""The verbs. Each docstring is the verb's help; each body imports what it needs."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Out = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]


def _open(metavar: str, without: str = "chosen") -> Any:
    """What help shows of an option that may be left out, and what is done without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({without})")


Family = Literal["arcee", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt2"]
Kind = Literal["bpe", "bytes", "chars"]
Dtype = Literal["float32", "bfloat16", "float16"]
Device = Annotated[Literal["cpu", "cuda", "mps"] | None, _open("cpu|cuda|mps", "the fastest there is")]


def train(
    sources: Annotated[tuple[str, ...], tyro.conf.Positional, _open("SOURCE", "needed")] = (),
    *,
    out: Annotated[Path | None, _open("RUN", "needed")] = None,
    minutes: Annotated[float | None, _open("MINUTES", "15")] = None,
    steps: Annotated[int | None, _open("STEPS", "as many as fit the minutes")] = None,
    size: Annotated[str | None, _open("SIZE|DEPTHxWIDTH")] = None,
    context: Annotated[int | None, _open("TOKENS")] = None,
    batch: Annotated[int | None, _open("WINDOWS")] = None,
    family: Annotated[Family | None, _open("|".join(get_args(Family)), "arcee")] = None,
    tokenizer: Annotated[Kind | None, _open("bpe|bytes|chars", "bpe")] = None,
    vocab: Annotated[int | None, _open("TOKENS", "4096")] = None,
    lr: Annotated[float | None, _open("RATE", "0.02")] = None,
    split: Annotated[
        Literal["files", "tails"] | None, _open("files|tails", "files; of a single one tails")
    ] = None,
    text_field: Annotated[tuple[str, ...], _open("FIELD", "text, or what a conversation says")] = (),
    follow_links: bool = False,
    seed: Annotated[int | None, _open("NUMBER", "0")] = None,
    device: Device = None,
    dry_run: bool = False,
    resume: bool = False,
    override: Annotated[tuple[str, ...], _open("FIELD", "none")] = (),
    quiet: bool = False,
    strict: bool = False,
    profile: bool = False,
    tensorboard: bool = False,
) -> int:
    """Train a model from scratch on files and folders.

    Say how many minutes there are; size, batch and context follow from them, the text and this machine.

    Example: dunes train ~/code/project --out runs/project --minutes 15

    Args:
        sources: Files and folders of text, JSON lines or parquet; `stdlib` names the running Python's standard
            library.
        out: Folder of the run; the model comes to lie there.
        minutes: End after so many minutes.
        steps: End after so many steps instead.
        size: Parameters, like 500k or 3m, or layers and their width, like 4x256.
        context: Tokens that the model looks at.
        batch: Windows of that many tokens in a step.
        family: Architecture.
        tokenizer: What a token is.
        vocab: Vocabulary size of a bpe tokenizer.
        lr: Peak learning rate of matrices (Muon); embeddings, head and norms (AdamW) get half of it.
        split: Hold out whole files for validation, or the tails of all files.
        text_field: Field of records to learn from; several are put together.
        follow_links: Read what links in the sources lead to, outside of them, too.
        seed: Another seed, another run.
        device: What to compute on.
        dry_run: Say what would be done and what memory it takes, and do nothing.
        resume: Go on with the run in --out where it stopped; what was chosen then stays.
        override: Fields that may be others than the run's when going on, of minutes, steps, sources and
            corpus; threads, dtype and device are chosen anew.
        quiet: Print warnings and results only.
        strict: Stop when a save fails, and do not go back past a damaged state.
        profile: Say at the end where the time went: text, data, first step, steps, checks, saves.
        tensorboard: Show metrics and samples in TensorBoard, too: tensorboard --logdir RUN.
    """
    from dunes.runs.progress import Display
    from dunes.runs.train import train as run
    from dunes.runs.train_config import TrainConfig, size_fields

    if out is None and not dry_run:
        raise ValueError("--out is missing; name a folder for the run")
    asked: dict[str, Any] = {
        "sources": sources or None,
        "minutes": minutes,
        "steps": steps,
        "context": context,
        "batch": batch,
        "family": family,
        "tokenizer": tokenizer,
        "vocab": vocab,
        "lr": lr,
        "split": split,
        "text_field": text_field or None,
        "follow_links": follow_links or None,
        "seed": seed,
        "device": device,
    }
    asked |= size_fields(size) if size else {}
    given = {name: value for name, value in asked.items() if value is not None}
    plan = TrainConfig(**{"sources": ()} | given)
    folder = out or Path("runs/none")
    how: dict[str, Any] = {"override": override, "strict": strict, "dry": dry_run}
    how |= {"profile": profile, "tensorboard": tensorboard}
    return run(plan, folder, Display(quiet=quiet and not dry_run), resume, asked=given, **how)


Method = Literal["full", "lora", "rslora", "dora", "pissa", "qlora", "qdora", "qlora-int8"]
Speech = Literal["plain", "alpaca", "alpaca-newline", "mistral", "llama2", "llama3", "chatml"]


def finetune(
    model: Annotated[str | None, tyro.conf.Positional, _open("MODEL", "needed")] = None,
    *,
    data: Annotated[Path | None, _open("FILE|FOLDER", "needed")] = None,
    text_field: Annotated[tuple[str, ...], _open("FIELD", "by the kind of records")] = (),
    follow_links: bool = False,
    out: Annotated[Path | None, _open("RUN", "needed")] = None,
    method: Annotated[Method | None, _open("|".join(get_args(Method)), "lora")] = None,
    where: Annotated[tuple[str, ...], _open("GLOB", "all linear maps in the blocks; full: everything")] = (),
    rank: Annotated[int | None, _open("RANK", "16")] = None,
    alpha: Annotated[float | None, _open("ALPHA", "32")] = None,
    ranks: Annotated[tuple[str, ...], _open("GLOB=RANK", "none")] = (),
    dropout: Annotated[float | None, _open("SHARE", "0")] = None,
    lr: Annotated[float | None, _open("RATE", "by method and width")] = None,
    epochs: Annotated[float | None, _open("EPOCHS", "3")] = None,
    steps: Annotated[int | None, _open("STEPS", "as many as the epochs are")] = None,
    minutes: Annotated[float | None, _open("MINUTES", "by epochs")] = None,
    batch: Annotated[int | None, _open("ROWS")] = None,
    at_once: Annotated[int | None, _open("ROWS", "as many as fit memory")] = None,
    context: Annotated[int | None, _open("TOKENS", "as the longest example")] = None,
    template: Annotated[Speech | None, _open("|".join(get_args(Speech)), "the model's own, or by data")] = None,
    train_on: Annotated[Literal["answers", "all"] | None, _open("answers|all", "answers")] = None,
    valid: Annotated[Path | None, _open("FILE", "a part of the data")] = None,
    held_out: Annotated[float | None, _open("SHARE", "0.05")] = None,
    truncated: Annotated[float | None, _open("SHARE", "0.05")] = None,
    domain: Annotated[tuple[str, ...], _open("SOURCE", "what the base's own training held out")] = (),
    seed: Annotated[int | None, _open("NUMBER", "0")] = None,
    device: Device = None,
    unpacked: bool = False,
    show: int = 0,
    dry_run: bool = False,
    resume: bool = False,
    override: Annotated[tuple[str, ...], _open("FIELD", "none")] = (),
    quiet: bool = False,
    strict: bool = False,
    profile: bool = False,
    tensorboard: bool = False,
) -> int:
    """Teach a model from examples: instructions, chats, prompts and completions, or plain text.

    Before the first step it is said what the examples are and what would go wrong with them; in the end, what
    was learned, what was forgotten, and how it answers, beside how the base did.

    Example: dunes finetune runs/project --data alpaca.json --out runs/helper

    Args:
        model: A model folder, or a name on the Hub.
        data: JSON list, JSON lines or parquet: Alpaca, messages, ShareGPT, UltraChat, prompt and completion, text;
            plain text; or a folder of such files.
        text_field: Field of records to read as plain text; several are put together.
        follow_links: Read what links in a folder lead to, outside of it, too.
        out: Folder of the run; the adapter, or with full the model, comes to lie there.
        method: What is trained beside the frozen base; or all of it (full).
        where: Places of the adapter, or what is trained with full; ! excludes, the last match wins.
        rank: Of the adapter's matrices.
        alpha: The adapter's scale is alpha / rank.
        ranks: Other ranks for some places.
        dropout: Before the adapter.
        lr: Learning rate.
        epochs: How often the examples are met.
        steps: End after so many steps instead.
        minutes: End after so many minutes instead.
        batch: Rows in a step.
        at_once: Rows of these that are computed together.
        context: Tokens in a row.
        template: How a conversation is written; it travels with the model.
        train_on: Answers only, or prompts, too.
        valid: Examples of their own for validation.
        held_out: Else, the share of the data that is kept for it.
        truncated: The share of the examples that may be cut at the end of a row.
        domain: Files and folders of what the base knows, to measure what it forgets.
        seed: Another seed, another run.
        device: What to compute on.
        unpacked: One example in a row, not as many as fit.
        show: Print so many examples, in colours that tell what is trained on.
        dry_run: Report on the examples and the memory that it takes, and do nothing.
        resume: Go on with the run in --out where it stopped; what was chosen then stays.
        override: Fields that may be others than the run's when going on, of minutes and steps, and where model,
            data, valid and domain were moved to; threads, dtype and device are chosen anew.
        quiet: Print warnings and results only.
        strict: Stop when a save fails, and do not go back past a damaged state.
        profile: Say at the end where the time went.
        tensorboard: Show metrics and samples in TensorBoard, too: tensorboard --logdir RUN.
    """
    asked = {k: v for k, v in locals().items() if v is not None and v != ()}
    from dunes.runs.finetune import finetune as run
    from dunes.runs.finetune_config import FinetuneConfig
    from dunes.runs.progress import Display

    if out is None and not dry_run:
        raise ValueError("--out is missing; name a folder for the run")
    apart = (
        "out",
        "show",
        "dry_run",
        "resume",
        "override",
        "quiet",
        "strict",
        "profile",
        "tensorboard",
        "unpacked",
        "follow_links",
    )
    given: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in asked.items() if k not in apart}
    given |= ({"packed": False} if unpacked else {}) | ({"follow_links": True} if follow_links else {})
    how: dict[str, Any] = {"override": override, "strict": strict, "dry": dry_run}
    how |= {"profile": profile, "tensorboard": tensorboard, "examples": show}
    plan, folder = FinetuneConfig(**given), out or Path("runs/none")
    return run(plan, folder, Display(quiet=quiet and not dry_run), resume, asked=given, **how)


def generate(
    model: Model,
    prompt: Annotated[str, tyro.conf.Positional] = "",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    min_p: float | None = None,
    penalty: float = 1.0,
    seed: int = 0,
    any_base: bool = False,
) -> None:
    """Write text, as it comes.

    Example: dunes generate runs/project "def main("

    Args:
        model: A model folder, or a name on the Hub.
        prompt: The text to go on from; nothing begins a new document.
        tokens: How many tokens at most.
        temperature: 0 takes the likeliest token, 1 the model's own odds.
        top_k: Draw from the so many likeliest tokens.
        top_p: Draw from the fewest tokens that together have this probability.
        min_p: Draw from tokens with at least this share of the likeliest one's probability.
        penalty: Above 1, tokens that were there already become less likely.
        seed: Another seed, another text.
        any_base: Let an adapter act on a base that is not proven to be its own.
    """
    from dunes import checkpoint, measure
    from dunes.generate import sampler
    from dunes.plural import plural
    from dunes.runs.write import write

    folder = checkpoint.local(model).folder
    loaded, tokenizer = checkpoint.load_with_tokenizer(folder, measure.device(), any_base)
    sample = sampler(temperature, top_k=top_k, top_p=top_p, min_p=min_p, penalty=penalty, seed=seed)
    print(prompt, end="", flush=True)
    count = 0
    for piece in write(loaded.model, tokenizer, loaded.context_length, prompt, tokens, sample):
        count += 1
        print(piece, end="", flush=True)
    print()
    if count < tokens:
        print(f"the model ended the text after {count} of {plural(tokens, 'token')}", file=sys.stderr)


def chat(
    model: Model,
    message: Annotated[str, tyro.conf.Positional] = "",
    *,
    adapter: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], _open("FOLDER", "none")] = (),
    system: Annotated[str, _open("TEXT", "none")] = "",
    tokens: int = 400,
    temperature: float = 0.7,
    top_k: int | None = 50,
    top_p: float | None = None,
    min_p: float | None = None,
    penalty: float = 1.0,
    seed: int = 0,
    any_base: bool = False,
) -> None:
    """Talk with a model that was trained to answer, in its own template. /help lists the commands.

    Example: dunes chat runs/chat

    Args:
        model: A model folder, an adapter's, or a name on the Hub.
        message: One question, to be answered once; without it a conversation, or a question or a command in each
            line of standard input, with an empty line between answers.
        adapter: An adapter's folder to put on the model; several may be given, and /adapter NAME switches.
        system: What the model is told before the conversation.
        tokens: How many tokens an answer has at most.
        temperature: 0 takes the likeliest token, 1 the model's own odds.
        top_k: Draw from the so many likeliest tokens.
        top_p: Draw from the fewest tokens that together have this probability.
        min_p: Draw from tokens with at least this share of the likeliest one's probability.
        penalty: Above 1, tokens that were there already become less likely.
        seed: Another seed, other answers.
        any_base: Let an adapter act on a base that is not proven to be its own.
    """
    from functools import partial

    from dunes import measure
    from dunes.generate import sampler
    from dunes.runs.chat import Chat, answer, run, speaker

    sample = sampler(temperature, top_k=top_k, top_p=top_p, min_p=min_p, penalty=penalty, seed=seed)
    note = partial(print, file=sys.stderr, flush=True)
    talk = Chat(speaker(model, adapter, measure.device(), any_base), sample, tokens, system, note)
    write = partial(print, end="", flush=True)
    if message:
        answer(talk, message, write)
    elif not sys.stdin.isatty():
        run(talk, sys.stdin, write)
    else:
        note("/help lists the commands")
        run(talk, _typed(), write, interactive=True)


def _typed() -> Iterator[str]:
    """Lines that a person types, until Ctrl-D. Ctrl-C throws the line away."""
    with suppress(ImportError):
        import readline  # noqa: F401  (arrow keys)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def complete(
    model: Model, place: Annotated[str | None, tyro.conf.Positional] = None, *, any_base: bool = False
) -> None:
    """The rest of a line.

    Example: dunes complete runs/project src/main.py:12:9

    Args:
        model: A model folder, or a name on the Hub.
        place: FILE:LINE:COLUMN, both counted from 1, columns in characters (a tab is one); without it, standard
            input is what stands before.
        any_base: Let an adapter act on a base that is not proven to be its own.
    """
    from dunes import checkpoint, measure
    from dunes.runs.write import complete_line, text_before
    from dunes.text.lines import decode_text

    prefix = text_before(place) if place else decode_text(sys.stdin.buffer.read(), "standard input")
    folder = checkpoint.local(model).folder
    loaded, tokenizer = checkpoint.load_with_tokenizer(folder, measure.device(), any_base)
    print(complete_line(loaded.model, tokenizer, loaded.context_length, prefix))


def evaluate(
    model: Model,
    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    text_field: Annotated[tuple[str, ...], _open("FIELD", "as in training")] = (),
    follow_links: bool = False,
    tasks: Annotated[tuple[str, ...], _open("TASK", "none")] = (),
    task_folder: Annotated[Path | None, _open("FOLDER", "none")] = None,
    limit: Annotated[int | None, _open("DOCUMENTS", "all")] = None,
    out: Annotated[Path | None, _open("FILE", "none")] = None,
    any_base: bool = False,
) -> None:
    """Loss in nats a token, perplexity, and bits a byte of raw text; or tasks of lm-evaluation-harness.

    Example: dunes eval runs/project ~/code/other

    Example: dunes eval runs/project --tasks hellaswag,lambada_openai

    Args:
        model: A model folder, or a name on the Hub.
        sources: Files and folders to score; nothing means what the model's training held out.
        text_field: Field of records to score; several are put together.
        follow_links: Read what links in the sources lead to, outside of them, too.
        tasks: Tasks, groups or tags of lm-evaluation-harness, which fetches their data.
        task_folder: Folder with YAML files of more tasks.
        limit: Take only so many documents of each task.
        out: JSON file for the full results of the tasks, every sample among them.
        any_base: Let an adapter act on a base that is not proven to be its own.
    """
    names = [name for part in tasks for name in part.split(",") if name]
    if names:
        _tasks(model, sources, names, task_folder=task_folder, limit=limit, out=out, any_base=any_base)
        return
    if idle := [f"--{k}" for k, v in {"task-folder": task_folder, "limit": limit, "out": out}.items() if v]:
        raise ValueError(f"{idle[0]} is for tasks; name them with --tasks")
    from dunes import checkpoint
    from dunes.plural import plural
    from dunes.runs.score import score_folder

    how = {k: v for k, v in {"text_field": text_field, "follow_links": follow_links}.items() if v}
    score, files = score_folder(checkpoint.local(model).folder, sources, any_base, **how)
    print(
        f"{plural(files, 'file')}, {plural(score.tokens, 'token')}: {score.loss:.4f} nats a token, "
        f"perplexity {score.perplexity:.2f}, {score.bits_per_byte:.4f} bits a byte"
    )


def _tasks(model: str, sources: tuple[str, ...], names: list[str], **options: Any) -> None:
    from dunes import checkpoint
    from dunes.runs.progress import Display
    from dunes.runs.tasks import run_tasks, table

    if sources:
        raise ValueError(f"{sources[0]}: tasks bring their own text; leave out the sources, or --tasks")
    results = run_tasks(checkpoint.local(model).folder, names, Display(), **options)
    print("\n".join(table(results)))
    print(f"full results: {options['out'] or '--out FILE.json keeps them'}")


def inspect(model: Model, values: bool = False) -> int:
    """What a folder of weights holds, what it takes, and whether it would load; nothing is loaded.

    Its files are hashed and compared with the digests in its card, or on the Hub.

    Example: dunes inspect ~/models/Mistral-7B-v0.1

    Args:
        model: A model folder in any form, or a name on the Hub.
        values: Read all numbers, too, and name tensors with odd ones.
    """
    from dunes import checkpoint
    from dunes.checkpoint import inspect as look
    from dunes.checkpoint.folder import settled
    from dunes.checkpoint.opening import about, adapts
    from dunes.checkpoint.source import opened

    folder = checkpoint.local(model, verify=True).folder
    if adapts(folder):
        lines, reason = about(folder, values)
        print("\n".join(lines))
        return 0 if reason is None else 1
    source = opened(settled(folder))
    verdict = look.judged(source)
    for line in look.inspect(source, verdict):
        print(line)
    odd = list(look.values(source.files)) if values else []
    for line in odd:
        print(f"values      {line}")
    if values and not odd:
        print("values      all finite")
    return 1 if verdict.reasons else 0


def convert(
    source: Model,
    out: Out,
    *,
    dtype: Annotated[Dtype | None, _open("float32|bfloat16|float16", "as stored")] = None,
    names: Annotated[Path | None, _open("FILE", "the family's")] = None,
) -> None:
    """Bring weights in from any form, as a verified folder that Hugging Face's tools open.

    Example: dunes convert ~/llama-2-7b-native ~/models/llama-2-7b --dtype bfloat16

    Args:
        source: A model folder in any form, or a name on the Hub.
        out: The new folder.
        dtype: Round the weights.
        names: JSON object that maps foreign names to Hugging Face's, with {i} for a number.
    """
    _convert(source, out, dtype, names)


def export(
    model: Model,
    out: Out,
    *,
    to: Annotated[str, _open("FORMAT", "hf")] = "hf",
    dtype: Annotated[Dtype | None, _open("float32|bfloat16|float16", "as stored")] = None,
) -> None:
    """Take a model out, verified, as a plain Hugging Face folder.

    Example: dunes export runs/project ~/models/project --to hf

    Args:
        model: A model folder, or a name on the Hub.
        out: The new folder.
        to: The format: hf (Hugging Face's).
        dtype: Round the weights.
    """
    if to != "hf":
        raise ValueError(
            f"--to {to[:80]!a}: the one format is hf; Mistral's and Meta's own files are read, not written"
        )
    _convert(model, out, dtype)


def _convert(model: str, out: Path, dtype: str | None, names: Path | None = None) -> None:
    import math
    from time import monotonic

    import torch

    from dunes import checkpoint
    from dunes.checkpoint.convert import convert, table
    from dunes.checkpoint.folder import checked
    from dunes.runs.progress import Display, duration

    found = checkpoint.local(model, verify=True)
    source = checked(found.folder, None if names is None else table(names), math.inf)
    kind, start = None if dtype is None else getattr(torch, dtype), monotonic()
    with Display() as display:

        def show(what: str, share: float) -> None:
            left = (monotonic() - start) * (1 / share - 1)
            display.state(f"{what}, {duration(left)} left", share)

        verified = convert(source, out, dtype=kind, facts=found.origin, show=show)
    print(f"{out}: {verified.verdict}; {verified}")
    print(f'next: dunes generate {out} "..."')


def augment() -> None:
    """Change models from folder to folder (`dunes augment -h` has its commands)."""


def bench() -> None:
    """Measure: time, memory, where they go; compare and draw (`dunes bench -h` has its commands)."""

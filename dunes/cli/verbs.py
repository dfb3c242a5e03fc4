"""The verbs of the command line. Help shows the functions' docstrings. A function imports its modules when it is
called, so that help is fast."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from dunes.checkpoint.formats import FORMATS, Blocks, check_choice
from dunes.cli.process import drop_lost_output
from dunes.flags import Dtype, flag, parse_fields
from dunes.generate.sampling import SamplingOptions

if TYPE_CHECKING:
    from dunes.checkpoint.open import OpenedModel
    from dunes.parts import CacheFormat

Model = Annotated[
    str, tyro.conf.Positional, flag("MODEL", about="A model or adapter folder, or a name on the Hub.")
]
Out = Annotated[Path, tyro.conf.Positional, flag("OUT", about="Output folder.")]
Round = Annotated[Dtype | None, flag("|".join(get_args(Dtype)), "as stored", "Dtype of the written weights.")]
AnyBase = Annotated[bool, tyro.conf.arg(help="Use an adapter even if its base cannot be verified.")]
CacheBits = Annotated[Literal["int8", "int4", "int2"] | None, flag("int8|int4|int2", "full")]
CHAT = SamplingOptions(temperature=0.7, max_tokens=400)


@contextmanager
def _quick_imports() -> Iterator[None]:
    """Inside the `with` block, turn off garbage collection, which takes a quarter of the start-up time.

    Later garbage collections skip the objects created in the block.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def generate(
    model: Model,
    sampling: SamplingOptions,
    prompt: Annotated[str, tyro.conf.Positional, flag("PROMPT", "none")] = "",
    *,
    lookup: bool = False,
    draft: Annotated[str | None, flag("MODEL", "none")] = None,
    cache: CacheBits = None,
    any_base: AnyBase = False,
) -> int:
    """Generate text, and print it while it is generated.

    At the end, prints the speeds of prefill (up to the first token) and of decoding to standard error.

    Example: dunes generate runs/project "def main("

    Args:
        prompt: The text to continue; without one, a new document is generated.
        lookup: Speculative decoding by prompt lookup, for repetitive text; the output is the same.
        draft: Speculative decoding with a smaller model that has the same tokenizer; the output distribution is
            the same.
        cache: For long texts, quantize the KV cache except its last tokens; this needs less memory, but is slower.
    """
    with _quick_imports():
        from dunes import checkpoint, measure
        from dunes.checkpoint.open import round_for_speed
        from dunes.generate.decode_packages import step_source
        from dunes.inference.text_generator import TextGenerator, describe_generation

    sample, tokens = sampling.sampler(), sampling.max_tokens
    measure.keep_freed_memory()
    folder = checkpoint.locate_model(model).folder
    loaded = round_for_speed(checkpoint.load_with_tokenizer(folder, measure.device(), any_base))
    generator = TextGenerator(loaded, step_source(loaded.model), _cache_format(cache))
    small = None
    if draft is not None:
        small = checkpoint.load_with_tokenizer(checkpoint.locate_model(draft).folder, measure.device())
    proposer = generator.proposer(lookup, small)
    print(prompt, end="", flush=True)
    ids, times, status = generator.tokenizer.prompt(prompt), [perf_counter()], 0
    try:
        for piece in generator.stream(ids, tokens, sample, proposer=proposer):
            times.append(perf_counter())
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        status = 130
    if times[1:] or not status:
        print()
    for line in describe_generation(generator, len(ids), times, None if status else tokens):
        print(line, file=sys.stderr)
    if times[1:] and proposer is not None:
        print(generator.describe_forwards(len(times) - 1), file=sys.stderr)
    return status


def chat(
    model: Model,
    message: Annotated[str, tyro.conf.Positional, flag("MESSAGE", "none")] = "",
    sampling: SamplingOptions = CHAT,
    *,
    adapter: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], flag("FOLDER", "none")] = (),
    system: Annotated[str, flag("TEXT", "none")] = "",
    cache: CacheBits = None,
    any_base: AnyBase = False,
) -> None:
    """Chat with a model, using its chat template. /help lists the commands.

    Example: dunes chat runs/chat

    Args:
        message: A single question. Without it, chat interactively, or answer each line of standard input, with
            an empty line between answers.
        adapter: Adapter folder to load on the model; may be repeated, and /adapter NAME switches.
        system: System prompt.
        cache: For long texts, quantize the KV cache except its last tokens; this needs less memory, but is slower.
    """
    with _quick_imports():
        from dunes import measure
        from dunes.inference.chat import Chat, answer, load_chat_engine, run

    measure.keep_freed_memory()
    sample = sampling.sampler()
    note = partial(print, file=sys.stderr, flush=True)
    compiles = not message and sys.stdin.isatty()
    engine = load_chat_engine(model, adapter, measure.device(), any_base, compiles, _cache_format(cache))
    talk = Chat(engine, sample, sampling.max_tokens, system, note)
    write = partial(print, end="", flush=True)
    if message:
        answer(talk, talk.say(message), write)
    elif not sys.stdin.isatty():
        run(talk, sys.stdin, write)
    else:
        note("/help lists the commands")
        run(talk, _input_lines(), write, interactive=True)


def _cache_format(bits: str | None) -> "CacheFormat | None":
    """The format of a KV cache of `bits`, or None. With `bits`, prints a note that decoding is not compiled."""
    if bits is None:
        return None
    from dunes.parts import CacheFormat

    print(f"--cache {bits}: compiled decoding is off, since it needs unquantized keys and values", file=sys.stderr)
    return CacheFormat(int(bits.removeprefix("int")))


def _input_lines() -> Iterator[str]:
    """Yields lines typed in a terminal until Ctrl-D; Ctrl-C discards a line."""
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


def compile_(
    model: Model,
    *,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None, flag("DTYPE", "as exact as float32")
    ] = None,
    any_base: AnyBase = False,
) -> None:
    """Compile the decoding of a model for this machine, to make generate and chat faster.

    The result is used for every model of this shape, and is stored in $DUNES_HOME or the user's cache folder.
    Compiling takes one to five minutes, and needs a C++ compiler (install g++).

    Example: dunes compile ~/models/mistral

    Args:
        dtype: Dtype of the weights; computation is in float32. By default, float32 weights are rounded to bfloat16
            or float16: the faster of those that generate the same text.
    """
    import torch

    from dunes import checkpoint
    from dunes.checkpoint.open import round_for_speed
    from dunes.generate.decode_packages import compile_step

    drop_lost_output()
    start = perf_counter()
    loaded = round_for_speed(checkpoint.load(checkpoint.locate_model(model).folder, any_base=any_base))
    package, choice = compile_step(loaded.model, loaded.context_length, getattr(torch, dtype) if dtype else None)
    print(f"compiled: {perf_counter() - start:.0f} s, {str(choice).removeprefix('torch.')} weights, {package}")
    print(f'next: dunes generate {quote(str(model))} "..."')


def complete(
    model: Model,
    place: Annotated[str | None, tyro.conf.Positional, flag("FILE:LINE:COLUMN", "standard input")] = None,
    *,
    json: bool = False,
    any_base: AnyBase = False,
) -> None:
    """Complete a line of code or text, up to the text after the cursor; the context includes the lines below.

    While a run trains, or after it was stopped, lines are completed by copying from the training files. If a
    `dunes serve` with this model is running, it completes the line in a tenth of the time.

    Example: dunes complete runs/project src/main.py:12:9

    Args:
        place: Cursor position as FILE:LINE:COLUMN. Line and column count from 1; a column is a character (a tab is
            one). Without a position, the text before the cursor is read from standard input.
        json: Print a JSON object with the text, its source (model or copies), the probability that the first word
            is right, and the probability that the whole text is right.
    """
    from dataclasses import asdict
    from json import dumps

    from dunes.serve.client import complete_by_server
    from dunes.text.lines import decode_text, text_around_cursor

    path, after = None, ""
    if place:
        path, before, after = text_around_cursor(place)
    else:
        before = decode_text(sys.stdin.buffer.read(), "standard input")
    suggestion = complete_by_server(Path(model), before, after, path)
    if suggestion is None:
        with _quick_imports():
            from dunes import checkpoint, measure
            from dunes.completion.completer import find_completer, name_in_sources

        measure.keep_freed_memory()
        folder = checkpoint.locate_model(model).folder
        completer = find_completer(folder, lambda line: print(line, file=sys.stderr), any_base)
        name = name_in_sources(path, folder) if path else ""
        suggestion = asdict(completer.complete(before, after, name))
        del suggestion["ends_line"]  # the server's suggestion has no such field
    print(dumps(suggestion) if json else suggestion["text"])
    if not json and not suggestion["text"]:
        print("no suggestion at this position; --json prints the probabilities", file=sys.stderr)


def evaluate(
    model: Model,
    sources: Annotated[
        tuple[str, ...], tyro.conf.Positional, flag("SOURCE", "the validation split of the model's training")
    ] = (),
    *,
    text_field: Annotated[tuple[str, ...], flag("FIELD", "as in training")] = (),
    fields: Annotated[tuple[str, ...], flag("OURS=THEIRS,...", "none")] = (),
    follow_links: bool = False,
    tasks: Annotated[tuple[str, ...], flag("TASK", "none")] = (),
    task_folder: Annotated[Path | None, flag("FOLDER", "none")] = None,
    limit: Annotated[int | None, flag("DOCUMENTS", "all")] = None,
    completion: bool = False,
    lines: Annotated[int | None, flag("LINES", "12")] = None,
    all_lines: bool = False,
    out: Annotated[Path | None, flag("FILE", "none")] = None,
    any_base: AnyBase = False,
) -> None:
    """Evaluate on text (loss in nats/token, perplexity, bits/byte), on tasks of lm-eval, or on line completion.

    Example: dunes eval runs/project ~/code/other

    Example: dunes eval runs/project --completion

    Example: dunes eval runs/project --tasks hellaswag,lambada_openai

    Args:
        sources: Files and folders to evaluate on, or hf:ORG/NAME[/CONFIG][:SPLIT][@REVISION], data of the Hub.
        text_field: Fields of each record to evaluate on; several are joined by a blank line.
        fields: Pairs of a field's name in finetune's formats and its name in the records, like prompt=question.
        follow_links: Follow symbolic links that lead outside the sources.
        tasks: Tasks, groups or tags of lm-evaluation-harness, which downloads their data.
        task_folder: Folder with YAML files of additional tasks.
        limit: Maximum number of documents per task, or of files with --completion.
        completion: Evaluate completion of lines in unseen files, by the model and by copying alone: exact matches,
            saved keystrokes, latency.
        lines: With --completion, number of lines per file for which typing is simulated key by key.
        all_lines: With --completion, include lines that are similar to training lines.
        out: JSON file for the full results of the tasks, including every sample.
    """
    names = [name for part in tasks for name in part.split(",") if name]
    text: dict[str, Any] = {"text_field": text_field, "names": parse_fields(fields), "follow_links": follow_links}
    text = {k: v for k, v in text.items() if v}
    if completion:
        of_tasks = {"tasks": names, "task-folder": task_folder, "out": out}
        if unsupported := [f"--{name}" for name, value in of_tasks.items() if value]:
            raise ValueError(f"{unsupported[0]}: not with --completion; omit one of them")
        _completion(model, sources, lines, all_lines, files=limit, any_base=any_base, **text)
        return
    if all_lines or lines is not None:
        unused = "lines" if lines is not None else "all-lines"
        raise ValueError(f"--{unused} applies to line completion; pass --completion too")
    if names:
        _tasks(model, sources, names, task_folder=task_folder, limit=limit, out=out, any_base=any_base)
        return
    of_harness = {"task-folder": task_folder, "limit": limit, "out": out}
    if unsupported := [f"--{name}" for name, value in of_harness.items() if value is not None]:
        raise ValueError(f"{unsupported[0]} applies to tasks; select tasks with --tasks")
    from dunes import checkpoint
    from dunes.evaluate.text_loss import score_folder
    from dunes.units import plural

    score, files = score_folder(checkpoint.locate_model(model).folder, sources, any_base, **text)
    print(
        f"{plural(files, 'file')}, {plural(score.tokens, 'token')}: {score.loss:.4f} nats/token, "
        f"perplexity {score.perplexity:.2f}, {score.bits_per_byte:.4f} bits/byte"
    )


def _completion(model: str, sources: tuple[str, ...], lines: int | None, all_lines: bool, **options: Any) -> None:
    from dunes import checkpoint
    from dunes.evaluate.completion import CompletionOptions, evaluate_completion

    settings = CompletionOptions(all_lines=all_lines)
    settings = settings if lines is None else replace(settings, lines=lines)
    evaluate_completion(checkpoint.locate_model(model).folder, sources, settings, **options)


def _tasks(model: str, sources: tuple[str, ...], names: list[str], **options: Any) -> None:
    from dunes import checkpoint
    from dunes.evaluate.tasks import run_tasks, table
    from dunes.progress import Display

    if sources:
        raise ValueError(f"{sources[0]}: tasks use their own text; omit the sources, or --tasks")
    results = run_tasks(checkpoint.locate_model(model).folder, names, Display(), **options)
    print("\n".join(table(results)))
    print(f"full results: {options['out'] or 'save them with --out FILE.json'}")


def inspect(
    model: Model,
    values: bool = False,
    layers: bool = False,
    example: Annotated[tuple[int, ...], flag("SIZE", "a text of 64 tokens")] = (),
) -> int:
    """Show a model folder's contents, memory needs and problems in loading, without loading the model.

    The files are hashed and compared with the digests in the model's card, or on the Hub.

    Example: dunes inspect ~/models/Mistral-7B-v0.1

    Example: dunes inspect runs/digits --layers --example 1 28 28

    Args:
        values: Also read all values, and report tensors with NaN, infinite or otherwise suspicious values.
        layers: Print a table of all modules, with shapes, parameters, FLOPs and memory.
        example: With --layers, sizes of the model's input, including the batch size. Without --example, only
            tables of language models have shapes and FLOPs.
    """
    from dunes import checkpoint
    from dunes.checkpoint import inspect as inspection
    from dunes.checkpoint.inspect import describe_adapter
    from dunes.checkpoint.open import is_adapter, readable_folder

    folder = checkpoint.locate_model(model).folder
    if is_adapter(folder):
        if layers or example:
            raise ValueError(f"{folder}: an adapter has no table of layers; inspect its base with --layers")
        lines, reason = describe_adapter(folder, values)
        print("\n".join(lines))
        return 0 if reason is None else 1
    source = inspection.open_to_describe(readable_folder(folder))
    verdict = inspection.judge(source)
    for line in inspection.describe_folder(source, verdict):
        print(line)
    odd = list(inspection.odd_values(source.files)) if values else []
    for line in odd:
        print(f"values      {line}")
    if values and not odd:
        print("values      all finite")
    if layers or example:
        _print_layers(source, example)
    return 1 if verdict.reasons else 0


def _print_layers(source: "OpenedModel", sizes: tuple[int, ...]) -> None:
    """Print a table of a model's modules. A language model runs on token ids, other networks on random numbers."""
    import torch

    from dunes import tree
    from dunes.parts import Decoder

    if any(size < 1 for size in sizes):
        raise ValueError(f"--example {' '.join(map(str, sizes))}: expected sizes of at least 1")
    model: torch.nn.Module = source.outline()
    if isinstance(model, Decoder):
        example = [torch.zeros(sizes or (1, min(64, source.context_length)), dtype=torch.long)]
    else:
        example = [torch.rand(sizes)] if sizes else []
    tree.print_layers(tree.layers(model, *example))


def convert(
    source: Model,
    out: Out,
    *,
    dtype: Round = None,
    names: Annotated[Path | None, flag("FILE", "the family's")] = None,
) -> None:
    """Convert weights of any format into a verified folder that Hugging Face's tools can open.

    Example: dunes convert ~/llama-2-7b-native ~/models/llama-2-7b --dtype bfloat16

    Args:
        names: JSON file that maps tensor names in the source to Hugging Face's names; {i} stands for a number.
    """
    drop_lost_output()
    _convert(source, out, dtype, names)


_LISTED = ", ".join(f"{name} ({form.about})" for name, form in FORMATS.items())


def export(
    model: Model,
    out: Out,
    *,
    to: Annotated[
        str | None, flag("FORMAT", "by OUT's suffix, else hf", f"Format: hf (Hugging Face), {_LISTED}.")
    ] = None,
    dtype: Annotated[
        Dtype | Blocks | None, flag("|".join(get_args(Dtype) + get_args(Blocks)), "as stored")
    ] = None,
    example: Annotated[tuple[int, ...], flag("SIZE", "none")] = (),
) -> None:
    """Write a model as a verified plain Hugging Face folder, or in a format of another program.

    Example: dunes export runs/project ~/models/project.gguf --to gguf --dtype q8_0

    Example: dunes export runs/digits digits-native --to cpp --example 1 28 28

    Args:
        dtype: Dtype of the written weights; q8_0 and q4_0 are for gguf.
        example: With cpp or onnx, the input sizes (with batch size) of a network that is no language model.
    """
    drop_lost_output()
    to = to or next((name for name, form in FORMATS.items() if out.suffix == form.suffix != ""), "hf")
    check_choice(to, dtype)
    from dunes import checkpoint
    from dunes.checkpoint.export import check_example, write_format

    folder = checkpoint.locate_model(model).folder
    check_example(folder, to, dtype, example)
    if to == "hf":
        _convert(model, out, dtype)
    else:
        print(f"{out}: {write_format(folder, out, to, dtype, example)}")


def _convert(model: str, out: Path, dtype: str | None, names: Path | None = None) -> None:
    import math

    import torch

    from dunes import checkpoint
    from dunes.checkpoint.convert import convert, read_name_table
    from dunes.checkpoint.export import export, is_plain
    from dunes.checkpoint.open import open_verified_model
    from dunes.progress import Display, shown_by

    location = checkpoint.locate_model(model)
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    if not is_plain(location.folder) and names is None:
        print("\n".join(export(location.folder, out, dtype=torch_dtype).lines()))
    else:
        source = open_verified_model(location.folder, None if names is None else read_name_table(names), math.inf)
        with Display() as display, shown_by(display.time_left):
            verified = convert(source, out, dtype=torch_dtype, facts=location.origin)
        print(f"{out}: {verified.verdict}; {verified}")
    print(f'next: dunes generate {quote(str(out))} "..."')


def augment() -> None:
    """Modify models: merge adapters, quantize (`dunes augment -h` lists the commands)."""


def bench() -> None:
    """Benchmark time and memory, profile, compare and plot (`dunes bench -h` lists the commands)."""

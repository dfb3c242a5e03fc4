"""dunes against transformers and llama.cpp on published weights: decoding, prefill, and the loss of each form.

    python benchmarks/real_model.py ~/models/SmolLM2-135M-Instruct held-out.txt --out /tmp/forms
    python benchmarks/real_model.py runs/tiny held-out.txt --no-compiled --threads 1 --rounds 1

One text, greedy, equal prompts of ids. `int8` and `int4` are `dunes augment quantize` without calibration; their
heads stay bfloat16, those of q8_0 and q4_0 are q8_0. Each form is a process of its own, which is asked in turn
with the others (A B C A B C), so that all meet the same load; rates are medians of the rounds. "Of processors" are
tokens per second of processor time of all threads, which other work on the machine disturbs less.

ours: the modules, and the steps of `dunes compile`. transformers: a loop over its forward with its dynamic cache,
which is faster than its `generate`. llama.cpp: the server of xllamacpp with the rates that it reports itself, so
that HTTP costs it nothing; flash attention (10.4 tokens/s with, 9.6 without), and weights repacked for this
processor or not (`no_extra_bufts`), of which the faster counts. GGUF files are written by dunes.

The loss (nats/token) is of windows of held-out text. It is computed by each of our forms and by transformers
itself. llama.cpp's server does not return the probabilities of given ids: its loss is that of the dequantized file
in float32, and leaves out that llama.cpp rounds activations to 8 bits.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal

from dunes import checkpoint, measure
from dunes.augment import quantize
from dunes.generate import PrefixCache, generate
from dunes.generate.decode import text_logprobs
from dunes.generate.decode_packages import compile_step, load_step
from dunes.generate.prefix_cache import common_length

import torch
import tyro

run = partial(subprocess.run, check=True)
KINDS = {"bfloat16": "bfloat16", "int8": "q8_0", "int4": "q4_0"}
"""Our kinds of weights, and llama.cpp's of as many bits."""
SERVERS = {"repacked": False, "as stored": True}
"""llama.cpp's settings: `no_extra_bufts`."""
WINDOW, FEW = 256, 4
Row = dict[str, Any]
Answer = Callable[[Sequence[int], int], tuple[float, float, list[int]]]
"""Generates so many ids after a prompt: seconds until the first, seconds of the others, and the ids."""
Loss = Callable[[Sequence[Sequence[int]]], float]


def main(
    model: Path,
    text: Path,
    /,
    out: Path | None = None,
    kinds: tuple[Literal["bfloat16", "int8", "int4"], ...] = ("bfloat16", "int8", "int4"),
    peers: tuple[Literal["transformers", "llama.cpp"], ...] = ("transformers", "llama.cpp"),
    threads: tuple[int, ...] = (1, 2),
    rounds: int = 5,
    prompt: int = 32,
    new: int = 64,
    prefill: int = 512,
    scored: int = 2048,
    compiled: bool = True,
) -> None:
    """Race.

    Args:
        model: A Hugging Face folder.
        text: A file that the model was not trained on.
        out: Folder for the written forms, which a later run reads again; by default a temporary one.
        kinds: Weights of the linear layers; llama.cpp gets files with as many bits.
        peers: The others.
        threads: Numbers of threads.
        rounds: Laps of each form.
        prompt: Tokens before those that are decoded.
        new: Decoded tokens.
        prefill: Tokens of the prompt whose prefill is timed.
        scored: Tokens of the text whose loss is measured.
        compiled: Compile our steps, too (minutes, unless they are kept).
    """
    with tempfile.TemporaryDirectory() as folder:
        forms = write_forms(model, out or Path(folder), kinds, peers)
        tokenizer = checkpoint.load(model).require_tokenizer()
        ids = tokenizer.encode(text.read_text())
        work = {"short": ids[:prompt], "long": ids[:prefill], "new": new}
        starts = range(prefill, prefill + scored, WINDOW)
        held_out = [ids[start : start + WINDOW] for start in starts]
        rates = {n: race(racers(forms, n, compiled), work, rounds) for n in threads}
        losses = {name: ask_alone(make, ("loss", held_out)) for name, make in scorers(forms, compiled).items()}
    figures = {f"{n} threads": best_settings(rows) for n, rows in rates.items()}
    report(figures, losses)
    work |= {"short": prompt, "long": prefill, "scored": len(held_out) * (WINDOW - 1)}
    print(json.dumps({"benchmark": f"real model {model.name}", **measure.fingerprint(), "work": work,
                      "loss": losses, **figures}))  # fmt: skip


def write_forms(model: Path, out: Path, kinds: Sequence[str], peers: Sequence[str]) -> dict[str, Path]:
    """The folders and files of all forms by name, written unless they exist."""
    out.mkdir(parents=True, exist_ok=True)
    half = out / "bfloat16"
    forms = {f"ours {kind}": half for kind in kinds}
    forms |= {"transformers bfloat16": half} if "transformers" in peers else {}
    theirs = [KINDS[kind] for kind in kinds if "llama.cpp" in peers]
    forms |= {f"llama.cpp {kind}": out / f"{kind}.gguf" for kind in theirs}
    if not half.exists():
        run((sys.executable, "-m", "dunes", "convert", str(model), str(half), "--dtype", "bfloat16"))
    for kind in theirs:
        if not (out / f"{kind}.gguf").exists():
            options = ("--to", "gguf", "--dtype", kind)
            run((sys.executable, "-m", "dunes", "export", str(half), str(out / f"{kind}.gguf"), *options))
    return forms


def scorers(forms: dict[str, Path], compiled: bool) -> dict[str, Callable[[], Row]]:
    """What makes each form's loss; the dequantized file for llama.cpp."""
    made: dict[str, Callable[[], Row]] = {}
    for name, path in forms.items():
        if name.startswith("ours"):
            kind, settings = name.partition(" ")[2], ("modules", *["compiled"] * compiled)
            made |= {f"{name} {s}": partial(ours, path, 2, s, kind) for s in settings}
        else:
            made[name] = partial(transformers, path, 2) if name.startswith("tra") else partial(ours, path, 2)
    return made


def racers(forms: dict[str, Path], threads: int, compiled: bool) -> dict[str, Callable[[], Row]]:
    """What makes each form's answers, all settings of llama.cpp's among them."""
    made = {k: make for k, make in scorers(forms, compiled).items() if not k.startswith("llama")}
    made = {k: partial(make.func, make.args[0], threads, *make.args[2:]) for k, make in made.items()}
    servers = [name for name in forms if name.startswith("llama")]
    return made | {f"{n}, {s}": partial(llama_cpp, forms[n], threads, s) for n, s in product(servers, SERVERS)}


def ours(path: Path, threads: int, setting: str = "dequantized", kind: str = "bfloat16") -> Row:
    torch.set_num_threads(threads)
    loaded = checkpoint.load(path)
    if kind != "bfloat16":
        quantize(loaded.model, kind=kind)
    model, context, step = loaded.model.eval(), loaded.context_length, None
    if setting == "dequantized":
        model = model.float()
    if setting == "compiled":
        dtype = next(model.parameters()).dtype
        compile_step(model, context, dtype)
        step = load_step(model, dtype)
        assert step is not None, "the package was made"

    def answer(ids: Sequence[int], new: int) -> tuple[float, float, list[int]]:
        start, cache = time.perf_counter(), PrefixCache(model, step=step)
        tokens = generate(model, ids, max_tokens=new, context_length=context, cache=cache)
        found = [next(tokens).id]
        first = time.perf_counter()
        found += [token.id for token in tokens]
        return first - start, time.perf_counter() - first, found

    def loss(rows: Sequence[Sequence[int]]) -> float:
        return -sum(map(logprob_of_step if step else logprob, rows)) / sum(len(row) - 1 for row in rows)

    def logprob(row: Sequence[int]) -> float:
        each = zip(text_logprobs(model, row, context), row[1:], strict=True)
        return sum(float(logprobs[id]) for logprobs, id in each)

    def logprob_of_step(row: Sequence[int]) -> float:
        cache, total = PrefixCache(model, step=step), 0.0
        cache.reserve(len(row) + FEW)
        for end in range(FEW, len(row) + FEW - 1, FEW):
            read = row[: min(end, len(row) - 1)]
            scores = cache.scores(read, len(read) - len(cache.ids[0]))
            assert scores is not None, "the step computes a few tokens at once"
            total += sum(s.logprob(id) for s, id in zip(scores, row[len(read) - len(scores) + 1 :], strict=False))
        return total

    return {"answer": answer, "loss": loss}


def transformers(path: Path, threads: int) -> Row:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def answer(ids: Sequence[int], new: int) -> tuple[float, float, list[int]]:
        times, found, cache, given = [time.perf_counter()], list[int](), None, torch.tensor([ids])
        for _ in range(new):
            out = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, given = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(int(given))
            times.append(time.perf_counter())
        return times[1] - times[0], times[-1] - times[1], found

    @torch.inference_mode()
    def loss(rows: Sequence[Sequence[int]]) -> float:
        ids = torch.tensor(rows)
        logits = torch.cat([model(row[None, :-1]).logits.float() for row in ids])
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))

    return {"answer": answer, "loss": loss}


def llama_cpp(path: Path, threads: int, setting: str) -> Row:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.n_parallel = str(path), 2048, 0, 1
    params.n_batch = params.n_ubatch = 512
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.no_extra_bufts, params.verbosity, params.fit_params = SERVERS[setting], -1, False
    server = xllamacpp.Server(params)
    url = f"{server.listening_address.rstrip('/')}/completion"
    ask = {"cache_prompt": False, "temperature": 0, "samplers": ["top_k"], "top_k": 1, "return_tokens": True}

    def answer(ids: Sequence[int], new: int, server: Any = server) -> tuple[float, float, list[int]]:
        data = json.dumps(ask | {"prompt": ids, "n_predict": new, "ignore_eos": True}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        reply = json.load(urllib.request.urlopen(request))
        assert reply["timings"]["prompt_n"] == len(ids), "the whole prompt is read"
        assert reply["timings"]["predicted_n"] == new
        return reply["timings"]["prompt_ms"] / 1e3, reply["timings"]["predicted_ms"] / 1e3, reply["tokens"]

    return {"answer": answer}


def serve(make: Callable[[], Row], connection: Any) -> None:
    """Make a form and answer requests: (function, arguments...) -> seconds of processors and the result."""
    functions = make()
    while request := connection.recv():
        name, *arguments = request
        start = time.process_time()
        result = functions[name](*arguments)
        connection.send((time.process_time() - start, result))


class Form:
    """A form in a process of its own."""

    def __init__(self, make: Callable[[], Row]) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(make, other), daemon=True)
        self.process.start()
        other.close()

    def ask(self, *request: Any) -> Any:
        self.connection.send(request)
        return self.connection.recv()

    def close(self) -> None:
        self.connection.send(None)
        self.process.join(10)
        self.process.kill()


def ask_alone(make: Callable[[], Row], request: Sequence[Any]) -> Any:
    form = Form(make)
    try:
        return form.ask(*request)[1]
    finally:
        form.close()


def race(makes: dict[str, Callable[[], Row]], work: Row, rounds: int) -> dict[str, Row]:
    """Each form's median rates, and the ids that it decoded."""
    forms, laps = {}, {name: list[Row]() for name in makes}
    try:
        for name, make in makes.items():
            forms[name] = Form(make)
            lap(forms[name], work)  # the first answer allocates
        for _ in range(rounds):
            for name, form in forms.items():
                laps[name].append(lap(form, work))
                shown = {k: round(v, 1) for k, v in laps[name][-1].items() if k != "ids"}
                print(name, shown, flush=True)
    finally:
        for form in forms.values():
            form.close()
    return {name: middle_of(rows) for name, rows in laps.items()}


def middle_of(laps: Sequence[Row]) -> Row:
    """The medians of the rates, the best rates, and the ids."""
    best = {f"most {task}": max(row[task] for row in laps) for task in ("decode", "prefill")}
    keys = ("decode", "decode cpu", "prefill", "prefill cpu")
    return {k: median(row[k] for row in laps) for k in keys} | best | {"ids": laps[0]["ids"]}


def lap(form: Form, work: Row) -> Row:
    """Tokens/s, and tokens per second of processors, of which decoding does not count its prompt's."""
    long_cpu, (long, _, _) = form.ask("answer", work["long"], 1)
    short_cpu, _ = form.ask("answer", work["short"], 1)
    cpu, (_, rest, ids) = form.ask("answer", work["short"], work["new"] + 1)
    rates = {"decode": work["new"] / rest, "decode cpu": work["new"] / max(cpu - short_cpu, 1e-9)}
    return rates | {"prefill": len(work["long"]) / long, "prefill cpu": len(work["long"]) / long_cpu, "ids": ids}


def best_settings(rows: dict[str, Row]) -> dict[str, Row]:
    """The rates of each form; of several settings those of the fastest, by decoding and by prefill."""
    forms: dict[str, Row] = {}
    reference = next(row["ids"] for row in rows.values())
    for name in dict.fromkeys(name.partition(", ")[0] for name in rows):
        settings = {k: row for k, row in rows.items() if k.partition(", ")[0] == name}
        form = forms[name] = {}
        for task in ("decode", "prefill"):
            best = max(settings, key=lambda k: settings[k][task])
            form |= {k: rate for k, rate in settings[best].items() if task in k}
            form |= {f"{task} setting": best.partition(", ")[2]} if ", " in best else {}
        ids = next(iter(settings.values()))["ids"]
        form["equal ids"] = common_length(ids, reference, 0)
        form["settings"] = {k.partition(", ")[2]: [row["decode"], row["prefill"]] for k, row in settings.items()}
    return forms


def report(figures: dict[str, dict[str, Row]], losses: dict[str, float]) -> None:
    for title, forms in figures.items():
        print(
            f"\n| {title} | decode | of processors | prefill | of processors | loss | equal ids |\n"
            + "|---" * 7
            + "|"
        )
        for name, row in forms.items():
            cells = [f"{row[k]:,.4g}" for k in ("decode", "decode cpu", "prefill", "prefill cpu")]
            print(f"| {name} | {' | '.join(cells)} | {losses[name]:.4f} | {row['equal ids']} |")


if __name__ == "__main__":
    tyro.cli(main)

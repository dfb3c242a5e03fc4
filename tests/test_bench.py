"""The instrument is right: times, rates, shares, comparisons, tables, pictures. No test depends on real speed."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from adapters import trained
from conftest import display, refuses, toy, write_programs
from dunes import bench, checkpoint, measure
from dunes.augment import apply_change, attach, quantize, set_adapter
from dunes.augment.quantized import NF4
from dunes.bench import benchmarks, rows, runner
from dunes.bench.compare import _critical, compare, hodges_lehmann
from dunes.bench.runner import Lap, race
from dunes.bench.subject import Setting, Work, of_folder, of_shape
from dunes.cli import bench as cli
from dunes.cli.command import run as run_command
from dunes.measure import machine
from dunes.ops import scaled_dot_product as attention
from dunes.parts import Decoder
from dunes.progress import shown_by
from dunes.runs.train import train
from dunes.text import Tokenizer
from dunes.train import Trainer, adamw, cross_entropy
from dunes.train.loss import next_token_loss
from dunes.tree import find

TINY = runner.Request(sizes=["20k"], contexts=[32], batches=[2], dtypes=["float32"], threads=[1])


class Clock:
    """A clock that only work moves; the machine may become slower by the hour."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift = 0.0, drift

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Work:
        def go(_: object) -> None:
            self.now += seconds * (1 + self.drift * self.now)

        return Work(go, amount=100)


def test_a_lap_is_the_time_of_its_work_and_short_work_is_repeated():
    clock = Clock()
    laps = list(race({"short": clock.work(0.25), "long": clock.work(3.0)}, 2, least=1.0, clock=clock))
    assert [(lap.name, lap.round) for lap in laps] == [("short", 0), ("long", 0), ("long", 1), ("short", 1)]
    assert {lap.name: (lap.seconds, lap.runs) for lap in laps} == {"short": (0.25, 4), "long": (3.0, 1)}


def test_what_is_set_up_for_a_run_is_not_timed():
    clock = Clock()

    def setup() -> str:
        clock.now += 50.0
        return "state"

    seen = []
    work = Work(lambda state: (seen.append(state), clock.work(2.0).run(None)), 1, setup=setup)
    assert [lap.seconds for lap in race({"w": work}, 3, clock=clock)] == [2.0] * 3
    assert set(seen) == {"state"}


@pytest.mark.parametrize("rounds", [2, 10])
def test_a_machine_that_slows_down_steadily_makes_no_difference_between_equals(rounds):
    """In turn but always A first, B would seem slower; and one after the other, far more so."""
    clock = Clock(drift=1e-3)
    laps = list(race({"A": clock.work(1.0), "B": clock.work(1.0)}, rounds, least=1.0, clock=clock))
    total = {name: sum(lap.seconds for lap in laps if lap.name == name) for name in "AB"}
    assert laps[-1].seconds > 1.003
    # What is left is the drift of the drift: (1 + d)^n instead of 1 + nd.
    assert total["A"] / total["B"] == pytest.approx(1, abs=3e-6)
    half = len(laps) // 2
    assert sum(lap.seconds for lap in laps[half:]) / sum(lap.seconds for lap in laps[:half]) > 1.001


def test_the_limit_is_reading_at_the_highest_rate_or_computing(monkeypatch):
    c = runner.cases("train", TINY)[0]
    reads = iter([2e9, 6e9, 3e9])
    monkeypatch.setattr(measure, "read_rate", lambda device, size, seconds: next(reads))
    of_dtype = lambda dtype, device: {torch.float32: 1e11}.get(dtype, 1e9)
    monkeypatch.setattr(measure, "matmul_rate", of_dtype)
    monkeypatch.setattr(machine, "peak_matmul_rate", lambda *given: machine.Rate(of_dtype(*given), 1.0, True))
    half, ceilings = replace(c, setting=replace(c.setting, dtype="float16")), runner.Ceilings()
    work = Work(lambda _: None, amount=600, flops=8e9, bytes=3e9)
    laps = [runner._row("train", half, work, Lap("0", i, 2.0, 1), ceilings) for i in range(3)]
    assert [lap["byte_share"] for lap in laps] == pytest.approx([0.75, 0.25, 0.25])
    assert {lap["matmul"] for lap in laps} == {1e11}, "float32's, which computes float16 weights faster here"
    assert {lap["flop_share"] for lap in laps} == {0.04}, "of the same"
    summed = rows.summarize(laps)
    assert (summed["seconds"], summed["rate"], summed["rounds"]) == (2, 300, 3)
    assert (summed["byte_share"], summed["limit"]) == pytest.approx((0.25, 1200))
    assert rows.summarize([lap | {"flop_share": 0.5} for lap in laps])["limit"] == pytest.approx(600)
    assert "limit" not in rows.summarize([lap | {"bytes": 0} for lap in laps])


@pytest.mark.parametrize("name", ["train", "prefill", "decode"])
def test_counted_operations_are_those_that_are_done(name, monkeypatch):
    """The optimizer's products are not counted; decoding looks at 64 slots (a power of two), counted as 48."""
    monkeypatch.setattr(attention, "form", lambda *_: attention.plain)  # the fused one is not counted by PyTorch
    subject = of_shape("llama", 400_000, 64)
    work = benchmarks.BENCHMARKS[name].make(subject, Setting(2, 64, "float32", 1))
    state = work.setup()
    if name == "train":
        trainer, ids = Trainer(work.model, adamw(work.model), next_token_loss), torch.randint(0, 4096, (2, 65))
        work = Work(lambda _: trainer.gradients([ids]), work.amount, flops=work.flops)
    with FlopCounterMode(display=False) as counter:
        work.run(state)
    tolerance = {"train": 1e-3, "decode": 0.03}.get(name, 1e-9)  # norms add up their gradients by a product
    assert counter.get_total_flops() == pytest.approx(work.flops, rel=tolerance)


def test_weights_to_read_are_all_but_the_rows_of_the_embedding():
    tied, untied = (of_shape(f, 200_000, 32).outline() for f in ("arcee", "llama"))
    for model in (tied, untied):
        everything = sum(p.nbytes for p in model.parameters())
        left_out = 0 if model.head is None else model.embed.token.weight.nbytes
        assert benchmarks.weight_bytes(model) == everything - left_out
    heads = tied.blocks[0].attn.k.out_features
    assert benchmarks.cache_elements(tied, 20) == 20 * 2 * heads * len(tied.blocks)
    sliding = of_shape("mistral", 200_000, 32).outline()
    heads = sliding.blocks[0].attn.k.out_features
    window = sliding.blocks[0].attn.window
    assert benchmarks.cache_elements(sliding, 20) == window * 2 * heads * len(sliding.blocks)
    assert window == 16


def test_of_experts_only_those_that_tokens_select_are_read():
    model = of_shape("mixtral", 300_000, 32).outline()
    mixtures = [block.mlp for block in model.blocks]
    experts, top_k = len(mixtures[0].experts), mixtures[0].top_k
    assert 1 < top_k < experts
    everything = sum(p.nbytes for p in model.parameters())  # the embedding is the head, too
    assert model.head is None
    each = sum(p.nbytes for p in mixtures[0].experts[0].parameters())
    idle = len(mixtures) * (experts - top_k) * each
    assert benchmarks.weight_bytes(model) == pytest.approx(everything - idle, rel=1e-12)
    share = (experts - top_k) / experts
    assert benchmarks.weight_bytes(model, 3) == pytest.approx(everything - idle * share**2, rel=1e-12)
    assert benchmarks.weight_bytes(model, 10_000) == pytest.approx(everything, rel=1e-12)


@pytest.mark.parametrize("double", [False, True])
def test_weights_to_read_of_few_bits_are_codes_and_scales(double):
    model = of_shape("llama", 200_000, 32).model()
    dense = benchmarks.weight_bytes(model)
    quantize(model, kind="nf4", double=double)
    assert model.head is None
    read = [model.embed.token.weight, *(p for p in model.blocks.parameters()), model.norm.weight]
    for place in find(model, "blocks.**", lambda m: isinstance(m, NF4)):
        layer, size = place.module, place.module.in_features * place.module.out_features
        read += [t for t in (layer.codes, layer.scale, layer.outer, layer.middle) if t is not None]
        assert (layer.codes.nbytes, len(layer.scale)) == (-(-size // 2), -(-size // 64))
    assert benchmarks.weight_bytes(model) == sum(t.nbytes for t in read) < dense
    attach(model, where="**.attn.q", rank=2)
    adapter = [t for t in model.parameters() if t.requires_grad and 2 in t.shape]
    assert len(adapter) == 2 * len(model.blocks)
    assert benchmarks.weight_bytes(model) == sum(t.nbytes for t in (*read, *adapter))
    set_adapter(model, None)  # an adapter that is not active is not read
    assert benchmarks.weight_bytes(model) == sum(t.nbytes for t in read)


def measured(name: str, out: Path, **changes: object) -> list[rows.Row]:
    request = runner.Request(**{**vars(TINY), **changes})
    return runner.bench(name, request, 2, out, least=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(benchmarks.BENCHMARKS))
def test_every_benchmark_runs_on_a_folder_and_its_rows_are_read_back(name, model_folder, tmp_path):
    reads = {"batch": "batches", "context-length": "contexts", "dtype": "dtypes"}
    idle = {fields: [] for option, fields in reads.items() if option not in benchmarks.BENCHMARKS[name].reads}
    kept = measured(name, tmp_path / "out.jsonl", models=[model_folder], sizes=[], **idle)
    assert rows.read_rows(tmp_path / "out.jsonl") == kept
    assert [r["round"] for r in kept] == [0, 1]
    for row in kept:
        assert row["seconds"] > 0
        assert row["amount"] > 0
        assert (row["first_token"] or 0) > row["seconds"] or name != "load"
        assert row["machine"] == measure.fingerprint()["machine"]


def test_a_folder_of_our_own_form_is_measured_as_what_it_holds(tmp_path):
    dense = of_shape("llama", 20_000, 32)
    checkpoint.save(dense.model(), tmp_path / "dense", Tokenizer.train("bytes", ()), 32)
    loaded = checkpoint.load(tmp_path / "dense")
    changes = (apply_change(loaded.model, "quantize", kind="nf4"),)
    architecture = replace(loaded.architecture, changes=changes)
    checkpoint.save(loaded.model, tmp_path / "nf4", loaded.tokenizer, 32, architecture=architecture)
    plain, few = (
        measured("prefill", tmp_path / f"{name}.jsonl", models=[tmp_path / name], sizes=[])[0]
        for name in ("dense", "nf4")
    )
    assert isinstance(of_folder(tmp_path / "nf4").model(), Decoder)
    assert few["flops"] == plain["flops"] > 0
    assert few["parameters"] == plain["parameters"]
    stored = checkpoint.load(tmp_path / "nf4").model
    assert few["bytes"] == sum(t.nbytes for t in (*stored.parameters(), *stored.buffers())) < plain["bytes"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model that a short run made."""
    root = tmp_path_factory.mktemp("bench")
    assert train(toy(write_programs(root / "code"), steps=11, complete=False), root / "<b>run", display()[0]) == 0
    return root / "<b>run"


def test_no_file_is_written_over_or_taken_for_ones_own_and_a_last_line_that_was_cut_is_left_out(tmp_path):
    kept = measured("prefill", out := tmp_path / "a.jsonl")
    before = out.read_bytes()
    refuses(r"a\.jsonl: already exists", measured, "prefill", out)
    assert out.read_bytes() == before
    out.write_bytes(before + b'{"benchmark": "pre')
    assert rows.read_rows(out) == kept


def test_an_interrupted_run_keeps_its_finished_rows(tmp_path):
    def told(words: str, done: float) -> None:
        if done >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), shown_by(told):
        runner.bench("prefill", TINY, 4, tmp_path / "out.jsonl", least=0.0)
    assert len(rows.read_rows(tmp_path / "out.jsonl")) == 2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("train", {"sizes": []}),
        ("train", {"sizes": ["0"]}),
        ("train", {"batches": [0]}),
        ("train", {"dtypes": ["int3"]}),
        ("train", {"models": [Path("nowhere")]}),
        ("decode", {"contexts": [2]}),
        ("complete", {"batches": []}),
        ("load", {"contexts": [32], "batches": [], "dtypes": []}),
        ("prefill", {"compile": True}),
    ],
)
def test_what_cannot_be_measured_is_refused(name, changes, tmp_path):
    refuses(".", measured, name, tmp_path / "out.jsonl", **changes)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_machine_too_small_is_told_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "free_memory", lambda device: 1_000_000)
    refuses("1 MB are free", runner.bench, "train", replace(TINY, sizes=["300m"]), 1, tmp_path / "out.jsonl")


@pytest.mark.parametrize("text", ["", '{"a": 1}\n', "\0\n"])
def test_a_file_without_measurements_is_refused(text, tmp_path):
    (tmp_path / "bad.jsonl").write_text(text)
    refuses("bad.jsonl", rows.read_rows, tmp_path / "bad.jsonl")


# Comparing


def laps(factor: float, noise: float, seed: int, count: int = 20, **columns: object) -> list[rows.Row]:
    chance = random.Random(seed)
    known = {"benchmark": "train", "subject": "m", "unit": "tokens", "amount": 1, "matmul": 1e12, **columns}
    return [known | {"round": i, "seconds": factor * chance.lognormvariate(0, noise)} for i in range(count)]


def test_a_planted_difference_of_three_percent_is_real_and_noise_is_not():
    verdicts = [compare(laps(1.0, 0.01, 2 * i), laps(1.03, 0.01, 2 * i + 1)).differences[0] for i in range(50)]
    assert all(d.significant for d in verdicts)
    assert all(d.ratio == pytest.approx(1.03, abs=0.015) for d in verdicts)
    assert "longer" in verdicts[0].verdict
    same = [compare(laps(1.0, 0.01, 2 * i), laps(1.0, 0.01, 2 * i + 1)).differences[0] for i in range(200)]
    assert sum(d.significant for d in same) <= 6, "one in a hundred, by chance"
    assert "no significant difference" in next(d for d in same if not d.significant).verdict


def test_one_wild_lap_hides_no_difference_and_too_few_rounds_tell_nothing():
    slow = laps(1.03, 0.005, 1)
    slow[7]["seconds"] = 0.2
    assert compare(laps(1.0, 0.005, 0), slow).differences[0].significant
    few, enough = (compare(laps(1, 0.01, 0, n), laps(2, 0.01, 1, n)).differences[0] for n in (7, 8))
    assert (few.significant, few.verdict, enough.significant) == (False, "too few rounds", True)
    refuses("--confidence is 99", compare, laps(1, 0.1, 0), laps(1, 0.1, 1), 99)


def test_a_difference_smaller_than_the_machines_own_is_none():
    slower = {"matmul": 0.9e12}
    compared = lambda factor, **columns: compare(laps(1.0, 0.01, 0), laps(factor, 0.01, 1, **columns))
    verdict = lambda *args, **columns: compared(*args, **columns).differences[0]
    assert verdict(1.08).significant
    assert not verdict(1.08, **slower).significant
    assert "would be missed" in verdict(1.08, **slower).verdict
    assert not verdict(0.92, **slower).significant
    assert verdict(1.2, **slower).significant
    assert verdict(1.08, **slower, cpu="another").significant, "of another machine"


def test_the_interval_is_wilcoxons():
    # Two-sided, 1 %: the table of critical values in any textbook.
    assert [_critical(n, 0.005) for n in (7, 8, 10, 12, 15, 20)] == [None, 0, 3, 7, 15, 37]
    middle, interval = hodges_lehmann([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert (middle, interval) == (4.5, (1.0, 8.0))


def test_only_what_both_have_is_compared_and_what_differs_is_named():
    a = laps(1.0, 0.01, 0, batch=1) + laps(1.0, 0.01, 1, batch=2)
    b = laps(2.0, 0.01, 2, batch=2, subject="other") + laps(2.0, 0.01, 3, batch=4, subject="other")
    found = compare(a, b)
    assert [d.what for d in found.differences] == ["train batch 2"]
    assert found.unmatched == ["train batch 1", "train batch 4"]
    assert found.differing["subject"] == ("m", "other")
    assert found.differing["matmul rate"] == (1e12, 1e12)
    refuses("A has train batch 1, B has train batch 4", compare, a[:20], [*b[20:], b[0] | {"batch": 8}])


def test_rounds_are_paired_by_their_numbers():
    a, b = laps(1.0, 0.0, 0, count=12), laps(1.0, 0.0, 1, count=12)
    for i, row in enumerate(a):
        row["seconds"] = b[i]["seconds"] = float(i + 1)
    (difference,) = compare(a[2:], b[:10]).differences
    assert (difference.ratio, difference.pairs) == (1.0, 8)


# Where the time goes


class Two(nn.Module):
    """A module that computes much and one that computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.heavy, self.light = nn.Linear(512, 512), nn.Linear(512, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.light(self.heavy(x).relu())


def test_operations_are_given_to_the_module_and_the_phase_they_belong_to():
    model = Two()
    trainer = Trainer(model, adamw(model), cross_entropy)
    steps = trainer.run([(torch.randn(256, 512), torch.randint(0, 8, (256,)))] * 3)
    next(steps)
    with bench.profile_modules(model) as report:
        next(steps)
    products = {(e.phase, e.module): e.calls for e in report.entries if e.operation in ("addmm", "mm")}
    # Going back, each takes a product for its weight, and one for its input where that wants a gradient.
    once = dict.fromkeys([("forward", "heavy"), ("forward", "light"), ("backward", "heavy")], 1)
    assert products == once | {("backward", "light"): 2}
    assert {e.phase for e in report.entries if "adamw" in e.operation} == {"optimizer"}
    assert sum(e.seconds for e in report.entries) + report.between == pytest.approx(report.wall, rel=1e-6)
    forward = sum(e.seconds for e in report.entries if e.phase == "forward")
    assert report.inside()[""]["forward"] == pytest.approx(forward)
    heavy, light = (report.inside()[m]["forward"] for m in ("heavy", "light"))
    assert min(heavy, light) > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), "nothing is left behind"


# The command


@pytest.fixture
def command(capsys):
    """Runs `dunes bench` with these arguments in this process, and returns what it printed."""

    def run(*arguments: object) -> str:
        assert run_command("dunes bench", cli.ABOUT, cli.commands(), list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


def test_a_table_or_one_json_document_is_printed(command, tmp_path):
    shape = ("--size", "300k", "600k", "--context-length", 32, "--batch", 2, "--dtype", "float32", "--threads", 1)
    printed = command("prefill", *shape, "--rounds", 2, "--out", tmp_path / "a.jsonl")
    assert "p25 to p75" in printed.splitlines()[1]
    assert len(re.findall(r"tokens/s \(\d+% reached\)", printed)) == 2
    assert "{" not in printed
    printed = command("prefill", *shape, "--rounds", 2, "--out", tmp_path / "b.jsonl", "--json")
    assert [r["rounds"] for r in json.loads(printed)["results"]] == [2, 2]
    compared = ("compare", tmp_path / "a.jsonl", tmp_path / "a.jsonl")
    assert "too few rounds" in command(*compared)
    assert json.loads(command(*compared, "--json"))["differences"][0]["ratio"] == 1.0
    printed = command("train", *shape[:1], "300k", *shape[3:], "--by-module", "--json")
    assert json.loads(printed)["modules"]["blocks[*]"]["backward"] > 0
    refuses("omit --rounds", command, "train", *shape, "--by-module", "--rounds", 3)
    pictures = command("plot", tmp_path / "a.jsonl", "--out", tmp_path / "pictures").splitlines()
    assert len(pictures) == 3
    assert all(Path(picture).is_file() for picture in pictures)


def adapter_in(folder, **options):
    """A model with an adapter as after training, which is saved there."""
    base = of_shape("llama", 200_000, 32).saved_folder
    model = checkpoint.load(base).model
    attach(model, where="**.attn.q", rank=2, **options)
    trained(model)
    checkpoint.save_adapter(model, folder, "default", base, context_length=64)
    return model


@pytest.mark.parametrize("name", ["load", "save"])
def test_the_folder_of_an_adapter_is_loaded_and_saved_with_its_base(name, tmp_path):
    model = adapter_in(tmp_path / "adapter")
    work = benchmarks.BENCHMARKS[name].make(of_folder(tmp_path / "adapter"), Setting(1, 32, "float32", 1))
    work.run(work.setup())
    assert work.amount == sum(t.nbytes for t in model.parameters())


def test_an_adapter_is_measured_with_its_context_length_and_the_tokenizer_of_its_base(tmp_path):
    adapter_in(tmp_path / "adapter", init="pissa")
    subject = of_folder(tmp_path / "adapter")
    loaded = subject.model()
    shapes = [[(k, p.shape) for k, p in m.named_parameters()] for m in (subject.outline(), loaded)]
    assert shapes[0] == shapes[1]
    assert any(".adapters." in k for k, _ in loaded.named_parameters())
    assert subject.context == 64
    assert subject.tokenizer.vocab == Tokenizer.load(of_shape("llama", 200_000, 32).saved_folder).vocab

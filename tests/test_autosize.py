"""What autosize chooses, and what its estimates rest on."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from conftest import refuses
from dunes import measure
from dunes.augment import adapted, apply_change, attach, quantize, set_adapter
from dunes.models import arcee, dunes, llama, mixtral, named_parts
from dunes.ops import scaled_dot_product as attention
from dunes.parts import Checkpointed
from dunes.runs import autosize
from dunes.runs.autosize import (
    Machine,
    activation_bytes,
    autosize_run,
    build_optimizer,
    choose_size,
    estimate_memory,
    expected_bits,
    flops,
    memory_advice,
    meta_model,
)
from dunes.runs.memory import Shape, process_memory
from dunes.runs.train_config import TrainConfig, parse_size
from dunes.train.optim import muon_flops, orthogonalise
from dunes.tree import count, find, linear, linears
from dunes.tree import replace as replace_modules

MACHINE = Machine(threads=2, dtype="bfloat16", matmul=1.2e12, read=27e9)
STDLIB = 11_800_000


def size_for(machine=MACHINE, text=STDLIB, **changes):
    config = TrainConfig(**{"sources": (), "batch": 16, "context_length": 256, "dtype": machine.dtype} | changes)
    return parse_size(choose_size(config, text, machine)[0].size)


@pytest.mark.slow
def test_more_minutes_a_faster_machine_and_more_text_make_a_larger_model():
    sizes = [size_for(minutes=m) for m in (1, 3, 15, 60, 600)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] < sizes[4]
    assert size_for(machine=replace(MACHINE, matmul=1e14, read=2e12)) > size_for()
    assert size_for(machine=replace(MACHINE, dtype="float32", matmul=1e11)) < size_for()
    assert size_for(text=100_000) < size_for() <= size_for(text=10**10)


@pytest.mark.parametrize("half", [0.55, 1.8])
def test_rates_measured_beside_other_programs_change_no_plan(monkeypatch, half):
    """Size, steps and options are those of the idle machine; only the expected speed differs."""
    monkeypatch.setattr(autosize, "SIZES", [100_000, 200_000, 400_000])
    monkeypatch.setattr(autosize, "memory_advice", lambda config, text: "")
    plans = []
    for times in (1.0, half, None):
        rate = lambda typical, times=times: measure.Rate(typical * (times or 1), typical, times is not None)
        monkeypatch.setattr(autosize.measure, "peak_matmul_rate", lambda dtype, device, r=rate: r(3e11))
        monkeypatch.setattr(autosize.measure, "peak_read_rate", lambda device, r=rate: r(2.6e10))
        config = TrainConfig(sources=(), minutes=0.5, dtype="float32", threads=2, vocab_size=512)
        plans.append(autosize_run(config, 1_200_000))
    (alone, said), (busy, said_busy), (_, guessed) = plans
    assert replace(alone, rate=0.0, matmul=0.0) == replace(busy, rate=0.0, matmul=0.0)
    assert alone.rate != busy.rate
    assert said[1:] == said_busy[1:] == guessed[1:]
    assert re.search(r"trains on \S+ tokens \(\d+ steps, ", said[2])
    assert guessed[0].count("guess") == 2
    assert "guess" not in said[0] + said_busy[0]


def test_a_size_that_is_given_stays_and_one_for_steps_suits_their_tokens():
    assert size_for(size="12345678") == 12_345_678
    few, many = size_for(steps=100), size_for(steps=3_000)
    assert few < many
    assert many == pytest.approx(3_000 * 16 * 256 / autosize.TOKENS_PER_PARAMETER, rel=0.2)


@pytest.mark.parametrize(("size", "entries"), [(9_000, 512), (500_000, 2048), (10**8, 4096)])
def test_a_small_text_has_a_small_vocabulary(size, entries):
    assert autosize.with_vocabulary(TrainConfig(complete=True), size).vocab_size == entries


def test_the_first_two_layers_of_a_new_dunes_see_two_tokens_and_the_last_sees_all():
    for depth, windows in {1: [None], 2: [2, None], 3: [2, 2, None], 5: [2, 2, None, None, None]}.items():
        assert [*dunes.Config.from_size(300, 64, depth, 32).windows] == windows


def test_a_plan_that_leaves_nothing_open_is_not_measured(monkeypatch):
    whole = TrainConfig(sources=(), size="1m", batch=1, context_length=2, dtype="float32", threads=1)
    monkeypatch.setattr(autosize, "measure_machine", lambda config: pytest.fail("measured"))
    assert autosize_run(replace(whole, dropout=0.1, weight_decay=0.1), STDLIB)[0].batch == 1
    for steps, chosen in ((10, (0.0, None)), (10**8, (autosize.DROPOUT, autosize.WEIGHT_DECAY))):
        config = autosize_run(replace(whole, steps=steps), STDLIB)[0]  # text is repeated often, or not
        assert (config.dropout, config.weight_decay) == chosen
    refuses("--threads is 40000; this machine has", autosize.with_hardware, TrainConfig(threads=40_000))
    refuses(r"--weight-decay is -1", TrainConfig, weight_decay=-1.0)


def test_text_met_again_is_worth_less_and_less():
    bits = [expected_bits(3_000_000, tokens, 1_000_000) for tokens in (1e6, 2e6, 4e6, 4e7, 4e9)]
    assert bits == sorted(bits, reverse=True)
    assert bits[3] - bits[4] < bits[0] - bits[1]
    assert expected_bits(3_000_000, 4e6, 1e9) < bits[2], "new text is worth more"


def toy_arcee(**fields):
    torch.manual_seed(0)
    return arcee.build(replace(arcee.Config.from_size(300, 64, 3, 32), **fields))


def counted(model, monkeypatch):
    """FLOPs per token of a forward pass, as PyTorch counts them, but for fused forms that it does not count."""
    monkeypatch.setattr(attention, "form", lambda *_: attention.plain)
    monkeypatch.setattr(adapted, "_fusable", lambda *_: False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randint(300, (2, 32)))
    return counter.get_total_flops() / 64


def lora_experts(**options):
    apply_change(model := toy_arcee(), "lora-experts", experts=3, rank=2, **options)
    return model


COUNTED = {
    "tied": lambda: toy_arcee(tied=True),
    "untied": lambda: toy_arcee(tied=False),
    "delta": lambda: named_parts.build(300, 64, 3, 64, attention="delta"),
    "mamba": lambda: named_parts.build(300, 64, 3, 64, attention="mamba"),
    **{f"{r} {k}": partial(lora_experts, router=r, top_k=k) for r in ("linear", "shared", "mlp") for k in (1, 3)},
}


@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_what_pytorch_counts(name, monkeypatch):
    model = COUNTED[name]()
    assert flops(model, 32) == 3 * counted(model, monkeypatch) > 0


def test_orthogonalising_is_what_muon_computes():
    model = toy_arcee()
    with FlopCounterMode(display=False) as counter:
        for m in linears(model):
            orthogonalise(torch.randn(1, *sorted(m.weight.shape)))
    assert counter.get_total_flops() == muon_flops(model)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantized_model_computes_what_the_dense_one_does(kind, monkeypatch):
    model = toy_arcee()
    before, bytes_before = flops(model, 32), activation_bytes(model, 32)
    parameters = count(model)
    quantize(model, kind=kind)
    assert flops(model, 32) == before == 3 * counted(model, monkeypatch)
    assert activation_bytes(model, 32) == bytes_before
    assert count(model) == parameters
    assert muon_flops(model) == 0, "codes are not trained"


@pytest.mark.parametrize("base", [None, "int8", "nf4"])
@pytest.mark.parametrize("init", ["lora", "pissa"])
def test_an_adapter_adds_its_two_small_products_while_it_is_active(base, init, monkeypatch):
    model = toy_arcee()
    if base:
        quantize(model, kind=base)
    before = flops(model, 32)
    attach(model, rank=2, ranks={"**.attn.q": 5}, init=init)
    ranks = {p.name: 5 if p.name.endswith(".q") else 2 for p in find(model, "blocks.**", linear)}
    sides = {p.name: p.module.in_features + p.module.out_features for p in find(model, "blocks.**", linear)}
    factors = 2 if init == "pissa" else 1
    added = sum(factors * ranks[name] * sides[name] for name in ranks)
    assert flops(model, 32) - before == 6 * added > 0
    if init == "lora":
        assert 3 * counted(model, monkeypatch) == flops(model, 32)
    attach(model, rank=3, adapter="second")
    assert flops(model, 32) - before == 6 * 3 * sum(sides.values()), "the other one is idle"
    set_adapter(model, None)
    assert flops(model, 32) == before


def test_an_adapter_of_experts_works_on_their_tokens_and_one_of_an_embedding_looks_up():
    model = mixtral.build(mixtral.Config.from_size(300, 64, 1, 32))
    before, moe = flops(model, 32), model.blocks[0].mlp
    attach(model, where="**.experts.*.up", rank=2)
    assert flops(model, 32) - before == pytest.approx(6 * moe.top_k * 2 * (64 + moe.experts[0].up.out_features))
    model = llama.build(replace(llama.Config.from_size(300, 64, 1, 32), tied=False))
    before = flops(model, 32)
    attach(model, where="embed.token", rank=2)
    assert flops(model, 32) - before == 6 * 2 * 64


def test_any_module_with_inputs_and_outputs_is_counted_once():
    class Own(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.in_features, self.out_features, self.matrix = base.in_features, base.out_features, base.weight

    model = toy_arcee()
    before = flops(model, 32), activation_bytes(model, 32), muon_flops(model), count(model)
    replace_modules(model, "blocks.*.mlp.*", Own, linear)
    assert (flops(model, 32), activation_bytes(model, 32), muon_flops(model), count(model)) == before
    replace_modules(model, "blocks.*", Checkpointed)
    assert flops(model, 32) == before[0]


def test_the_estimate_of_memory_grows_with_what_takes_it_and_names_it():
    config = TrainConfig(size="2x256", batch=16, context_length=256, dtype="bfloat16")
    sum_of = lambda **changes: sum(estimate_memory(replace(config, **changes)).values())
    parts = estimate_memory(config)
    assert parts["parameters"] == pytest.approx(4 * count(meta_model(config)), rel=1e-6)
    for changes in ({"context_length": 512}, {"dtype": "float32"}):
        assert sum_of(**changes) > sum(parts.values()), changes
    assert sum_of(size="2x1024") > 1.5 * sum(parts.values())
    assert re.match(r"this run needs about \d\d\.\d GB", memory_advice(replace(config, batch=1000)))
    fit, small = "fitting the completion gate", {"batch": 1, "context_length": 16}
    assert estimate_memory(replace(config, **small, complete=True, minutes=9))[fit] > 1e8 > parts.get(fit, 0)
    assert fit not in estimate_memory(replace(config, **small, complete=False))
    complete = replace(config, **small, complete=True)
    few, many, most = (sum(estimate_memory(complete, text=size).values()) for size in (10**6, 10**7, 10**9))
    assert 5e8 < many - few < 8e8
    assert most < 1.5 * many, "the index has a limit"


def test_less_is_lost_to_fragmentation_if_less_is_trained():
    """Four runs of adapters on 135M parameters took what was estimated without it."""
    weights = sum(p.nbytes for p in toy_arcee().parameters())
    lost = [
        process_memory(toy_arcee, Shape(4, 32), trainable=n)["fragmentation"] for n in (weights, weights // 10)
    ]
    assert 0 < lost[1] == pytest.approx(lost[0] / 10, rel=0.01)


@pytest.mark.slow
def test_text_that_is_read_often_is_trained_on_with_more_weight_decay():
    for complete, steps, decay in ((True, 4000, 0.15), (True, 10, None), (False, 4000, 0.15)):
        config = TrainConfig(sources=(), context_length=64, batch=8, size="1x32", steps=steps, complete=complete)
        assert autosize_run(config, 100_000)[0].weight_decay == decay
        assert autosize_run(replace(config, weight_decay=0.5), 100_000)[0].weight_decay == 0.5


@pytest.mark.parametrize(("asked", "decays"), [(0.3, {0.3}), (None, {0.01, 0.0})])
def test_the_optimizer_has_the_weight_decay_of_the_options(asked, decays):
    layers = [nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(8, 4), *layers)
    groups = build_optimizer(model, TrainConfig(weight_decay=asked)).param_groups
    assert {group["weight_decay"] for group in groups} == decays


def test_memory_is_estimated_with_the_state_of_the_named_optimizer():
    config = TrainConfig(sources=(), context_length=16, batch=1, size="2x64", dtype="float32", threads=1)
    muon, adamw = (estimate_memory(replace(config, optimizer=name))["optimizer"] for name in ("muon", "adamw"))
    weights = estimate_memory(config)["parameters"]
    assert 1.9 * weights < adamw < 2.1 * weights
    assert weights < muon < 0.95 * adamw

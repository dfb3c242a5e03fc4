"""What is said of memory is so: on planted allocations, against fake tensors, against the process itself."""

import json
import mmap
import sys

import pytest
import torch
from torch import Tensor, nn

from conftest import refuses, run_dunes
from dunes import measure, tree
from dunes.bench.step_memory import estimate_memory
from dunes.bench.subject import Setting, of_shape
from dunes.generate import PrefixCache, generate
from dunes.measure import allocations, ranks
from dunes.models import FAMILIES, llama
from dunes.parts import Checkpointed
from dunes.runs.memory import Shape, inference_allocations, train_allocations
from dunes.train import Trainer, adamw, cross_entropy

MB = 1_000_000


class Hoarder(nn.Module):
    """Takes a megabyte for a moment, keeps another for the way back, and makes one there."""

    def forward(self, x: Tensor) -> Tensor:
        torch.zeros(MB, dtype=torch.uint8)
        return Keeping.apply(x)


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.zeros(2 * MB, dtype=torch.uint8))
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        torch.zeros(3 * MB, dtype=torch.uint8)
        return grad * 1


def hoarding():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), Hoarder()), nn.Linear(4, 2))


def test_planted_megabytes_and_gradients_are_found_where_they_are_taken():
    model = hoarding()
    with allocations(model) as log:
        model(torch.randn(3, 4)).sum().backward()
    planted = {a.size // MB: a for a in log.made if a.size >= MB}
    assert {n: (a.owner, a.phase, a.kind) for n, a in planted.items()} == {
        1: ("1.1", "forward", "temporaries"),
        2: ("1.1", "forward", "activations"),
        3: ("1.1", "backward", "temporaries"),
    }
    assert all(a.freed is not None for a in planted.values())
    small = sum(a.size for a in log.made if a.size < MB)
    assert 3 * MB < 5 * MB <= log.peak <= 5 * MB + small, "the second and third are held together"
    assert log.by("owner")["1.1",] == max(log.by("owner").values())
    assert log.live[-1] < 1000, "parameters and gradients remain"
    assert {a.owner for a in log.made if a.kind == "gradients"} == {"0", "2"}, "those of their parameters"


def test_kinds_of_a_training_step_add_up():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    size = 4 * tree.count(model)
    trainer = Trainer(model, adamw(model), cross_entropy)
    steps = trainer.run([(torch.randn(16, 64), torch.randint(0, 8, (16,)))] * 3)
    with allocations(model) as first:
        next(steps)
    kinds = ("parameters", "gradients", "optimizer")
    made = {kind: sum(a.size for a in first.made if a.kind == kind) for kind in kinds}
    counters = 4 * 4  # AdamW's step of each of the four parameters
    assert made == {"parameters": size, "gradients": size, "optimizer": 2 * size + counters}
    assert first.live[0] == size
    assert first.live[-1] == 3 * size + counters, "gradients were let go"
    with allocations(model) as second:
        next(steps)
    assert second.by("kind", moment=0) == {("optimizer",): 2 * size + counters, ("parameters",): size}
    assert not any(a.kind == "optimizer" for a in second.made if a.allocated > 0)
    assert sum(second.by("kind").values()) == second.peak
    _, total, *kinds = second.over_time().values()
    assert total == [sum(sizes) for sizes in zip(*kinds, strict=True)]


def test_nothing_is_left_behind_and_an_error_inside_is_the_callers():
    model = hoarding()
    with pytest.raises(ZeroDivisionError), allocations(model) as log:  # noqa: PT012
        kept = torch.zeros(MB)
        raise ZeroDivisionError
    assert log.live[-1] >= 4 * MB, "what is still held when it is over counts"
    assert len(kept) == MB
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    count = len(log.made)
    torch.zeros(MB)
    assert len(log.made) == count


def test_views_take_nothing_and_what_grows_in_place_counts_once():
    with allocations(nn.Linear(1, 1)) as log:
        x = torch.zeros(MB, dtype=torch.uint8)
        x.view(10, -1).t()[3].add_(1)
    assert sum(a.size for a in log.made if a.size >= MB) == MB


def test_keys_and_values_are_a_cache():
    model = of_shape("llama", 300_000, 64).model()
    with allocations(model) as log:
        list(generate(model, [1, 2, 3], max_tokens=4, context_length=64))
    cached = [a for a in log.made if a.kind == "cache"]
    width = model.blocks[0].attn.k.out_features
    assert {a.size for a in cached if a.size > 64} == {4 * width * 8}, "3 + 4 tokens, and a slot for padding"
    assert len([a for a in cached if a.size > 64]) == 2 * len(model.blocks)


@pytest.mark.slow
@pytest.mark.parametrize("held", [1, 9_000])
def test_memory_of_a_long_prompt_is_bounded(held):
    tokens, width = 16_384, 32
    model = llama.build(llama.Config.from_size(64, width, 1, tokens)).eval()
    cache, ids = PrefixCache(model), [i % 61 for i in range(tokens)]
    cache.reserve(tokens)
    cache.logits({0: ids[:held]})
    with allocations(model) as log:
        cache.logits({0: ids})
    assert log.peak <= 48 * MB, "a mask alone would have 268 million elements"


SHAPES = [Shape(2, 32), Shape(4, 32, torch.bfloat16), Shape(2, 64, torch.bfloat16, checkpointing=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "shape", "family"),
    [
        *((train_allocations, shape, family) for family in FAMILIES for shape in SHAPES),
        *((inference_allocations, SHAPES[i % 3], family) for i, family in enumerate(FAMILIES)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_foreseen_is_what_is_seen(family, shape, work):
    """To the byte, allocation by allocation: another batch, context, dtype, checkpointing."""
    build = of_shape(family, 300_000, 64).outline
    seen = work(build, shape, estimated=False)
    said = work(build, shape)
    if family == "gpt_oss":  # its experts run one by one, with as many tokens as the router's values say
        assert said.peak == pytest.approx(seen.peak, rel=0.05)
        return
    assert said.peak == seen.peak
    if work is inference_allocations and hasattr(build().blocks[-1].mlp, "experts"):
        return  # for the one token after the prompt, which experts are called depends on what they would be told
    assert sorted(a.size for a in said.made) == sorted(a.size for a in seen.made)
    assert said.by("kind", "owner", "phase") == seen.by("kind", "owner", "phase")


def partly_frozen():
    model = of_shape("arcee", 300_000, 64).outline()
    model.embed.requires_grad_(False)
    return model


@pytest.mark.slow
def test_each_of_several_ranks_has_a_part_of_what_is_trained_and_all_that_is_frozen():
    frozen = sum(p.nbytes for p in partly_frozen().parameters() if not p.requires_grad)
    sizes = {}
    for number in (1, 4):
        log = train_allocations(partly_frozen, Shape(2, 32), number=number)
        before = log.by("kind", moment=0)
        gradients = sum(a.size for a in log.made if a.kind == "gradients")
        sizes[number] = (before["parameters",] - frozen, before["optimizer",], gradients)
    for all_ranks, own in zip(sizes[1], sizes[4], strict=True):
        assert own == pytest.approx(all_ranks / 4, rel=0.001)


@pytest.mark.slow
def test_parameters_that_ranks_gather_are_in_their_memory(monkeypatch):
    """Two parts of the model beside one another: the rank's own, and that of all ranks while it computes."""
    build = of_shape("arcee", 300_000, 64).outline
    whole = sum(p.nbytes for p in build().parameters())
    log = train_allocations(build, Shape(1, 32), number=2)
    most = max(log.by("kind", moment=a.allocated)["parameters",] for a in log.made if a.operation == "resize_")
    assert most == pytest.approx(whole / 2 + whole, rel=0.001)
    monkeypatch.setattr(ranks, "keeps_gathered", lambda model: False)
    log = train_allocations(build, Shape(1, 32), number=2)
    less = max(log.by("kind", moment=a.allocated)["parameters",] for a in log.made if a.operation == "resize_")
    assert whole / 2 < less < most


@pytest.mark.slow
def test_checkpointing_takes_less_memory_for_the_same_gradients():
    subject = of_shape("arcee", 600_000, 64)
    plain, other = subject.model(), subject.model()
    assert tree.replace(other, "blocks.*", Checkpointed)
    ids = torch.randint(0, 4096, (4, 65), generator=torch.Generator().manual_seed(0))
    for model in (plain, other):
        for p in model.parameters():  # no weight stays zero
            p.data.add_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
        model.train()(ids[:, :-1], targets=ids[:, 1:])[0].backward()
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)
    less, more = (train_allocations(subject.outline, Shape(4, 64, checkpointing=c)).peak for c in (True, False))
    assert less < more


def test_memory_of_a_model_too_large_for_any_machine_is_foreseen():
    step = estimate_memory(of_shape("llama", 70_000_000_000, 64), Setting(1, 64, "float32", 1), False, True)
    assert step.log.peak > 270e9
    refuses(r"the step needs \S+ GB and \S+ GB are free", step.measure)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the most memory a process had, and can forget it")
def test_the_process_grows_by_what_tensors_hold():
    """A training step at 40M parameters, in a process of its own whose allocator gives back what is freed."""
    found = estimate_memory(of_shape("arcee", 40_000_000), Setting(4, 256, "float32", 1), False, False)
    truth = found.measure()
    print(f"foreseen {found.log.peak}, seen {truth.tensors}, the process grew by {truth.grown}")
    assert truth.tensors == found.log.peak
    assert truth.grown == pytest.approx(found.log.peak, rel=0.1)


def test_forgetting_the_peak_lets_the_next_one_be_seen():
    cpu, pages = torch.device("cpu"), b"\1" * 4096

    def held(megabytes: int) -> None:
        with mmap.mmap(-1, megabytes * MB) as memory:  # goes back to the system at once
            for at in range(0, megabytes * MB - 4096, 4096):
                memory[at : at + 4096] = pages

    held(400)
    before = measure.reset_peak_memory(cpu)
    assert measure.resident_memory() == pytest.approx(before, rel=0.2)
    held(100)
    if sys.platform == "linux":
        assert measure.peak_memory(cpu) - before == pytest.approx(100 * MB, rel=0.2)
    assert measure.free_memory(cpu) > 0


@pytest.mark.long
def test_the_command_says_who_holds_what_and_what_if():
    shape = ["--size", "300k", "--context-length", "64", "--batch", "2", "8"]
    line = "bench", "memory", *shape, "--checkpointing", "--check"
    done = run_dunes(*line, "--json")
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)["results"]
    assert small["peak"] < large["peak"]
    for one in (small, large):
        assert one["tensors"] == one["peak"] == sum(one["kinds"].values())
        assert one["checkpointing"]
    assert "process grew by" in run_dunes(*line).stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpus_allocator_holds_what_tensors_hold():
    build = of_shape("arcee", 40_000_000).outline
    with torch.device("cuda"):
        train_allocations(build, Shape(2, 64), estimated=False)
        before = measure.reset_peak_memory(torch.device("cuda"))
        log = train_allocations(build, Shape(8, 256), estimated=False)
    truth = torch.cuda.max_memory_allocated() - before
    assert log.peak == pytest.approx(truth, rel=0.02)

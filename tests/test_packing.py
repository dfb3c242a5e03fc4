"""Examples in rows: padded or packed, what is learnt is what each of them alone would teach."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import refuses
from dunes import augment, tree
from dunes.checkpoint import LoadedModel
from dunes.data import Batches, Example, PackedText, Windows
from dunes.data.batches import best_fit, collate
from dunes.evaluate.text_loss import evaluate
from dunes.models import FAMILIES
from dunes.models.initialise import initialise
from dunes.models.named_parts import build
from dunes.ops.cross_entropy import IGNORE
from dunes.parts import Cache, Checkpointed, decoder
from dunes.parts.context import ForwardContext, document_starts, supports_packing
from dunes.parts.decoder import record_auxiliary
from dunes.parts.moe import load_balance
from dunes.train import loss
from dunes.train.loss import next_token_loss
from dunes.train.trainer import Trainer
from own_parts import OWN, of_own_parts
from small_models import add_noise

VOCAB, CONTEXT, END = 50, 24, 49
FAMILY = ("llama", "gpt2", "mistral")


def example(length, asked=None, seed=0):
    """Random ids, of which the last `asked` (half of them) are trained on; the last is the end."""
    ids = np.random.default_rng((seed, length)).integers(0, END, length).astype(np.int32)
    ids[-1] = END
    trained = np.arange(length) >= length - (length // 2 if asked is None else asked)
    return Example(ids, trained, f"made {seed}")


EXAMPLES = [example(n, seed=i) for i, n in enumerate((5, 9, 3, 2, 25, 12, 7, 12, 16, 4))]


def model(family, context=CONTEXT):
    torch.manual_seed(0)
    module = FAMILIES[family]
    made = module.build(module.Config.from_size(VOCAB, 32, 2, context)).double()
    # Larger than at the start, so that attention to the wrong tokens shows.
    for p in made.parameters():
        p.data.mul_(3)
    return made


def taught(module, batches, how=loss.next_token):
    """The sums of loss and count, and the gradients of the summed loss."""
    module.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        nats, counted, *_ = how(module, batch)
        nats.backward()
        total, count = total + nats.item(), count + int(counted)
    return total, count, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def alone(examples):
    """Each example by itself, without positions: what packing and padding have to equal."""
    for e in examples:
        ids = torch.from_numpy(e.ids.astype(np.int64))[None]
        yield ids[:, :-1], ids[:, 1:].where(torch.from_numpy(e.loss_mask)[None, 1:], IGNORE)


def packed(examples=EXAMPLES, batch=2, **options):
    return list(Batches(examples, CONTEXT, batch, **options).one_epoch())


def differs(family, how=loss.next_token, dtype=torch.float64, **options):
    """How far packed or padded batches are from the examples by themselves, relatively: loss and gradients."""
    module = model(family).to(dtype)
    want = taught(module, alone(EXAMPLES), how)
    found = taught(module, packed(**options), how)
    assert found[1] == want[1] == sum(int(e.loss_mask[1:].sum()) for e in EXAMPLES)
    return abs(found[0] / want[0] - 1), float((found[2] - want[2]).norm() / want[2].norm())


def nats(module, batch):
    return next_token_loss(module, batch)[:2]


@pytest.mark.parametrize("how", [loss.next_token, nats])
@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("family", FAMILY)
def test_a_packed_loss_is_the_sum_of_separate_losses(family, in_rows, how):
    """A5, gradients too; gpt2 has learned positions, mistral a window of half the context."""
    loss_off, gradient_off = differs(family, how, packed=in_rows)
    print(f"{family} {'packed' if in_rows else 'padded'}: loss {loss_off:.1e}, gradient {gradient_off:.1e}")
    assert loss_off < 1e-5
    assert gradient_off < 1e-5


class WideNorm(nn.LayerNorm):
    """Reduces in float32 and leaves it at that, as many do."""

    supports_packing = True

    def forward(self, x):
        return super().forward(x.float())


@pytest.mark.parametrize("normed", [("q_norm",), ("k_norm",), ("q_norm", "k_norm")])
@pytest.mark.parametrize("norm", [nn.LayerNorm, WideNorm])
def test_norms_of_queries_and_keys_that_give_float32(norm, normed):
    """Beside values in bfloat16, from autocast, and from weights in it."""
    module = model("llama").float()
    for p in module.parameters():
        p.data.div_(3)  # bfloat16's rounding would be the larger part of such gradients
    for block in module.blocks:
        for name in normed:
            setattr(block.attn, name, norm(block.attn.head_dim))
    exact = taught(module, packed(), nats)
    with torch.autocast("cpu", torch.bfloat16):
        for batches in (packed(), packed(packed=False), alone(EXAMPLES)):
            rough = taught(module, batches, nats)
            assert abs(rough[0] / exact[0] - 1) < 0.01
            assert (rough[2] - exact[2]).norm() < 0.03 * exact[2].norm()
    module.to(torch.bfloat16)
    for name in normed if norm is WideNorm else ():
        for block in module.blocks:
            getattr(block.attn, name).float()
    assert abs(taught(module, packed(), nats)[0] / exact[0] - 1) < 0.02
    cache, ids = Cache(1, CONTEXT), torch.arange(12)[None]
    with torch.no_grad():
        got = torch.cat([module(part, cache=cache) for part in ids.split([7, 1, 4], 1)], 1)
        assert (got - module(ids)).abs().max() < 0.1 * module(ids).abs().max()


def test_micro_batches_of_unequal_counts_are_one_large_batch():
    sizes = ((3, 1), (20, 19), (9, 2))
    examples = [example(n, asked, seed=i) for i, (n, asked) in enumerate(sizes)]
    batches = [collate([[e]], CONTEXT) for e in examples]

    def stepped(how, *micro):
        module = model("llama").float()
        trainer = Trainer(module, torch.optim.SGD(module.parameters(), 0.1), how, accumulate=len(micro), clip=None)
        trainer.gradients(list(micro))
        return torch.cat([p.grad.flatten() for p in module.parameters()])

    whole = stepped(loss.next_token, collate([[e] for e in examples], CONTEXT))
    row = stepped(loss.next_token, *(collate([part], CONTEXT, True) for part in (examples[:1], examples[1:2])),
                  collate([examples[2:]], CONTEXT, True))  # fmt: skip
    assert (stepped(loss.next_token, *batches) - whole).norm() < 1e-5 * whole.norm()
    assert (row - whole).norm() < 1e-5 * whole.norm()


# What is in a batch


def test_rows_hold_ids_targets_and_positions():
    a = Example(np.array([7, 8, 49], np.int32), np.array([0, 1, 1], bool))
    b = Example(np.array([5, 49], np.int32), np.array([1, 1], bool))
    ids, targets, positions = collate([[a, b], [b]], 5, full=True)
    assert ids.tolist() == [[7, 8, 5, 0, 0], [5, 0, 0, 0, 0]]
    assert targets.tolist() == [[8, 49, 49, IGNORE, IGNORE], [49] + [IGNORE] * 4]
    assert positions.tolist() == [[0, 1, 0, -1, -1], [0, -1, -1, -1, -1]]
    assert {t.dtype for t in (ids, targets, positions)} == {torch.int64}
    assert [tuple(t.shape) for t in collate([[a, b], [b]], 5)] == [(2, 3)] * 3


@pytest.mark.parametrize("family", FAMILY)
def test_what_is_in_prompts_and_padding_is_not_trained_on(family):
    """A3: neither the targets of a prompt nor the ids of padding change the loss or a gradient."""
    module = model(family)
    ids, targets, positions = collate([[e] for e in EXAMPLES[:3]], CONTEXT, full=True)
    want = taught(module, [(ids, targets, positions)])
    for filling in (1, END):
        found = taught(module, [(ids.where(positions >= 0, filling), targets, positions)])
        assert found[:2] == pytest.approx(want[:2], abs=1e-9)
        assert torch.allclose(found[2], want[2], atol=1e-9)
    asked = Example(EXAMPLES[1].ids.copy(), EXAMPLES[1].loss_mask)
    first = int(asked.loss_mask.argmax())
    parts = collate([[asked]], CONTEXT)
    assert (parts[1][0, : first - 1] == IGNORE).all()
    assert (parts[1][0, first - 1 :] >= 0).all()


def test_what_has_no_target_is_left_out():
    late, prompt, one = example(CONTEXT + 9, asked=3), example(6, asked=0), example(1, asked=1)
    made = Batches([late, EXAMPLES[0], prompt, one], CONTEXT, 1)
    assert (made.rows_per_epoch, made.row(0), made.row(7)) == (1, [1], [1])
    refuses("none of 3 examples has a target within 24 tokens", Batches, [late, prompt, one], CONTEXT, 1)


# The order


@pytest.mark.parametrize("in_rows", [True, False])
def test_every_epoch_holds_each_example_once_in_another_order(in_rows):
    many = [example(2 + i % 20, seed=i) for i in range(200)]
    made = Batches(many, CONTEXT, 4, seed=3, packed=in_rows)
    epochs = [[made.row(e * made.rows_per_epoch + i) for i in range(made.rows_per_epoch)] for e in range(3)]
    for rows in epochs:
        assert sorted(i for row in rows for i in row) == list(range(200))
        assert all(sum(len(many[i]) - 1 for i in row) <= CONTEXT for row in rows)
    assert epochs[0] != epochs[1] != epochs[2]
    assert {tuple(sorted(row)) for row in epochs[0]} != {tuple(sorted(row)) for row in epochs[1]} or not in_rows
    other = Batches(many, CONTEXT, 4, seed=4, packed=in_rows)
    assert [other.row(i) for i in range(9)] != [made.row(i) for i in range(9)]
    # The order of the rows too, and not only which of the equally long examples are in them.
    lengths = [[[len(many[i]) for i in m.row(n)] for n in range(9)] for m in (made, other)]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize("in_rows", [True, False])
def test_a_batch_is_a_function_of_its_number(in_rows):
    """So that a cursor is one number: across epochs, in any order, by any object."""
    made = Batches(EXAMPLES, CONTEXT, 3, seed=1, packed=in_rows)
    walked = [batch for batch, _ in zip(made.batches(), range(9), strict=False)]
    again = Batches(EXAMPLES, CONTEXT, 3, seed=1, packed=in_rows)
    for number in (8, 0, 5):
        assert all(map(torch.equal, again.batch(number), walked[number]))
    assert all(map(torch.equal, next(again.batches(7)), walked[7]))
    assert not in_rows or {b[0].shape for b in walked} == {(3, CONTEXT)}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 30), max_size=60))
def test_best_fit_fills_rows_as_the_slow_way_does(lengths):
    lengths = sorted(lengths, reverse=True)
    rows = best_fit(lengths, 30)
    spaces = []
    for length in lengths:
        fits = [s for s in spaces if s >= length]
        if fits:
            spaces.remove(min(fits))
        spaces.append((min(fits) if fits else 30) - length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert sorted(30 - sum(lengths[i] for i in row) for row in rows) == sorted(spaces)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 30) + 4 or min(lengths) > 10


def test_documents_of_rows_that_begin_anywhere():
    """A row whose first position follows the one before it, padding on both sides, one within."""
    positions = torch.tensor([[-1, 0, 1, 2, -1], [3, 4, 5, -1, 6], [0, 1, 0, 0, 1]])
    starts = document_starts(positions)
    assert starts.tolist() == [0, 0, 0, 3, 3, 3, 6, 7, 7, 9, 10, 10]
    assert ForwardContext(positions.to("meta"), document_starts=starts.to("meta")).starts().is_meta
    text = PackedText(np.array([3, 4, 5, 6, 7, 8]), np.array([0, 3]), END)
    ids, targets, positions = Windows(text, 5, 1).batch(0)
    assert ids.tolist() == [[3, 4, 5, 6, 7]]
    assert targets.tolist() == [[4, 5, IGNORE, 7, 8]], "a text that was cut teaches no first token"
    assert positions.tolist() == [[0, 1, 2, 0, 1]]


@pytest.mark.filterwarnings("ignore:.*may mix tokens")
@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_of_padding_alone_is_nothing(rows):
    ids = torch.zeros(rows, 3, dtype=torch.long)
    for module in (model("llama"), of_own_parts("shift")):
        total, count, _ = module(ids, torch.full_like(ids, -1), targets=torch.full_like(ids, IGNORE))
        assert (float(total.detach()), int(count)) == (0.0, 0)
        assert module(ids, torch.full_like(ids, -1)).shape == (rows, 3, VOCAB)


def test_dropout_of_attention_keeps_the_rows_as_they_are():
    module = model("gpt2").train()
    for block in module.blocks:
        block.attn.dropout = 0.5
    seen = []
    module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    ids, targets, positions = Batches(EXAMPLES, CONTEXT, 2, packed=False).batch(0)
    module(ids, positions, targets=targets)
    assert seen == [ids.shape]


@pytest.mark.parametrize("way", ["flattened", "masked", "by length"])
@pytest.mark.parametrize(
    "parts",
    [
        {"head": "untied", "position": "learned"},
        {"logits": "capped", "window": "alternating"},
        {"attention": "values", "block": "sandwich", "position": "alibi"},
    ],
    ids=lambda parts: "-".join(parts.values()),
)
def test_named_parts_learn_of_packed_documents_what_each_teaches_alone(parts, way, monkeypatch):
    """Also where a layer hands its values on to the later ones."""
    module = add_noise(initialise(build(VOCAB, 32, 2, CONTEXT, norm="layer", **parts)), 0.1).double()
    if way == "masked":
        monkeypatch.setattr(decoder, "readable_on_host", lambda x: False)
    elif way == "by length":
        monkeypatch.setattr(decoder, "supports_packing", lambda x: False)
    want, found = (taught(module, batches, nats) for batches in (alone(EXAMPLES), packed()))
    assert found[1] == want[1]
    assert abs(found[0] / want[0] - 1) < 1e-6
    assert (found[2] - want[2]).norm() < 1e-6 * want[2].norm()


# Parts of one's own, which may mix tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*may mix tokens")
@pytest.mark.parametrize(("how", "in_rows"), [(loss.next_token, True), (nats, False)])
@pytest.mark.parametrize("name", OWN)
def test_documents_do_not_see_each_other_through_parts_of_ones_own(name, in_rows, how):
    module = of_own_parts(name).eval()
    want = taught(module, alone(EXAMPLES), how)
    found = taught(module, packed(packed=in_rows), how)
    assert abs(found[0] / want[0] - 1) < 1e-6
    assert (found[2] - want[2]).norm() < 1e-6 * want[2].norm()


@pytest.mark.filterwarnings("ignore:.*may mix tokens")
def test_a_mixture_beside_what_mixes_tokens_is_balanced_over_the_whole_batch():
    module, (batch,) = of_own_parts("beside a mixture"), packed(batch=20)
    added = nats(module.train(), batch)[0] - nats(module.eval(), batch)[0]
    with record_auxiliary(module.train()) as recorded:
        for ids, _ in alone(EXAMPLES):
            module(ids)
    balance = torch.stack([load_balance(torch.cat(logits), 2) for logits in recorded.values()]).mean()
    assert float(added.detach()) == pytest.approx(0.1 * float(balance.detach()) * int((batch[1] != IGNORE).sum()))


@pytest.mark.parametrize("name", ["attention with a context", "per token"])
def test_parts_that_say_so_share_rows(name):
    module, seen = of_own_parts(name), []
    module.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:2]))
    nats(module, packed()[0])
    assert seen == [(2, CONTEXT) if name == "attention with a context" else (1, decoder.PAD_MULTIPLE)]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_share_rows_with_what_is_put_on_them(family):
    module = model(family).float()
    augment.quantize(module, where=("blocks.*.attn.q", "blocks.*.attn.project"))
    augment.attach(module, rank=2)
    tree.replace(module, "blocks.*", Checkpointed)
    assert supports_packing(module)


def test_the_loss_reads_the_head_as_the_logits_do():
    """A head's bias counts, and what a subclass does in its forward."""

    class Capped(nn.Linear):
        def forward(self, x):
            return super().forward(x).tanh()

    ids = torch.randint(VOCAB, (2, 9))
    for head in (nn.Linear(32, VOCAB), Capped(32, VOCAB, bias=False), nn.Linear(32, VOCAB, bias=False)):
        module = of_own_parts("per token")
        module.head = head.double()
        total, count, _ = module(ids[:, :-1], targets=ids[:, 1:])
        want, _ = loss.next_token(module, ids)
        assert (float(total.detach()), int(count)) == pytest.approx((float(want.detach()), 16))


def test_an_overflow_where_nothing_is_asked_stays_out_of_the_loss_of_any_head():
    for head in (nn.Linear(32, VOCAB), nn.Linear(32, VOCAB, bias=False)):
        module = of_own_parts("per token").float()
        module.head, ids = head, torch.randint(VOCAB, (1, 9))
        overflow = lambda _, inputs, output: output.index_fill(1, torch.tensor(3), torch.inf)
        module.norm.register_forward_hook(overflow)
        total, _, _ = module(ids, targets=ids.index_fill(1, torch.tensor(3), IGNORE))
        total.backward()
        assert torch.isfinite(total)
        assert torch.isfinite(head.weight.grad).all()


def window_of_three():
    """Three documents, each ended by END, as one text; and each alone, begun by the end of the one before."""
    generator = np.random.default_rng(0)
    lengths = (9, 5, 11)
    text = np.concatenate([[*generator.integers(0, END, n - 1), END] for n in lengths])
    begins = np.array([0, 8, 13])
    alone = [text[a : b + 1] for a, b in zip(begins, [8, 13, 24], strict=True)]
    return PackedText(text, begins, END), [torch.from_numpy(ids)[None] for ids in alone]


@pytest.mark.parametrize("family", [*FAMILY, "mixtral"])
@pytest.mark.parametrize("varlen", [True, False])
def test_the_loss_of_a_window_of_three_documents_is_the_sum_of_theirs(family, varlen, monkeypatch):
    if not varlen:  # as on a device whose values are not read
        monkeypatch.setattr(decoder, "readable_on_host", lambda x: False)
    module, (text, documents) = model(family).eval(), window_of_three()
    batch = Windows(text, len(text) - 1, 1).batch(0)
    total, count, gradient = taught(module, [batch], next_token_loss)
    whole, counts, gradients = taught(module, documents, next_token_loss)
    assert count == counts == 24
    assert total == pytest.approx(whole, rel=1e-5)
    assert (gradient - gradients).abs().max() < 1e-5 * gradients.abs().max()
    joined, *_ = taught(module, Windows(text.tokens, len(text) - 1, 1).batch(0)[None], next_token_loss)
    assert abs(joined - whole) > 1e-3 * whole, "together they see each other"


def test_scoring_separates_documents_as_training_does():
    module, (text, documents) = model("llama").eval(), window_of_three()
    without_headers = SimpleNamespace(token_to_id=lambda token: None)
    loaded = LoadedModel(module, SimpleNamespace(token_bytes=[b"a"] * VOCAB, inner=without_headers), CONTEXT)
    score = evaluate(loaded, text)
    alone = sum(evaluate(loaded, ids[0].numpy()).loss_sum for ids in documents)
    assert score.tokens == 24
    assert score.loss_sum == pytest.approx(alone, rel=1e-5)
    # Windows that cut documents, of which the last is cut short by the end of the text.
    short = replace(loaded, context_length=7)
    cut = evaluate(short, text)
    pieces = [text.tokens[a : b + 1] for a, b in ((0, 7), (7, 8), (8, 13), (13, 14), (14, 21), (21, 24))]
    assert cut.tokens == 24
    assert cut.loss_sum == pytest.approx(sum(evaluate(short, p).loss_sum for p in pieces), rel=1e-5)

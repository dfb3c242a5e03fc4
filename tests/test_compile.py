"""torch.compile: one graph for each family's loss and forward, with the numbers that eager gives."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from dunes.augment import apply_change, attach, quantize
from dunes.models import FAMILIES
from dunes.ops import cross_entropy, expert_products
from dunes.parts import Checkpointed
from dunes.parts.layers import ZeroCenteredRMSNorm
from dunes.train import Trainer, muon
from dunes.train.loss import next_token_loss as loss
from dunes.tree import replace as replace_modules

VOCAB, LIMIT = 50, 1e-5


def build(family, depth=1, **sizes):
    """Six heads of four that share two key/value heads, a window shorter than the text, experts."""
    module = FAMILIES[family]
    config = module.Config.from_size(VOCAB, 24, depth, 16)
    sizes = {
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 4,
        "hidden": 32,
        "window": 5,
        "experts": 4,
        "rotary_dim": 2,
        "rope_dim": 2,
    } | sizes
    model = module.build(replace(config, **{k: v for k, v in sizes.items() if hasattr(config, k)}))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) / 4 + (p.dim() < 2))
        for m in model.modules():
            if isinstance(m, ZeroCenteredRMSNorm):
                m.weight -= 1  # norms that double their input double its rounding, too
    return model


def tokens(rows=2, length=13):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))


def differentiate(model, function, *inputs):
    """The loss in nats/token and its gradients by name, and what else the function gives."""
    model.zero_grad()
    total, count, *others = (x for x in function(model, *inputs) if isinstance(x, torch.Tensor))
    (total / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": (total / count).detach(), **grads} | {str(i): x.detach() for i, x in enumerate(others)}


def assert_close(got, want, limit=LIMIT):
    assert got.keys() == want.keys()
    for name in want:
        difference = (got[name] - want[name]).abs().max()
        assert difference <= limit, f"{name} differs by {difference:.1e}"


def assert_compiles(model, backend, function=loss, inputs=None, limit=LIMIT, **options):
    torch.compiler.reset()
    inputs = (tokens(),) if inputs is None else inputs
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    assert_close(differentiate(model, compiled, *inputs), differentiate(model, function, *inputs), limit)


def assert_forward_compiles(model, backend, **options):
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    with torch.no_grad():
        for ids in (tokens(), tokens(3, 9)):
            assert (compiled(ids) - model(ids)).abs().max() <= LIMIT


def quantized_and_adapted(kind):
    model = build("llama")
    quantize(model, kind=kind)
    attach(model, rank=4)
    for name, p in model.named_parameters():
        if ".B" in name:
            torch.nn.init.normal_(p, std=0.1)
    return model


def adapted_experts():
    model = build("qwen3_moe")
    attach(model, rank=2, where="blocks.**")
    return model


def checkpointed():
    model = build("llama", depth=2)
    replace_modules(model, "blocks.*", Checkpointed)
    return model


MODELS = {family: partial(build, family) for family in FAMILIES} | {
    "adapters on an int8 base": partial(quantized_and_adapted, "int8"),
    "adapters on an nf4 base": partial(quantized_and_adapted, "nf4"),
    "adapters on experts": adapted_experts,
    "checkpointed blocks": checkpointed,
    "experts whose sides do not fit a grouped product": partial(build, "mixtral", hidden=33),
    "such experts in float64": lambda: build("mixtral", hidden=33).double(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_forward_are_one_graph_each(name):
    model = MODELS[name]()
    assert_compiles(model, "aot_eager")
    assert_forward_compiles(model, "aot_eager")


def test_a_compiled_model_trains_with_its_loss_in_the_graph():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    losses = []
    for compiled in (False, True):
        model = build("mixtral")
        model = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        steps = Trainer(model, muon(model), loss).run([tokens()] * 3)
        losses.append([(step.loss, step.metrics["balance"]) for step in steps])
    assert len(graphs) == 1
    operations = {node.target for node in graphs[0].graph.nodes}
    assert torch.ops.dunes.linear_cross_entropy in {getattr(op, "overloadpacket", op) for op in operations}
    assert torch.tensor(losses[1][0]).allclose(torch.tensor(losses[0][0]), rtol=0, atol=LIMIT)
    # Muon's iterations make more of a different rounding.
    assert torch.tensor(losses[1]).allclose(torch.tensor(losses[0]), rtol=0, atol=20 * LIMIT)
    assert losses[0][2][0] < losses[0][0][0]


@pytest.mark.slow
def test_a_compiled_loss_counts_the_load_that_moves_the_selection_bias():
    torch.compiler.reset()
    biases = []
    for compiled in (False, True):
        model = build("mixtral")
        apply_change(model, "routing", shared=1, bias_rate=0.25, z_loss=0.1)
        function = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        list(Trainer(model, muon(model), function).run([tokens()] * 3))
        biases.append(torch.cat([block.mlp.selection_bias for block in model.blocks]))
    assert torch.equal(*biases)
    assert biases[0].abs().max() >= 0.25


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "family", [f if f == "mistral" else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES]
)
def test_inductor_gives_what_eager_gives_for_every_family(family):
    model = build(family, eps=1e-3)
    assert_compiles(model, "inductor")
    assert_forward_compiles(model, "inductor")


@pytest.mark.slow
def test_texts_of_other_lengths_need_no_other_graph():
    model = build("mistral")
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    differentiate(model, compiled, tokens())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in (tokens(3, 12), tokens(2, 16), tokens(5, 8)):
            assert_close(differentiate(model, compiled, ids), differentiate(model, loss, ids))


@pytest.mark.slow
def test_packed_documents_are_one_graph():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0, -1], [*range(12)]])
    targets = tokens(2, 12).where(positions >= 0, cross_entropy.IGNORE)
    packed_loss = lambda model, *batch: loss(model, batch)
    assert_compiles(build("mistral"), "aot_eager", packed_loss, (tokens(2, 12), targets, positions))


@pytest.mark.slow
def test_experts_in_int8_are_one_graph_though_nobody_knows_their_rows():
    torch.compiler.reset()
    model = build("mixtral")
    quantize(model, kind="int8")
    with torch.no_grad():
        logits = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens())
        assert (logits - model(tokens())).abs().max() <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bfloat16_by_autocast_is_one_graph(family):
    def rounded(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, ids)

    model = build(family)
    assert_compiles(model, "aot_eager", rounded, limit=0.02)


def test_what_stands_for_them_in_a_graph_is_an_operator():
    x, weight, targets = torch.randn(9, 8), torch.randn(11, 8), torch.arange(9)
    x.requires_grad_()
    check = torch.library.opcheck
    check(cross_entropy.linear_cross_entropy, (x, weight.requires_grad_(), targets, torch.float32, True, True))
    check(cross_entropy.linear_cross_entropy, (x, weight.detach(), targets, torch.float32, True, False))
    rows, ends = torch.randn(9, 8, requires_grad=True), torch.tensor([4, 4, 9], dtype=torch.int32)
    apart = [torch.randn(12, 8, requires_grad=True) for _ in range(3)]
    together = [w.detach().requires_grad_() for w in torch.randn(3, 12, 8)]
    for weights in (apart, together):
        check(expert_products.products, (rows, weights, ends, False))

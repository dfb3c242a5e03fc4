"""Watching networks, without a trace; tables of their modules; moving their tensors."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as recomputed

from conftest import refuses
from dunes import checkpoint, tree
from dunes.flags import PARTS
from dunes.models import FAMILIES, build_on_meta, named_parts
from dunes.text import Tokenizer
from own_networks import NETWORKS, ConvNet, Rows, Tied
from small_models import random_model, small_config


def hook_tables(network):
    names = [name for name in vars(nn.Module()) if "hook" in name]
    plain = lambda value: dict(value) if hasattr(value, "items") else value
    return [{name: plain(vars(m)[name]) for name in names} for m in network.modules()]


def first(output):
    return tree_leaves(output)[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_watching_changes_no_bit_and_leaves_nothing(name):
    build, example = NETWORKS[name]
    torch.manual_seed(0)
    network, x = build().eval(), example()
    before, tables = first(network(x)), hook_tables(network)
    before.sum().backward() if before.requires_grad else None
    grads = [None if p.grad is None else p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    if name == "torch's own":
        network = nn.Sequential(network)
        tables = hook_tables(network)
    with tree.statistics(network) as seen:
        output = first(network(x))
        output.sum().backward() if output.requires_grad else None
    assert any(record.calls for record in seen.values())
    assert torch.equal(output, before)
    after = [p.grad for p in network.parameters()]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(after, grads, strict=True))
    assert hook_tables(network) == tables
    assert not output._backward_hooks
    kept = weakref.ref(network), weakref.ref(output)
    del network, output
    gc.collect()
    assert [ref() for ref in kept] == [None, None], "the statistics keep nothing alive"


def test_statistics_are_those_of_all_calls_together():
    torch.manual_seed(0)
    network = ConvNet().eval()
    outputs, gradients = [], []
    forward, backward = lambda _, y: outputs.append(y.detach().clone()), lambda *a: gradients.append(a[2])
    with tree.statistics(network) as seen, tree.hooks(network, "relu", forward, backward):
        for _ in range(2):
            network(torch.randn(3, 1, 28, 28)).square().sum().backward()
    assert seen["relu"].calls == 4
    assert "unused" in seen
    assert not seen["unused"].calls
    for values, record in ((outputs, seen["relu"].output), (gradients, seen["relu"].gradient)):
        values = torch.cat([v.flatten() for v in values]).double()
        assert record.count == values.numel()
        expected = values.mean(), values.std(correction=0), values.abs().max(), (values == 0).double().mean()
        actual = record.mean, record.std, record.largest, record.zeros
        torch.testing.assert_close(torch.tensor(actual), torch.stack(expected).float(), rtol=1e-5, atol=1e-7)


def test_values_that_are_not_finite_are_counted_apart():
    record = tree.Statistics()
    record.add(torch.tensor([1.0, float("nan"), 3.0, 0.0]))
    record.add(torch.tensor([float("inf"), -float("inf")], dtype=torch.bfloat16))
    assert (record.count, record.nonfinite, record.largest, record.zeros) == (6, 3, 3.0, 1 / 6)
    assert record.mean == pytest.approx(4 / 3)
    assert tree.Statistics().std != tree.Statistics().std


def test_several_outputs_have_an_entry_each():
    with tree.statistics(Rows()) as seen:
        pass
    assert [*seen] == ["lstm", "head"]
    network = Rows()
    with tree.statistics(network) as seen:
        network(torch.rand(2, 28, 28)).sum().backward()
    assert {*seen} == {"lstm[0]", "lstm[1][0]", "lstm[1][1]", "head['scores']", "head['hidden']"}
    assert seen["head['scores']"].gradient.mean == 1
    assert not seen["lstm[1][0]"].gradient.count


def test_a_module_at_several_places_is_one_and_counts_all_calls():
    network = Tied()
    with tree.statistics(network) as seen:
        network(torch.rand(2, 6))
    assert {k: v.calls for k, v in seen.items()} == {"first": 2, "out": 1}
    assert [p.name for p in tree.places(network)] == ["first", "again", "out"]
    tree.replace(network, ["first", "again"], lambda m: nn.Linear(6, 6))
    assert network.first is network.again
    twice = nn.Sequential(*[nn.Linear(2, 2)] * 2)
    assert tree.replace(twice, "*", lambda m: nn.Tanh()) == ["0", "1"]
    assert twice[0] is twice[1]


def test_hooks_are_gone_after_an_error_and_do_nothing_afterwards():
    network = ConvNet()
    tables = hook_tables(network)
    outputs = []

    def interrupted():
        with tree.statistics(network) as seen:
            outputs.extend([seen, network(torch.rand(2, 1, 28, 28))])
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    seen, output = outputs
    output.sum().backward()
    assert hook_tables(network) == tables
    assert not seen["head"].gradient.count
    with pytest.raises(RuntimeError), tree.statistics(network):
        network(torch.rand(2, 3, 28, 28))
    assert hook_tables(network) == tables
    with pytest.raises(ValueError, match="'gone' selects nothing"), tree.statistics(network, "gone"):
        pass


def test_recomputation_is_no_call():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    with tree.statistics(network) as seen:
        recomputed(network, torch.rand(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen["0"].calls == 1
    assert seen["1"].gradient.mean == 1


def test_compiled_code_runs_as_it_was_written_while_it_is_watched():
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    graphs = []
    compiled = torch.compile(network, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    x = torch.rand(2, 3)
    with tree.statistics(compiled) as seen:
        compiled(x)
    assert seen["0"].calls == 1
    assert not graphs
    compiled(x)
    assert len(graphs) == 1
    with tree.statistics(compiled) as seen:
        compiled(x)
    assert [*seen] == ["0", "1"]
    assert seen["0"].calls == 1
    compiled(x)
    assert len(graphs) == 1, "the compiled form is still there"
    assert seen["0"].calls == 1
    torch._dynamo.reset()


def test_a_table_has_shapes_flops_and_memory_and_leaves_no_trace():
    network = ConvNet()
    before, tables = {k: v.clone() for k, v in network.state_dict().items()}, hook_tables(network)
    torch.manual_seed(0)
    rows = {row.name: row for row in tree.layers(network, torch.rand(3, 1, 28, 28))}
    assert rows[""].flops == (2 * 3 * 4 * 24 * 24 * 25 + 2 * 3 * 8 * 8 * 8 * 100) + 2 * 3 * 128 * 10
    assert rows[""].parameters == tree.count(network)
    assert (rows["conv1"].inputs, rows["conv1"].outputs) == ("3x1x28x28", "3x4x24x24")
    assert (rows["relu"].calls, rows["unused"].calls) == (2, 0)
    assert rows["head"].bytes == 4 * 1290
    assert rows[""].kept >= rows["norm"].kept >= 4 * 3 * 4 * 24 * 24
    assert network.training
    assert hook_tables(network) == tables
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    lstm = {row.name: row for row in tree.layers(Rows(), torch.rand(3, 28, 28))}["lstm"]
    assert lstm.flops == 2 * 3 * 28 * 4 * 16 * (28 + 16 + 16 + 16)
    assert tree.layers(network)[0].flops is None


def test_tables_of_odd_networks():
    with torch.device("meta"):
        meta = ConvNet()
    assert tree.layers(meta, torch.rand(3, 1, 28, 28))[0].outputs == "3x10"
    refuses(r"does not fit at conv1: .*expected input", tree.layers, ConvNet(), torch.rand(3, 2, 28, 28))
    refuses(r"the example does not fit at the network: .*unexpected keyword", tree.layers, ConvNet(), other=1)
    assert tree.layers(nn.Sequential(nn.ReLU()), torch.rand(2, 2))[0].parameters == 0


def test_what_is_selected_moves_and_stays_the_same_object():
    network = Tied()
    network.register_buffer("seen", torch.zeros(2, dtype=torch.long))
    network(torch.rand(2, 6)).sum().backward()
    before = {k: id(p) for k, p in network.named_parameters()}
    assert "out.weight" in tree.move(network, dtype=torch.float64)
    assert {k: id(p) for k, p in network.named_parameters()} == before
    assert network.out.weight is network.first.weight
    dtypes = [{t.dtype for t in ts} for ts in zip(*((p, p.grad) for p in network.parameters()), strict=True)]
    assert dtypes == [{torch.float64}] * 2
    assert network.seen.dtype == torch.long
    assert tree.move(network, "out.bias", dtype=torch.bfloat16) == ["out.bias"]
    assert (network.out.bias.dtype, network.first.bias.dtype) == (torch.bfloat16, torch.float64)
    refuses(r"dtype is torch\.int8; expected a floating-point dtype", tree.move, network, dtype=torch.int8)
    refuses(r"first\.weight would lose its values", tree.move, network, device="meta")
    refuses("'gone' selects no parameter and no buffer", tree.move, network, "gone", dtype=torch.float32)
    refuses("selects no parameter", tree.freeze, network, "out.weight")


def test_nothing_is_recorded_afterwards_by_graphs_and_copies_made_inside():
    network, calls = ConvNet().eval(), []
    with tree.hooks(network, "**", lambda *a: calls.append(a), lambda *a: calls.append(a)):
        output, copied = network(torch.rand(2, 1, 28, 28)), deepcopy(network)
    before = len(calls)
    output.sum().backward()  # through tensors whose hooks stayed in the graph
    copied(torch.rand(2, 1, 28, 28)).sum().backward()
    assert len(calls) == before > 0


def test_one_watch_inside_another_sees_the_same_and_ends_alone():
    network, x = ConvNet().eval(), torch.rand(2, 1, 28, 28)
    tables = hook_tables(network)
    with tree.statistics(network) as outer:
        with pytest.raises(KeyError), tree.hooks(network, "conv1", lambda *_: {}["raised by a hook"]):
            network(x)
        with tree.statistics(network) as inner:
            network(x).sum().backward()
        network(x)
    assert inner["head"].calls == 1
    assert outer["head"].calls == 2
    assert inner["conv2"].gradient == outer["conv2"].gradient
    assert hook_tables(network) == tables


def test_tensors_without_plain_values_are_not_counted():
    record = tree.Statistics()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for tensor in (torch.ones(2, 2).to_sparse(), nested, torch.ones(3, device="meta"), torch.ones(0)):
        record.add(tensor)
    assert not record.count


class Delegating(nn.Module):
    """As wrappers do it: whatever it does not have is looked for inside."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 3)

    def __getattr__(self, name):
        if name in ("module", "_parameters", "_buffers", "_modules"):
            return super().__getattr__(name)
        return self.module

    def forward(self, x):
        return self.module(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_networks_that_pass_attributes_on_or_are_scripted_have_places_and_tables(capsys):
    network = Delegating()
    assert [place.name for place in tree.places(network)] == ["module"]
    with tree.statistics(network) as seen:
        network(torch.rand(2, 4))
    assert {name: record.calls for name, record in seen.items()} == {"module": 1}
    assert [layer.type for layer in tree.layers(network)] == ["Delegating", "Linear"]
    scripted = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    assert tree.freeze(scripted, "1.**") == ["1.0.weight", "1.0.bias"]
    tree.print_layers(tree.layers(scripted, torch.rand(2, 4)))
    assert "not called" not in capsys.readouterr().out
    refuses("1 is a ScriptModule, whose parts call no hooks", tree.statistics(scripted).__enter__)
    refuses(r"1\.0 is part of a ScriptModule", tree.replace, scripted, "1.0", lambda m: m)
    assert not any(m._forward_hooks for m in scripted.modules() if not isinstance(m, torch.jit.ScriptModule))


class ByValues(nn.Module):
    """Whose shapes depend on values, so that it runs itself; it draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x):
        return self.dropout(self.norm(x))[torch.rand(len(x)).argsort()][x[:, 0] > 0.5]


def test_a_network_that_must_run_itself_is_not_changed_and_draws_no_number():
    network, x = ByValues(), torch.rand(6, 4)
    tables = hook_tables(network)
    before, state = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    assert tree.layers(network, x)[1].calls == 1
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training
    assert hook_tables(network) == tables
    refuses("the example does not fit at norm", tree.layers, network, torch.rand(6, 5))
    assert hook_tables(network) == tables


def test_memory_counts_each_tensor_once():
    network = nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2), "norm": nn.BatchNorm1d(3)})
    network["right"].weight = network["left"].weight
    sizes = {layer.name: layer.bytes for layer in tree.layers(network)}
    assert sizes["norm"] == 4 * (2 * 3 + 2 * 3) + 8  # weight, bias, running mean and variance; a count of batches
    assert sizes[""] == sizes["norm"] + 4 * (4 + 2 + 2)


EVERY_PART = [(name, choice) for name, choices in PARTS.items() for choice in choices]


@pytest.mark.parametrize("part", [*FAMILIES, *EVERY_PART], ids=str)
def test_every_model_runs_on_the_meta_device_and_has_a_table(part):
    if isinstance(part, str):
        model = build_on_meta(part, small_config(part))
    else:
        with torch.device("meta"):
            model = named_parts.build(50, 32, 4, 32, **dict([part]))
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    for dtype in (torch.bfloat16, torch.float32):
        with torch.no_grad():
            assert model.to(dtype).eval()(ids).shape == (2, 9, 50)
        model.train()(ids).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model(ids, targets=ids)
    rows = tree.layers(model, torch.zeros(2, 9, dtype=torch.long))
    assert (rows[0].outputs, rows[0].flops > 0) == ("2x9x50", True)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_the_command_prints_the_table_of_a_folder(family, tmp_path, command):
    model = random_model(family, vocab=265)
    checkpoint.save(model, tmp_path / "model", Tokenizer.train("bytes", ()), 32)
    status, shown, error = command("inspect", tmp_path / "model", "--layers")
    assert (status, error) == (0, "")
    assert "1x32x265" in shown

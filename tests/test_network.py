"""Any network on disk: its weights, and the function that builds it, imported only where that is allowed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from conftest import change_json, equal_states, refuses
from dunes import checkpoint, tree
from dunes.checkpoint.architecture import import_build
from own_networks import NETWORKS, ConvNet, Rows, Tied, empty

Architecture = checkpoint.Architecture


def other(build):
    """The network with other numbers in everything that is saved."""
    torch.manual_seed(1)
    network = build()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor.copy_(torch.rand(tensor.shape) * 3)
    return network.eval()


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_the_same_bits_again_and_ties_hold(name, tmp_path):
    build, example = NETWORKS[name]
    network, x = other(build), example()
    checkpoint.save_weights(network, tmp_path / "w", {"accuracy": 0.9})
    loaded = build().eval()
    before = {k: id(p) for k, p in loaded.named_parameters()}
    assert checkpoint.load_weights(loaded, tmp_path / "w")["accuracy"] == 0.9
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["dunes.json", "model.safetensors"]
    assert equal_states(network.state_dict(), loaded.state_dict())
    assert equal_states(network(x), loaded(x))
    assert {k: id(p) for k, p in loaded.named_parameters()} == before
    again = build().eval()
    assert checkpoint.load_weights(again, tmp_path / "w" / "model.safetensors") == {}
    assert equal_states(network(x), again(x))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "net.body."])
def test_a_prefix_of_all_names_in_a_file_is_removed_and_told(prefix, tmp_path):
    network, loaded = other(lambda: ConvNet(classes=3)), ConvNet(classes=3)
    torch.save({prefix + k: v for k, v in network.state_dict().items()}, tmp_path / "w.pt")
    with pytest.warns(UserWarning, match=r"w\.pt: tensors are read without '.*\.' in their names$"):
        checkpoint.load_weights(loaded, tmp_path / "w.pt")
    assert equal_states(loaded.state_dict(), network.state_dict())
    odd = {prefix + k: v for k, v in network.state_dict().items()} | {f"{prefix}odd": torch.ones(1)}
    torch.save(odd, tmp_path / "w.pt")
    refuses(r"odd \(1,\) is not a weight .* are read without ", checkpoint.load_weights, loaded, tmp_path / "w.pt")


def test_a_network_that_holds_a_compiled_part_keeps_its_names(tmp_path):
    network = nn.Sequential(nn.Linear(2, 2))
    network[0] = torch.compile(network[0])
    torch.save(network.state_dict(), tmp_path / "w.pt")
    assert "0._orig_mod.weight" in network.state_dict()
    checkpoint.load_weights(network, tmp_path / "w.pt")


def test_a_network_and_its_function_are_one_folder(tmp_path, monkeypatch):
    network = other(lambda: ConvNet(classes=3))
    checkpoint.save(network, tmp_path / "net", architecture=Architecture.of_function(ConvNet, classes=3))
    with monkeypatch.context() as patch:
        patch.setattr("dunes.measure.free_memory", lambda device: 1000)
        refuses("are free", checkpoint.load_network, tmp_path / "net", build=ConvNet)
    loaded = checkpoint.load_network(tmp_path / "net", build=ConvNet)
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(loaded(x), network(x))
    assert not loaded.training
    words = r"a network that is no language model; load it with checkpoint\.load_network"
    refuses(words, checkpoint.load, tmp_path / "net", build=ConvNet)
    fresh = ConvNet(classes=3)
    checkpoint.load_weights(fresh, tmp_path / "net")
    assert equal_states(fresh.state_dict(), network.state_dict())
    prefixed = {f"_orig_mod.{k}": v for k, v in network.state_dict().items()}
    save_file(prefixed, tmp_path / "net" / "model.safetensors")
    change_json(tmp_path / "net" / "dunes.json", files={})
    with pytest.warns(UserWarning, match="tensors are read without '_orig_mod.' in their names"):
        loaded = checkpoint.load_network(tmp_path / "net", build=ConvNet)
    assert equal_states(loaded.state_dict(), network.state_dict())


def test_a_function_of_others_is_imported_only_with_trust_code(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange.py").write_text(
        "from pathlib import Path\nfrom torch import nn\nPath('ran').touch()\n\ndef make(width):\n"
        "    return nn.Sequential(nn.Linear(4, width), nn.ReLU())\n"
    )
    network = other(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU()))
    build = lambda width: nn.Sequential(nn.Linear(4, width), nn.ReLU())
    checkpoint.save(network, tmp_path / "net", architecture=Architecture.of_function(build, width=5))
    rename(tmp_path / "net", "strange:make")
    refuses("built by strange:make", checkpoint.load_network, tmp_path / "net")
    assert not (tmp_path / "ran").exists()
    (line,) = [line for line in command("inspect", "net")[1].splitlines() if line.startswith("loads")]
    assert "--trust-code" in line
    assert not (tmp_path / "ran").exists()
    x = torch.rand(2, 4)
    assert torch.equal(checkpoint.load_network(tmp_path / "net", trust_code=True)(x), network(x))
    assert (tmp_path / "ran").exists()
    rename(tmp_path / "net", "strange.py:make")
    assert torch.equal(checkpoint.load_network(tmp_path / "net", trust_code=True)(x), network(x))
    assert str(tmp_path) not in sys.path
    status, shown, _ = command("inspect", "net", "--trust-code", "--layers", "--example", 2, 4)
    assert (status, "2x4" in shown) == (0, True)
    sys.modules.pop("strange")


def rename(folder, name):
    change_json(folder / "dunes.json", family=lambda family: family | {"function": name})


@pytest.mark.parametrize(
    "name",
    ["own_networks:Gone", "no_such_module:make", "gone.py:make", "own_networks:NETWORKS",
     "test_network:test.<locals>.make", "../up.py:make", "dunes.models.llama:Config"],
)  # fmt: skip
def test_a_card_that_names_no_function_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = [*sys.path]
    refuses("cannot be imported", import_build, name, tmp_path)
    assert import_build("dunes.models:build_on_meta", tmp_path)
    assert sys.path == before


def test_only_networks_of_the_package_are_imported_without_trust(tmp_path):
    checkpoint.save(other(empty), tmp_path, architecture=Architecture.of_function(empty))
    names = ["dunes.models.names.re:compile", "dunes.models:torch.load", "dunes.files.atomic:rmtree"]
    for name in (*names, "os:system"):
        rename(tmp_path, name)
        refuses("not imported automatically", checkpoint.load_network, tmp_path)


SCRIPT = """
import torch
from torch import nn
from dunes import checkpoint

def make():
    return nn.Linear(3, 2)

class Net(nn.Linear):
    pass

if __name__ == "__main__":
    checkpoint.save(make(), "kept", architecture=checkpoint.Architecture.of_function(make))
    checkpoint.load_network("kept", trust_code=True)
    of_class = checkpoint.Architecture.of_function(Net, in_features=3, out_features=2)
    checkpoint.save(Net(3, 2), "class", architecture=of_class)
    print("loaded")
"""


def test_a_script_loads_what_it_saved(tmp_path):
    (tmp_path / "own-script.py").write_text(SCRIPT)
    env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "DUNES_HOME": str(tmp_path / "home")}
    line = [sys.executable, "own-script.py"]
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("loaded\n", "")
    for name, build in (("kept", "make"), ("class", "Net")):
        card = json.loads((tmp_path / name / "dunes.json").read_text())
        assert card["family"]["function"] == f"own-script.py:{build}"


def test_every_difference_is_named_and_nothing_is_changed(tmp_path):
    checkpoint.save_weights(other(ConvNet), tmp_path)
    network = ConvNet(classes=4, dropout=0.1)
    network.extra = nn.Linear(2, 2)
    del network.unused
    before = {k: v.clone() for k, v in network.state_dict().items()}
    caught = refuses("does not fit this ConvNet", checkpoint.load_weights, network, tmp_path)
    assert all(name in caught for name in ("head.weight", "extra.weight", "unused.weight", "dropout"))
    assert equal_states(before, network.state_dict())
    refuses("dropout", checkpoint.load_weights, ConvNet(dropout=0.1), tmp_path)
    refuses("conv1.bias", checkpoint.load_weights, ConvNet().bfloat16(), tmp_path / "model.safetensors")
    refuses("load_weights", checkpoint.load_network, tmp_path)
    assert checkpoint.load_network(tmp_path, build=ConvNet)


def test_damaged_and_missing_files_are_named(tmp_path):
    checkpoint.save_weights(other(Rows), tmp_path / "w")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "w" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for name, place in (("empty", "empty: "), ("w", r"model\.safetensors: .*another SHA-256")):
        refuses(place, checkpoint.load_weights, Rows(), tmp_path / name)
    with pytest.raises(FileNotFoundError, match="gone"):
        checkpoint.load_weights(Rows(), tmp_path / "gone")


def test_a_file_may_repeat_a_tied_weight_but_not_with_other_values(tmp_path):
    network = other(Tied)
    state = {k: v.clone() for k, v in network.state_dict().items()}
    torch.save(state, tmp_path / "all.pt")
    loaded = Tied()
    checkpoint.load_weights(loaded, tmp_path / "all.pt")
    assert equal_states(loaded.state_dict(), network.state_dict())
    assert loaded.out.weight is loaded.first.weight
    save_file(state | {"out.weight": state["out.weight"] + 1}, tmp_path / "other.safetensors")
    words = r"out\.weight is a tensor of its own, not the same tensor as first\.weight"
    refuses(words, checkpoint.load_weights, Tied(), tmp_path / "other.safetensors")


def test_networks_without_shapes_or_values_are_refused_by_the_name_of_a_tensor(tmp_path):
    lazy = nn.Sequential(nn.LazyLinear(3))
    with torch.device("meta"):
        meta, angles = Rows(), Angles()
    checkpoint.save_weights(other(Rows), tmp_path / "rows")
    checkpoint.save_weights(Angles(), tmp_path / "angles")
    refuses(r"0\.weight has no shape yet", checkpoint.save_weights, lazy, tmp_path / "w")
    refuses(r"0\.weight has no shape yet", checkpoint.load_weights, lazy, tmp_path / "rows")
    refuses(r"lstm\.weight_ih_l0 has no values", checkpoint.save_weights, meta, tmp_path / "w")
    refuses("angles has no values, and no file has them", checkpoint.load_weights, angles, tmp_path / "angles")
    assert not (tmp_path / "w").exists()
    checkpoint.load_weights(meta, tmp_path / "rows")  # which gives it values
    assert equal_states(meta.state_dict(), other(Rows).state_dict())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_script_module_has_weights_but_no_parts_to_change(tmp_path):
    network = other(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    script = torch.jit.script(network)
    checkpoint.save_weights(script, tmp_path)
    fresh = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    checkpoint.load_weights(fresh, tmp_path)
    x = torch.rand(2, 3)
    assert torch.equal(fresh(x), network(x))
    assert [row.type for row in tree.layers(script)] == ["Sequential", "Linear", "ReLU"]
    with pytest.raises(ValueError, match="0 is a ScriptModule, whose parts call no"), tree.statistics(script):
        pass
    refuses("0 is part of a ScriptModule", tree.replace, script, "0", lambda m: nn.Identity())


def compiled(width=4):
    return torch.compile(nn.Sequential(nn.Linear(3, width), nn.Tanh()), backend="eager")


def test_a_compiled_network_is_kept_as_what_it_was_made_from(tmp_path):
    network, x = compiled(), torch.rand(2, 3)
    checkpoint.save(network, tmp_path / "net", architecture=Architecture.of_function(compiled, width=4))
    assert torch.equal(checkpoint.load_network(tmp_path / "net", build=compiled)(x), network(x))
    checkpoint.save_weights(network, tmp_path / "weights")
    again = compiled()
    checkpoint.load_weights(again, tmp_path / "weights")
    assert torch.equal(again(x), network(x))
    checkpoint.load_weights(again, tmp_path / "weights" / "model.safetensors")
    checkpoint.save_weights(torch.compile(tied := other(Tied), backend="eager"), tmp_path / "tied")
    plain = Tied()
    checkpoint.load_weights(plain, tmp_path / "tied")
    assert equal_states(plain.state_dict(), tied.state_dict()), "under its own names"


class Remembers(nn.Linear):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_tensor_that_would_be_lost_is_refused_on_one_line(tmp_path):
    network = Remembers(3, 2)
    network(torch.rand(4, 3))
    of_class = Architecture.of_function(Remembers, in_features=3, out_features=2)
    words = r"builds a different model: the model: last is tensor\("
    refuses(words, checkpoint.save, network, tmp_path, architecture=of_class)


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("angles", torch.ones(2), persistent=False)

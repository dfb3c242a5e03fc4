"""Each change to a model: what it promises at first, that a record repeats it without numbers, and its undoing."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from adapters import IDS, build, difference
from dunes import checkpoint, tree
from dunes.augment import CHANGES, Change, apply_change, repeat_structure, undo_change
from dunes.models import FAMILIES
from dunes.runs.augment import augment_folder
from small_models import add_noise, assert_refused_unchanged, random_model
from test_lora import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")
TEXT = torch.randint(50, (40, 32), generator=torch.Generator().manual_seed(3))
BIT_FOR_BIT, ROUNDED = 0.0, 1e-5
METHODS = {
    **{
        name: ("lora", {"rank": 4, "ranks": {"**.q": 2}} | request, BIT_FOR_BIT) for name, request in KINDS.items()
    },
    **{
        name: ("lora-experts", {"rank": 4} | request, BIT_FOR_BIT)
        for name, request in {
            "lora-experts": {"experts": 3, "top_k": 3},
            "lora-experts-single": {"experts": 1, "top_k": 1},
            "lora-experts-shared": {"router": "shared", "top_k": 1},
            "lora-experts-mlp": {"router": "mlp"},
        }.items()
    },
    "expand": ("expand", {"blocks": 2}, BIT_FOR_BIT),
    "experts": ("experts", {"split": "cluster"}, None),
    "experts-noisy": ("experts", {"gate": "noisy"}, None),
    "experts-shared": ("experts", {"split": "importance", "ids": TEXT, "shared": 4}, None),
    "upcycle": ("upcycle", {"granularity": 2, "top_k": 4}, ROUNDED),
    "routing": ("routing", {"shared": 2, "bias_rate": 0.1, "z_loss": 0.5}, BIT_FOR_BIT),
    "narrow": ("narrow", {"neurons": 20, "blocks": 1, "ids": TEXT}, None),
    "prune": ("prune", {"pattern": "2:4", "ids": TEXT}, None),
    "int8": ("quantize", {"kind": "int8"}, None),
    "nf4": ("quantize", {"kind": "nf4", "double": True, "override": ["blocks.0.attn.*=int8"]}, None),
    "int4": ("quantize", {"kind": "int4", "method": "gptq", "ids": TEXT}, None),
    "int3": ("quantize", {"kind": "int3", "group": 32}, None),
}
"""The change, its request, and by how much it may move logits at first; None if it is meant to move them."""
DENSE, MIXTURES = ("experts", "upcycle"), ("routing",)
CASES = [
    (family, method)
    for family in ("llama", "gpt2", "mixtral")
    for method, (name, _, _) in METHODS.items()
    if name not in (DENSE if family == "mixtral" else MIXTURES)
]


def record_of(change):
    """The change as a card has it."""
    return Change.of(json.loads(json.dumps(change.record())))


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_change_keeps_its_promise_is_repeated_without_numbers_and_taken_back(family, method):
    name, request, limit = METHODS[method]
    if method == "lora-experts-mlp" and family == "mixtral":  # whose experts are its MLPs
        request = request | {"where": ("blocks.**", "!**.router"), "balance": 0.0}
    model = build(family, **({"hidden": 96} if family == "llama" else {}))
    config = FAMILIES[family].read(model, 32)
    before, random_state = model(IDS), torch.get_rng_state()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    change = apply_change(model, name, **request)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert limit is None or difference(model(IDS), before) <= limit
    assert record_of(change) == change
    new = [p for key, p in model.named_parameters() if any(tree.matches(glob, key) for glob in change.new)]
    for p in new:
        p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    after = model(IDS)
    assert difference(after, before) > (1e-2 if new and method != "upcycle" else -1)

    with torch.device("meta"):
        outline = FAMILIES[family].build(config).eval()
    repeat_structure(outline, record_of(change))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(value.is_meta for value in outline.state_dict().values())
    outline.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(outline(IDS), after)

    if hasattr(CHANGES[name], "undo"):
        undo_change(model, record_of(change))
        assert model.state_dict().keys() == weights.keys()
        assert name == "quantize" or all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
        assert difference(model(IDS), after if name == "quantize" else before) <= ROUNDED
    else:
        with pytest.raises(ValueError, match=f"the change {name} "):
            undo_change(model, change)


STACKS = [
    ("llama", ("expand", "experts-noisy", "lora", "int8")),
    ("llama", ("experts", "lora-experts", "int8")),
    ("llama", ("experts-shared", "int4", "dora")),
    ("llama", ("upcycle", "nf4", "lora")),
    ("mixtral", ("routing", "lora")),
    ("mixtral", ("routing", "int8")),
    ("gpt2", ("prune", "expand", "lora-experts-mlp")),
]


@pytest.mark.parametrize(("family", "methods"), STACKS)
def test_changes_after_one_another_are_saved_and_loaded(family, methods, tmp_path):
    model = build(family, **({"hidden": 96} if family == "llama" else {}))
    config, changes = FAMILIES[family].read(model, 32), []
    for name, request, _ in (METHODS[method] for method in methods):
        changes.append(apply_change(model, name, **request))
        assert not [place for place in changes[-1].places if "router" in place]
    add_noise(model, 0.01)
    architecture = checkpoint.Architecture(family, config, tuple(changes))
    checkpoint.save(model, tmp_path, None, 32, architecture=architecture)
    loaded = checkpoint.load(tmp_path)
    assert torch.equal(loaded.model(IDS), model(IDS))
    assert loaded.architecture == architecture


MIXED = {"kind": "int4", "override": ["blocks.1.**=int8"]}
PIECES = {"granularity": 2, "experts": 4}
HALF = {"heads": 2, "neurons": 40, "ids": TEXT}
KV = {"heads": 4, "kv_heads": 2, "head_dim": 8}
FOLDERS = [
    *(("llama", KV, name, request, "llama") for name, request in (("narrow", HALF), ("prune", {"ids": TEXT}))),
    ("llama", KV, "narrow", HALF | {"uneven": True}, None),
    ("llama", {"hidden": 96}, "experts", {"split": "cluster", "top_k": 4}, "mixtral"),
    ("arcee", {}, "experts", {"experts": 4}, None),
    ("gpt2", {}, "experts", {"experts": 4, "split": "cluster"}, None),
    ("llama", {}, "experts", {"experts": 4, "gate": "noisy"}, None),
    ("llama", {}, "upcycle", PIECES, "mixtral"),
    ("mistral", {}, "upcycle", PIECES, "mixtral"),
    ("qwen3", {}, "upcycle", PIECES, "qwen3_moe"),
    *((family, {}, "upcycle", {"drop": 0.25}, None) for family in ("arcee", "gpt2", "qwen2")),
    *(("llama", {f"{part}_bias": True}, "upcycle", {"drop": 0.25}, None) for part in ("mlp", "attention")),
    *(("llama", {}, "lora-experts", {"rank": 4, "router": r}, None) for r in ("linear", "shared", "mlp")),
    ("llama", {}, "quantize", MIXED, None),
]
"""Family, fields, change, request, and the model_type that transformers opens."""


@pytest.mark.parametrize(("family", "fields", "name", "request_", "written"), FOLDERS)
@torch.no_grad()
def test_a_changed_folder_is_the_changed_model_and_opens_in_transformers(
    family, fields, name, request_, written, tmp_path
):
    model = random_model(family, **fields)
    checkpoint.save(model, tmp_path / "before", None, 32)
    lines = augment_folder(tmp_path / "before", tmp_path / "after", name, **request_)
    loaded, change = checkpoint.load(tmp_path / "after"), apply_change(model, name, **request_)
    assert torch.equal(loaded.model(IDS), model.eval()(IDS))
    assert [made["name"] for made in loaded.card["changes"]] == [name]
    if written is None:
        assert any("form of its own" in line for line in lines)
        assert loaded.architecture.changes[-1].places == change.places
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()
    assert theirs.config.model_type == written
    assert difference(theirs(IDS).logits, model(IDS)) <= ROUNDED


NAN = float("nan")
BAD = {
    "lora": {
        "where": ["blocks.*.attention.q", "embed.token"],
        "rank": [0, 99],
        "ranks": [{"**.k": 33}],
        "alpha": [0.0, NAN],
        "adapter": ["a.b", "keys"],
        "dropout": [1.0],
        "init": ["zero"],
        "dtype": ["int8"],
    },
    "lora-experts": {
        "where": ["nothing", "embed.token"],
        "experts": [0],
        "top_k": [0, 9],
        "balance": [-1.0, NAN],
        "rank": [99],
        "router": ["moe"],
    },
    "expand": {"blocks": [0], "after": [(0, 3), (-1,)]},
    "experts": {"experts": [5], "top_k": [1, 9], "split": ["alphabet"], "shared": [1], "where": ["layers.*"]},
    "upcycle": {
        "experts": [0],
        "top_k": [1, 9],
        "granularity": [0, 3, 5],
        "drop": [1.0],
        "where": ["layers.*.mlp"],
    },
    "narrow": {"heads": [0, 3], "neurons": [0, 97], "blocks": [2], "experts": [2]},
    "prune": {
        "method": ["random", "magnitude"],
        "sparsity": [0.0, NAN],
        "pattern": ["4:2", "2:5", "2:3"],
        "where": ["head", "blocks.7.**"],
    },
    "quantize": {
        "kind": ["int5"],
        "group": [-1, 64],
        "method": ["gptq", "hqq"],
        "where": ["**.router", "head"],
        "override": [["int8"], ["**.v=int5"], ["blocks.**=dense"], ["blocks.7.**=int8"], ["head=int8"]],
    },
    "routing": {"where": ["blocks.*.attn", "**"], "shared": [-1], "bias_rate": [NAN]},
}
"""Values of single options that a small LLaMA with a tied head cannot have; narrow and prune get text."""
NEED_TEXT = ("narrow", "prune")
TOGETHER = [
    ("lora-experts", {"router": "mlp", "where": "**.attn.*"}),
    ("lora-experts", {"router": "mlp", "where": ["**.gate", "**.up"]}),
    ("experts", {"split": "importance"}),
    ("experts", {"ids": TEXT}),
    ("experts", {"split": "importance", "ids": TEXT[:7]}),
    ("experts", {"split": "importance", "ids": TEXT, "shared": 7}),
    ("narrow", {"neurons": 8}),
    ("narrow", {"neurons": 8, "ids": TEXT[:, :1]}),
    ("narrow", {"heads": 4, "neurons": 96, "ids": TEXT}),
    ("prune", {}),
    ("prune", {"sparsity": 0.6, "pattern": "2:4", "ids": TEXT}),
    ("prune", {"ids": TEXT[:1]}),
    ("prune", {"ids": TEXT + 50}),
    ("quantize", {"kind": "int8", "group": 64}),
    ("quantize", {"kind": "int4", "double": True}),
    ("quantize", {"kind": "int4", "method": "gptq"}),
    ("quantize", {"kind": "int4", "method": "rtn", "ids": TEXT}),
    ("quantize", {"kind": "int4", "method": "gptq", "ids": TEXT[:1, :16]}),
]
REQUESTS = [
    (name, {option: value} | ({"ids": TEXT} if name in NEED_TEXT else {}))
    for name, options in BAD.items()
    for option, values in options.items()
    for value in values
]


@pytest.mark.parametrize(("name", "request_"), [*REQUESTS, *TOGETHER])
def test_a_request_that_does_not_fit_is_refused_before_anything_changes(name, request_):
    model = random_model("llama", hidden=96, heads=4, kv_heads=2, head_dim=8, tied=True)
    assert_refused_unchanged(r"\S", model, name, **request_)


IN_THE_WAY = [
    *((first, then) for first in ("lora", "int8") for then in ("expand", "experts", "upcycle", "narrow", "prune")),
    *(("upcycle", then) for then in ("experts", "upcycle")),
    *((first, "int4") for first in ("lora", "lora-experts")),
    *((first, "int8") for first in ("int8", "nf4", "int4")),
    ("lora", "lora"),
]


@pytest.mark.parametrize(("first", "then"), IN_THE_WAY)
def test_an_earlier_change_in_the_way_is_named(first, then):
    model = random_model("llama", hidden=96)
    (earlier, request, _), (name, further, _) = METHODS[first], METHODS[then]
    apply_change(model, earlier, **request)
    assert_refused_unchanged(r"^blocks\.[01]\.(attn|mlp)", model, name, **further)

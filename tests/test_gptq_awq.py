"""Folders that GPTQ and AWQ quantized, as written by loops over single codes: each dense weight is the loops'."""

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters import IDS
from conftest import change_json, refuses
from dunes import checkpoint
from dunes.checkpoint import hf_config_of
from dunes.checkpoint.open import open_model
from small_models import random_model

pytestmark = pytest.mark.filterwarnings("ignore:.*tokenizer is None")

WEIGHTS, CONFIG = "model.safetensors", "config.json"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs in a word of AWQ, from its lowest bits."""
CASES = {
    "gptq 4": {"group_size": 16},
    "gptq 4 act-order": {"group_size": 16, "desc_act": True},
    "gptq 2": {"bits": 2, "group_size": 8, "desc_act": True},
    "gptq 8": {"bits": 8, "group_size": -1},
    "gptq v2": {"group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq symmetric": {"group_size": 16, "sym": True, "static_groups": True},
    "awq": {"group_size": 16, "version": "gemm"},
    "awq one group": {"group_size": -1, "version": "GEMM"},
}


def settings_of(case):
    return {"quant_method": case.partition(" ")[0], "bits": 4} | CASES[case]


def word(codes, bits):
    """The codes, which may be negative, as a word of 32 bits with a sign, the first in the lowest bits."""
    number = sum(code << bits * place for place, code in enumerate(codes)) % 2**32
    return number - 2**32 if number >= 2**31 else number


def encode(draw, rows, columns, settings, dtype):
    """Random parts of a weight (rows, columns), and the weight."""
    bits, gptq = settings["bits"], settings["quant_method"] == "gptq"
    size, per = settings["group_size"] if settings["group_size"] > 0 else columns, 32 // bits
    groups, most = columns // size, 2**bits - 1
    index = [i // size for i in range(columns)]
    if settings.get("desc_act"):
        draw.shuffle(index)
    codes = [[draw.randint(0, most) for _ in range(columns)] for _ in range(rows)]
    middle = 2 ** (bits - 1)
    zeros = [
        [middle if settings.get("sym") else draw.randint(0, most) for _ in range(groups)] for _ in range(rows)
    ]
    scales = torch.tensor([[draw.uniform(0.2, 1) / most for _ in range(rows)] for _ in range(groups)]).to(dtype)
    weight = torch.zeros(rows, columns, dtype=torch.float64)
    for r in range(rows):
        for c in range(columns):
            weight[r, c] = scales[index[c], r].double() * (codes[r][c] - zeros[r][index[c]])
    if gptq:
        less = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
        lines = range(0, columns, per)
        qweight = [[word([codes[r][c + k] for k in range(per)], bits) for r in range(rows)] for c in lines]
        order = range(per)
    else:
        less, order = 0, AWQ_ORDER
        starts = range(0, rows, per)
        qweight = [[word([codes[r + k][c] for k in order], bits) for r in starts] for c in range(columns)]
    qzeros = [
        [word([zeros[r + k][g] - less for k in order], bits) for r in range(0, rows, per)] for g in range(groups)
    ]
    parts = {"qweight": qweight, "qzeros": qzeros} | ({"g_idx": index} if gptq else {})
    return {k: torch.tensor(v, dtype=torch.int32) for k, v in parts.items()} | {"scales": scales}, weight.to(dtype)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that writes a quantized and an equal dense folder, in the case's format."""
    folders = {}

    def make(case, family="llama", dtype=torch.float16):
        if (case, family, dtype) not in folders:
            root = tmp_path_factory.mktemp("quantized")
            model = random_model(family).to(dtype)
            checkpoint.save(model, root / "dense", None, 32, architecture=hf_config_of(model, 32))
            folders[case, family, dtype] = quantize(root, settings_of(case), dtype)
        return folders[case, family, dtype]

    return make


def quantize(root, settings, dtype):
    """Change the weights of the blocks of `root / "dense"`, but one, to random codes, in `root / "quantized"`."""
    shutil.copytree(root / "dense", root / "quantized")
    tensors, draw = load_file(root / "dense" / WEIGHTS), random.Random(0)
    parts, dense = {}, {}
    for key, tensor in tensors.items():
        if key.endswith("_proj.weight") and key != "model.layers.1.mlp.down_proj.weight":
            found, dense[key] = encode(draw, *tensor.shape, settings, dtype)
            parts |= {key.removesuffix("weight") + part: value for part, value in found.items()}
    assert len(dense) == 13
    save_file(tensors | dense, root / "dense" / WEIGHTS)
    save_file({k: v for k, v in tensors.items() if k not in dense} | parts, root / "quantized" / WEIGHTS)
    for name in ("dense", "quantized"):
        (root / name / "dunes.json").unlink()  # it has the digests of the other files
    change_json(root / "quantized" / CONFIG, quantization_config=settings)
    return root / "quantized", root / "dense"


def assert_equal(folder, dense):
    ours, want = (checkpoint.load(path).model for path in (folder, dense))
    for name, weight in want.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight), name
        assert ours.get_parameter(name).dtype == weight.dtype
    with torch.no_grad():
        assert torch.equal(ours(IDS), want(IDS))


@pytest.mark.parametrize("case", CASES)
def test_a_folder_is_read_as_the_dense_one(made, case):
    assert_equal(*made(case))


@pytest.mark.parametrize("case", ["gptq 4 act-order", "awq"])
def test_biases_and_other_dtypes_are_read(made, case):
    assert any("bias" in key for key in open_model(made(case, "qwen2", torch.bfloat16)[0]).files)
    assert_equal(*made(case, "qwen2", torch.bfloat16))
    assert_equal(*made(case, dtype=torch.float32))


@pytest.fixture
def copy(made, tmp_path):
    """A copy of a quantized folder, and its dense one; `change` returns tensors to change, or None for each."""

    def copied(case, change=dict, **settings):
        folder, dense = made(case)
        folder = shutil.copytree(folder, tmp_path / "copy")
        changed = load_file(folder / WEIGHTS)
        changed |= change(changed) if change is not dict else {}
        save_file({k: v.contiguous() for k, v in changed.items() if v is not None}, folder / WEIGHTS)
        change_json(folder / CONFIG, quantization_config=settings_of(case) | settings)
        return folder, dense

    return copied


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize("value", [None, 0], ids=["none", "zeros"])
def test_inputs_in_order_need_no_g_idx(copy, value):
    blank = lambda t: {k: None if value is None else t[k] * 0 for k in t if k.endswith("g_idx")}
    assert_equal(*copy("gptq 4", blank))


def test_a_layer_may_have_bits_of_its_own(copy, made):
    eight = {k: v for k, v in load_file(made("gptq 8")[0] / WEIGHTS).items() if k.startswith(Q)}
    folder, _ = copy("gptq 4", lambda t: eight, dynamic={Q: {"bits": 8, "group_size": -1}})
    ours, want = (
        open_model(path).weights()["blocks.0.attn.q.weight"].read() for path in (folder, made("gptq 8")[1])
    )
    assert torch.equal(ours, want)


def changed(part, change):
    return lambda tensors: {Q + part: change(tensors[Q + part])}


SHORT, LONG = (lambda t: t[:-1]), (lambda t: torch.cat([t, t]))
REFUSED = {
    "no scales": ("gptq 4", "scales", lambda t: None),
    "no zeros": ("awq", "qzeros", lambda t: None),
    "no order": ("gptq 4 act-order", "g_idx", lambda t: None),
    "dtype": ("gptq 4", "qweight", torch.Tensor.long),
    "scales' dtype": ("awq", "scales", torch.Tensor.int),
    "codes": ("gptq 4", "qweight", SHORT),
    "zeros": ("gptq 4", "qzeros", SHORT),
    "wide zeros": ("gptq 4", "qzeros", lambda t: t[:, :3]),
    "scales": ("awq", "scales", LONG),
    "vector": ("awq", "qweight", torch.Tensor.flatten),
    "high group": ("gptq 4", "g_idx", lambda t: t + 1),
    "low group": ("gptq 4", "g_idx", lambda t: t - 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_parts_are_refused(copy, name):
    case, part, change = REFUSED[name]
    folder, _ = copy(case, changed(part, change))
    assert Q in refuses(WEIGHTS, checkpoint.load, folder)


@pytest.mark.parametrize("case", ["gptq 4", "awq"])
def test_groups_that_do_not_divide_the_inputs_are_refused(copy, case):
    three = lambda t: {Q + k: torch.cat([t[Q + k], t[Q + k][:1]]) for k in ("scales", "qzeros")}
    index = {} if case == "awq" else {f"{Q}g_idx": None}
    folder, _ = copy(case, lambda t: three(t) | index)
    refuses("its scales are of 3 groups; expected a divisor of its 32 inputs; download", checkpoint.load, folder)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("gptq 4", {"bits": 3}),
        ("gptq 4", {"bits": [4]}),
        ("gptq 4", {"checkpoint_format": "marlin"}),
        ("awq", {"bits": 8}),
        ("awq", {"version": "gemv"}),
        ("awq", {"version": {"x": 1}}),
    ],
)
def test_other_bits_and_formats_are_refused(copy, case, settings):
    refuses(CONFIG, checkpoint.load, copy(case, **settings)[0])


def test_folders_that_contradict_themselves_are_refused(copy, made):
    folder, dense = copy("awq", lambda t: {f"{Q}weight": torch.ones(32, 32)})
    refuses(f"{Q}qweight: there is {Q}weight, too; keep one of them", checkpoint.load, folder)
    shutil.copy(dense / WEIGHTS, folder)
    refuses("config.json: quantized, but no tensor is called qweight; get weights that", checkpoint.load, folder)


def test_a_gpt2_whose_matrices_lie_the_other_way_is_refused(copy):
    folder, _ = copy("gptq 4")
    change_json(folder / CONFIG, model_type="gpt2")
    refuses("gpt2 with GPTQ or AWQ is not supported; download its plain weights", open_model, folder)

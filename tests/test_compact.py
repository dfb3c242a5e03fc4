"""Sparse matrices in a file: bit for bit the same, of the predicted size, and hostile files are refused."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dunes import checkpoint
from dunes.augment import apply_change
from dunes.checkpoint.files import header
from dunes.checkpoint.files.compact import COMPACT, compacted, dense_tensors, pack, unpack
from dunes.checkpoint.files.lazy_tensor import in_memory
from dunes.checkpoint.files.safetensors_writer import write_tensors
from test_calibrate import IDS, model_of
from test_prune import LONG

pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer")


def sparse(rows, columns, share, dtype=torch.float32):
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=draw)
    return weight.masked_fill(torch.rand(rows, columns, generator=draw) < share, 0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 24), (64, 40)])
def test_matrices_are_the_same_bit_for_bit_and_of_the_predicted_size(tmp_path, dtype, rows, columns):
    special = sparse(rows, columns, 0.6, dtype)
    special[0, :4] = torch.tensor([-0.0, math.inf, math.nan, 0.0])
    tensors = {
        "pruned": sparse(rows, columns, 0.5, dtype), "special": special,
        "empty": torch.zeros(rows, columns).to(dtype),
        "dense": sparse(rows, columns, 0.0, dtype), "odd": sparse(rows, 9, 0.9, dtype), "bias": torch.zeros(8),
        "codes": torch.zeros(4, 8, dtype=torch.int8),
    }  # fmt: skip
    stored = compacted(in_memory(tensors))
    kept = {name: t.shape[0] for name, t in stored.items() if name.endswith(".nonzero")}
    assert {"pruned.nonzero", "empty.nonzero"} <= kept.keys()
    assert not {"dense.nonzero", "odd.nonzero", "bias.nonzero", "codes.nonzero"} & kept.keys()
    for name, count in kept.items():
        dense = tensors[name.removesuffix(".nonzero")]
        assert count == int(((dense != 0) | dense.signbit()).sum())
        pair = stored[name].nbytes + stored[name.replace(".nonzero", ".mask")].nbytes
        assert pair == rows * columns // 8 + count * dtype.itemsize
    write_tensors(tmp_path, stored, name=COMPACT)
    file = tmp_path / COMPACT
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + length + sum(t.nbytes for t in stored.values())
    read = dense_tensors(header.tensors(file), file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].shape, read[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        bits = [t.contiguous().flatten().view(torch.uint8) for t in (read[name].read(), tensor)]
        assert torch.equal(*bits), name


def test_packing_is_little_endian_in_each_byte():
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, [0, 9]] = mask[1, 7] = True
    assert pack(mask).tolist() == [[1, 2], [128, 0]]
    assert torch.equal(unpack(pack(mask)), mask)


@torch.no_grad()
def test_a_compact_folder_is_the_same_model(tmp_path):
    for family, fields in (("llama", {"tied": True}), ("gpt2", {}), ("mixtral", {"experts": 2})):
        model = model_of(family, **fields)
        apply_change(model, "prune", ids=LONG, pattern="2:4")
        folder = tmp_path / family
        checkpoint.save(model, folder, None, 32, compact=True)
        assert not (folder / "model.safetensors").exists()
        loaded = checkpoint.load(folder)
        assert torch.equal(loaded.model(IDS), model(IDS))
        assert all(torch.equal(p, loaded.model.get_parameter(n)) for n, p in model.named_parameters())
        checkpoint.save(loaded.model, folder, None, 32)
        assert not (folder / COMPACT).exists()
        assert torch.equal(checkpoint.load(folder).model(IDS), model(IDS))


def test_shards_and_models_of_no_family(tmp_path, monkeypatch):
    model = model_of()
    changes = (apply_change(model, "prune", ids=LONG), apply_change(model, "lora", rank=2))
    config = checkpoint.hf_config_of(model_of(), 32)
    own = checkpoint.Architecture("llama", config.config, changes)
    checkpoint.save(model, tmp_path / "own", None, 32, architecture=own, compact=True)
    assert torch.equal(checkpoint.load(tmp_path / "own").model(IDS), model(IDS))
    stored = compacted(in_memory(model.state_dict()))
    write_tensors(tmp_path, stored, 10_000, COMPACT)
    assert len([*tmp_path.glob("model.compact-*.safetensors")]) > 3
    assert (tmp_path / f"{COMPACT}.index.json").is_file()


LIES = [
    ({"w.mask": None}, "w: stored as w.nonzero; expected w.mask and w.nonzero"),
    ({"w.nonzero": None}, "w: stored as w.mask; expected"),
    ({"w": torch.zeros(4, 16)}, "w: stored as w, w.mask, w.nonzero; expected"),
    ({"w.mask": torch.zeros(8, dtype=torch.uint8)}, r"torch.uint8 of shape \(8,\); expected uint8"),
    ({"w.mask": torch.zeros(4, 2)}, r"torch.float32 of shape \(4, 2\); expected uint8"),
    ({"w.nonzero": torch.zeros(3, 3)}, r"shape \(3, 3\); expected up to 64 floating-point values"),
    ({"w.nonzero": torch.zeros(3, dtype=torch.int32)}, "torch.int32"),
    ({"w.nonzero": torch.zeros(65)}, "expected up to 64"),
    ({"w.nonzero": torch.zeros(6)}, "has 5 bits for 6 values"),
    ({"w.nonzero": torch.zeros(4)}, "has 5 bits for 4 values"),
]


@pytest.mark.parametrize(("change", "message"), LIES)
def test_files_that_lie_are_refused(tmp_path, change, message):
    mask = torch.tensor([[1, 2], [0, 0], [4, 4], [8, 0]], dtype=torch.uint8)
    tensors = {"w.mask": mask, "w.nonzero": torch.arange(1.0, 6.0)} | change
    file = tmp_path / COMPACT
    save_file({key: t for key, t in tensors.items() if t is not None}, file)
    with pytest.raises(ValueError, match=message) as raised:
        dense_tensors(header.tensors(file), file)["w"].read()
    assert "\n" not in str(raised.value)


def test_a_folder_whose_mask_was_changed_is_refused(tmp_path):
    model = model_of()
    apply_change(model, "prune", ids=LONG)
    checkpoint.save(model, tmp_path, None, 32, compact=True)
    tensors = load_file(tmp_path / COMPACT)
    name = next(key for key in tensors if key.endswith(".mask"))
    tensors[name][0] = 255
    save_file(tensors, tmp_path / COMPACT)
    with pytest.raises(ValueError, match="not the bytes that were written"):
        checkpoint.load(tmp_path)
    card = json.loads((tmp_path / "dunes.json").read_text())
    (tmp_path / "dunes.json").write_text(json.dumps(card | {"files": {}}))
    with pytest.raises(ValueError, match=r"bits for \d+ values"):
        checkpoint.load(tmp_path)
    tensors.pop(name)
    save_file(tensors, tmp_path / COMPACT)
    with pytest.raises(ValueError, match=r"model.compact.safetensors: refused: .*stored as"):
        checkpoint.load(tmp_path)

"""Safetensors files: good ones are read bit for bit, bad ones are refused on one line that names the file."""

import json
import mmap
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import refused, refuses
from dunes import measure
from dunes.checkpoint.weights import safetensors_file
from dunes.checkpoint.weights.lazy_tensor import MappedFile
from dunes.files import json_file
from test_pickle_file import same

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    torch.bool,
)


def pack(text, data=b"", length=None):
    """The bytes of a file with this header."""
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin=0, end=4, shape=(1,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]} | more


def test_every_dtype_is_read_bit_for_bit(tmp_path):
    path, made = tmp_path / "model.safetensors", {}
    torch.manual_seed(0)
    for dtype in DTYPES:
        numbers = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
        made[f"a.{dtype}"] = numbers.view(dtype)
    made |= {"empty": torch.zeros(0, 3), "one": torch.tensor(2.5), "odd": torch.ones(3, dtype=torch.int8)}
    save_file(made, path, {"format": "pt"})
    lazy = safetensors_file.tensors(path)
    assert lazy.keys() == made.keys()
    same({name: lazy[name] for name in made}, made)
    for name, tensor in made.items():
        assert lazy[name].nbytes == tensor.nbytes
        assert lazy[name].origin == f"model.safetensors: {name}"


def test_tensors_that_begin_at_odd_bytes_are_read(tmp_path):
    text = json.dumps({"a": entry(0, 1, dtype="U8"), "b": entry(1, 9, (2,))})
    for spaces in range(8):
        path = tmp_path / f"{spaces}.safetensors"
        path.write_bytes(pack(text.encode() + b" " * spaces, b"\7" + struct.pack("<2f", 1.5, -2)))
        tensor = safetensors_file.tensors(path)["b"].read()
        assert tensor.tolist() == [1.5, -2]
        assert tensor.data_ptr() % 4 == 0


def test_bytes_of_bools_are_normalized(tmp_path):
    (tmp_path / "x").write_bytes(pack({"a": entry(0, 4, (4,), "BOOL")}, b"\0\1\2\xff"))
    assert safetensors_file.tensors(tmp_path / "x")["a"].read().view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_writing_into_a_tensor_changes_neither_the_file_nor_other_readers(tmp_path):
    path = tmp_path / "x"
    save_file({"a": torch.arange(4096.0), "b": torch.ones(2)}, path)
    before, lazy = path.read_bytes(), safetensors_file.tensors(path)
    first = lazy["a"].read()
    first.zero_()
    assert lazy["a"].read().data_ptr() == first.data_ptr()  # one mapping, nothing copied
    assert path.read_bytes() == before
    assert safetensors_file.tensors(path)["a"].read().tolist() == torch.arange(4096.0).tolist()


def test_a_file_that_changes_between_header_and_numbers_is_refused(tmp_path):
    path = tmp_path / "x"
    for change in (lambda: save_file({"a": torch.ones(4)}, path), lambda: os.truncate(path, 90), path.unlink):
        save_file({"a": torch.ones(3)}, path)
        lazy = safetensors_file.tensors(path)
        change()
        with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
            lazy["a"].read()


def test_release_returns_pages(tmp_path):
    if not hasattr(mmap, "MADV_DONTNEED"):
        pytest.skip("this system has no such call")
    save_file({name: torch.ones(8 << 20) for name in "abcd"}, tmp_path / "x")
    before = measure.resident_memory()
    for lazy in safetensors_file.tensors(tmp_path / "x").values():
        tensor = lazy.read()
        assert tensor.sum() == 8 << 20
        lazy.release()
        assert measure.resident_memory() - before < 16 << 20
    assert tensor[-1] == 1


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    count = 4 * (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        with (tmp_path / "x").open("wb") as file:
            file.write(pack({"a": entry(0, count, (count,), "U8")}))
            file.truncate(file.tell() + count)
    except OSError as error:
        pytest.skip(f"no file with so large a hole here: {error}")
    tensor = safetensors_file.tensors(tmp_path / "x")["a"].read()
    tensor[count - 1] = 3
    assert tensor[count - 3 :].tolist() == [0, 0, 3]


def test_strides_of_size_one_dimensions_are_ignored(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(64)))
    mapped = MappedFile(tmp_path / "x")
    assert mapped.tensor(3, (1, 2), torch.uint8, (1 << 80, 2)).tolist() == [[3, 5]]
    assert mapped.tensor(3, (0, 2), torch.uint8, (1 << 80, 1 << 80)).shape == (0, 2)


def test_strides_are_those_of_torch(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    read = MappedFile(tmp_path / "x").tensor(0, (4, 1, 5, 5), torch.uint8)
    assert read.stride() == (25, 25, 5, 1)  # with (25, 1, 5, 1), convolutions give outputs in `channels_last`


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/full")):
        refuses(str(path), safetensors_file.tensors, path)


BAD: dict[str, bytes] = {
    "empty": b"",
    "not JSON": pack(b'{"a":'),
    "name twice": pack(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "name twice, once escaped": pack(b'{"a":%b,"\\u0061":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)),
    "field twice": pack(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "metadata key twice": pack(b'{"__metadata__":{"a":"b","a":"b"}}'),
    "entry is a list": pack({"a": ["F32", [1], [0, 4]]}, bytes(4)),
    "unknown dtype": pack({"a": entry(dtype="F31")}, bytes(4)),
    "rank 9": pack({"a": entry(shape=(1,) * 9)}, bytes(4)),
    "hole": pack({"a": entry(), "b": entry(8, 12)}, bytes(12)),
    "cut by a byte": pack({"a": entry()}, bytes(3)),
}
NAMES = [
    *("", "../../etc/passwd\0", "a/b", "/a", "..", "a..b", "a\0", "a\nb", "a\x1b[2J", "a\x7f", "\u202eb"),
    *("a\\b", "x" * 513, "é" * 257, "\u2028", "\ud800"),
]
BAD |= {f"name {name[:20]!a}": pack({name: entry()}, bytes(4)) for name in NAMES}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_is_refused_on_one_line(tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes(BAD[name])
    refused(safetensors_file.tensors, tmp_path / "x.safetensors")


def test_harmless_headers_that_the_library_accepts_are_read(tmp_path):
    packed = json.dumps(entry()).encode()
    for text in (
        b' {"a":%b}' % packed,
        b'{"__metadata__":null,"a":%b}' % packed,
        b'{"a":{"extra":1,%b}' % packed[1:],
    ):
        (tmp_path / "x").write_bytes(pack(text, bytes(4)))
        assert safetensors_file.tensors(tmp_path / "x")["a"].read().tolist() == [0.0]
    for text in (b"{}", b'{"__metadata__":{"format":"pt"}}', b'{"__metadata__":{}}        '):
        (tmp_path / "x").write_bytes(pack(text))
        assert safetensors_file.tensors(tmp_path / "x") == {}


def test_names_at_the_limits_are_read(tmp_path):
    for name in ("x" * 512, "é" * 256, "a.b", "a b", "модель.0", "{", "a:[,]"):
        (tmp_path / "x").write_bytes(pack({name: entry()}, bytes(4)))
        assert list(safetensors_file.tensors(tmp_path / "x")) == [name]


def test_too_many_tensors_are_refused_before_they_are_parsed(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(pack(b"{" + b",".join(b'"%d":{}' % i for i in range(100_002)) + b"}"))
    monkeypatch.setattr(json_file.json, "loads", lambda *a, **k: pytest.fail("parsed"))
    refused(safetensors_file.tensors, tmp_path / "x")

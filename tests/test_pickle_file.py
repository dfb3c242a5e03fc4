"""Files of torch.save: ours are read bit for bit; hostile ones execute nothing, and are refused on one line."""

import io
import os
import pickle
import random
import re
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import dunes
from conftest import count_readable, refused, refuses
from dunes.checkpoint.weights import pickle_file

FORMATS = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}, "protocol 4": {"pickle_protocol": 4}}


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def saved(value, **how):
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def state():
    """Tensors of all kinds that a state dict may hold."""
    torch.manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    made = OrderedDict((f"a.{k}", torch.randn(3, 4).to(k)) for k in kinds)
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        made[f"a.{kind}"] = torch.randint(0, 2, (7,)).to(kind)
    base = torch.randn(6, 8)
    made |= {"base": base, "same": base, "part": base[2:5, ::3], "turned": base.t(), "row": base[4]}
    made |= {"permuted": torch.randn(2, 3, 4).bfloat16().permute(2, 0, 1), "empty": torch.zeros(0, 3)}
    return made | {"number": torch.tensor(2.5), "parameter": torch.nn.Parameter(torch.randn(2, 2))}


def same(lazy, made):
    assert list(lazy) == list(made)
    for name, tensor in made.items():
        stored, read = lazy[name], lazy[name].read()
        assert (stored.shape, stored.dtype) == (read.shape, read.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(bits(read), bits(tensor)), name


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model"])
def test_a_state_dict_comes_back_bit_for_bit(tmp_path, how, wrap):
    made = state()
    beside = {"step": 3, "lr": 1e-3, "big": 1 << 70, "name": "é", "list": [1, None, (2,)], "size": torch.Size([2])}
    value = made if wrap == "plain" else {wrap: made, "optimizer": {"state": {0: torch.ones(1)}}} | beside
    path = tmp_path / "old model.bin"
    torch.save(value, path, **FORMATS[how])
    lazy = pickle_file.tensors(path)
    same(lazy, made)
    assert lazy["base"].origin == "old model.bin: base"
    assert lazy["turned"].read().stride() == made["turned"].stride()


@pytest.mark.parametrize("how", FORMATS)
def test_a_modules_own_state_dict_and_nested_dicts_are_read(tmp_path, how):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert module.state_dict()._metadata
    torch.save(module.state_dict(), tmp_path / "x.pt", **FORMATS[how])
    same(pickle_file.tensors(tmp_path / "x.pt"), module.state_dict())
    torch.save(
        {"a": {"b": {0: torch.ones(2)}}, "c": torch.zeros(1), "d": "text"}, tmp_path / "y.pt", **FORMATS[how]
    )
    same(pickle_file.tensors(tmp_path / "y.pt"), {"a.b.0": torch.ones(2), "c": torch.zeros(1)})


def test_tensors_that_share_numbers_share_them_and_no_write_reaches_the_file(tmp_path):
    path, base = tmp_path / "x.pt", torch.arange(6.0)
    torch.save({"all": base, "end": base[3:]}, path)
    before, lazy = path.read_bytes(), pickle_file.tensors(path)
    lazy["all"].read()[4] = 9
    assert lazy["end"].read().tolist() == [3, 9, 5]
    assert path.read_bytes() == before
    assert pickle_file.tensors(path)["end"].read().tolist() == [3, 4, 5]


def test_a_truncated_file_is_refused(tmp_path):
    for how in FORMATS.values():
        whole = saved({"a": torch.ones(5), "b": {"c": torch.zeros(2, dtype=torch.int8)}}, **how)
        for length in {*range(0, len(whole), 41), *range(len(whole) - 120, len(whole), 5)}:
            (tmp_path / "x").write_bytes(whole[:length])
            refuses("refused" if length else "empty", pickle_file.tensors, tmp_path / "x")


# A small assembler of pickles.


def text(value):
    value = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(value)) + value


def number(value):
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def word(module, name):
    return f"c{module}\n{name}\n".encode()


def tup(*parts):
    return b"(" + b"".join(parts) + b"t"


def call(module, name, *arguments):
    return word(module, name) + tup(*arguments) + b"R"


def pairs(**values):
    return b"}(" + b"".join(text(k) + v for k, v in values.items()) + b"u"


ORDERED, REBUILD = call("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")


def storage(kind="FloatStorage", key="0", count=4, legacy=False, pid=None):
    extra = (b"N",) if legacy else ()
    return (pid or tup(text("storage"), word("torch", kind), text(key), text("cpu"), number(count), *extra)) + b"Q"


def tensor(held=None, offset=0, size=(4,), stride=(1,), grad=b"\x89", hooks=ORDERED, more=()):
    sizes, strides = (tup(*map(number, values)) for values in (size, stride))
    parts = (storage() if held is None else held, number(offset), sizes, strides, grad, hooks, *more)
    return call(*REBUILD, *parts)


def entry(name, data, prefix="archive"):
    made = zipfile.ZipInfo(f"{prefix}/{name}")
    return made, data


def archive(pickle_bytes, *more, data=bytes(16), prefix="archive"):
    """A zip as torch writes it, with this data.pkl; a value of `more` is (ZipInfo, bytes)."""
    files = [] if pickle_bytes is None else [entry("data.pkl", pickle_bytes, prefix)]
    files += [entry("version", b"3\n", prefix), entry("byteorder", b"little", prefix)]
    files += [] if data is None else [entry("data/0", data, prefix)]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for made, content in [*files, *more]:
            file.writestr(made, content)
    return out.getvalue()


def program(body):
    return b"\x80\x02" + body + b"."


FOUR = struct.pack("<q", 4) + bytes(16)
LEGACY = pairs(a=tensor(storage(legacy=True)))


def in_zip(body, **how):
    return archive(program(body), **how)


def in_legacy(body, numbers=FOUR, keys=("0",), system=None, magic=None):
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}} if system is None else system
    head = (pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C if magic is None else magic, 1001, system))
    return b"".join(head) + program(body) + pickle.dumps(list(keys), 2) + numbers


def test_assembled_files_are_valid_until_a_test_changes_them(tmp_path):
    (tmp_path / "zip").write_bytes(in_zip(pairs(a=tensor())))
    (tmp_path / "legacy").write_bytes(in_legacy(LEGACY))
    for path in tmp_path.iterdir():
        same(pickle_file.tensors(path), {"a": torch.zeros(4)})
        assert torch.load(path)["a"].tolist() == [0] * 4


# Programs that make the canary if they are run, or would do other harm.


def programs(canary):
    shell = text(f"touch {canary}")
    sh = b"](" + text("sh") + text("-c") + shell + b"e"
    system = word("os", "system")
    short = lambda value: b"\x8c" + bytes([len(value)]) + value.encode()
    return {
        "os.system": call("os", "system", shell),
        "torch.os": b"\x80\4" + call("torch", "os.system", shell),
        "INST": b"(" + shell + b"ios\nsystem\n",
        "NEWOBJ": word("subprocess", "Popen") + tup(sh) + b"\x81",
        "NEWOBJ_EX": word("subprocess", "Popen") + tup(sh) + b"}\x92",
        "STACK_GLOBAL": short("os") + short("system") + b"\x93" + tup(shell) + b"R",
        "STACK_GLOBAL, no text": b"K\1K\2\x93",
        "BUILD with __setstate__": ORDERED + pairs(__setstate__=system) + b"b" + shell + b"b",
        "BUILD with slots": pairs(a=tensor()) + tup(b"N", pairs(__dict__=b"}")) + b"b",
        "BUILD of a word": word("collections", "OrderedDict") + pairs(_metadata=b"}") + b"b",
        "an unused name": pairs(a=tensor(), b=system),
        "name with a line break": b"cos\x00\nsystem\n",
    }


def unexecuted(path, canary):
    """The line with which a file is refused that executed nothing."""
    line = refused(pickle_file.tensors, path)
    assert not canary.exists()
    return line


@pytest.mark.parametrize("wrap", [in_zip, in_legacy, program])
@pytest.mark.parametrize("name", programs("canary"))
def test_a_program_is_refused_and_not_executed(tmp_path, name, wrap):
    canary, path = tmp_path / "canary", tmp_path / "x.bin"
    path.write_bytes(wrap(programs(canary)[name]))
    unexecuted(path, canary)


def bomb(levels):
    """A tuple of 2^levels parts in a few bytes."""
    return b")" + b"q\0h\0\x86" * levels


def doubled(first, levels):
    """A dict of 40 dicts of 40 dicts ... of the first one, in memory once each."""
    level = b"}q\1(" + b"".join(text(str(k)) + b"h\0" for k in range(40)) + b"uq\0"
    return b"}" + text("built") + tup(first + b"q\0", level * levels) + b"s" + text("all") + b"h\0s"


def outside(kind, count=b"K\4", *more):
    return tup(text("storage"), kind, text("0"), text("cpu"), count, *more)


BODIES = {
    "OrderedDict of something": call("collections", "OrderedDict", b"]"),
    "torch.Size of text": call("torch", "Size", text("x")),
    "tensor with hooks": tensor(hooks=pairs(a=b"N")),
    "tensor with metadata": tensor(more=(pairs(a=b"N"),)),
    "tensor with an odd grad": tensor(grad=b"K\1"),
    "tensor without storage": tensor(held=text("0")),
    "parameter of a number": call("torch._utils", "_rebuild_parameter", b"K\1", b"\x89", ORDERED),
    "text is called": text("os.system") + b")R",
    "PERSID": b"Pos\n",
    "persistent id is text": text("0") + b"Q",
    "storage of a function": storage(pid=outside(word(*REBUILD))),
    "storage of True numbers": storage(pid=outside(word("torch", "FloatStorage"), b"\x88")),
    "storage of -1 numbers": pairs(a=tensor(storage(count=-1))),
    "storage of 2^62 numbers": pairs(a=tensor(storage(count=1 << 62))),
    "storage of 5 where 4 are": pairs(a=tensor(storage(count=5))),
    "storage of two types": pairs(a=tensor(), b=tensor(storage("IntStorage"))),
    "missing storage": pairs(a=tensor(storage(key="1"))),
    "storage is part of another": storage(pid=outside(word("torch", "FloatStorage"), b"K\4", tup(b"K\0"))),
    "negative offset": pairs(a=tensor(offset=-1, size=(1,))),
    "offset behind the end": pairs(a=tensor(offset=4, size=(1,))),
    "negative size": pairs(a=tensor(size=(-1,))),
    "sizes of 2^40 x 2^40": pairs(a=tensor(size=(1 << 40, 1 << 40), stride=(0, 0))),
    "0 x 2^62": pairs(a=tensor(size=(0, 1 << 62), stride=(1, 1))),
    "size of True": call(*REBUILD, storage(), b"K\0", b"\x88\x85", b"K\1\x85", b"\x89", ORDERED),
    "rank 9": pairs(a=tensor(size=(1,) * 9, stride=(1,) * 9)),
    "a stride too few": pairs(a=tensor(size=(2, 2), stride=(1,))),
    "zero stride": pairs(a=tensor(size=(3,), stride=(0,))),
    "overlapping windows": pairs(a=tensor(size=(2, 3), stride=(1, 1))),
    "last number behind the end": pairs(a=tensor(size=(2, 2), stride=(3, 1))),
    "10^6 tuples deep": b")" + b"\x85" * 1_000_000,
    "90,000 tuples deep as a result": b")" + b"\x85" * 90_000,
    "memo bomb as an id": bomb(10_000) + b"Q",
    "memo bomb as metadata": pairs(a=tensor(more=(bomb(10_000),))),
    "dicts that double": doubled(pairs(a=tensor()), 6),
    "a dict in itself": b"}q\0" + text("a") + b"h\0s" + text("b") + tensor() + b"s",
    "long keys many times": doubled(b"}" + text("x" * 900_000) + pairs(t=b"N") + b"s", 3),
    "endless": b"]" + b"Na" * 3_000_000,
    "text of 4 GB": b"X\xff\xff\xff\xff" + b"x" * 100,
    "text that is no UTF-8": b"X\1\0\0\0\xff",
    "a surrogate": pairs(a=tensor(), b=text("\ud800")),
    "name without an end": b"c" + b"a" * 1_000_000,
    "no mark": b"Nt",
    "two values": b"NN",
    "a mark is left": b"}(",
    "nothing": b"",
    "key twice": b"}(" + (text("a") + tensor()) * 2 + b"u",
    "key is a bool": b"}\x88" + tensor() + b"s",
    "APPEND on a dict": b"}Na",
    "a tensor alone": tensor(),
    "an empty dict": b"}",
    "both state_dict and model": pairs(state_dict=pairs(a=tensor()), model=pairs(b=tensor())),
    "a tensor beside the model": pairs(model=pairs(a=tensor()), head=tensor()),
    "a name twice": b"}(" + text("a") + pairs(b=tensor()) + text("a.b") + tensor() + b"u",
    "name of a path": b"}" + text("../../etc/passwd\0") + tensor() + b"s",
}


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        ("_MAX_READS", -1000, "too many steps"),
        ("_MAX_READS_LEGACY", 60, "too many steps"),
        ("MAX_BYTES", 100, "bytes"),
        ("_MAX_TEXT", 6, "in one string"),
        ("_MAX_ITEMS", 2, "2 values"),
        ("_MAX_DEPTH", 1, "more than 1 deep"),
        ("MAX_TENSORS", 1, "more than 1"),
    ],
)
def test_each_bound_refuses_what_is_beyond_it_and_only_that(tmp_path, monkeypatch, bound, value, message):
    made = {"a": torch.ones(1), "b": {"c": torch.zeros(1)}}
    for how, given in FORMATS.items():
        (tmp_path / how).write_bytes(saved(made, **given))
        same(pickle_file.tensors(tmp_path / how), {"a": torch.ones(1), "b.c": torch.zeros(1)})
    monkeypatch.setattr(pickle_file, bound, value)
    for how in ("legacy",) if bound == "_MAX_READS_LEGACY" else ("zip",) if bound == "_MAX_READS" else FORMATS:
        assert message in unexecuted(tmp_path / how, tmp_path / "canary")


def changed(data, *edits):
    data = bytearray(data)
    for old, new, which in edits:
        at = data.find(old) if which == 0 else data.rfind(old)
        assert at >= 0
        assert len(old) == len(new)
        data[at : at + len(old)] = new
    return bytes(data)


def in_directory(name, field, form, value, local=None):
    """A legal archive whose directory says something else about a file, at this byte of its record."""
    data = bytearray(LEGAL)
    at = data.rfind(name) - 46
    struct.pack_into(form, data, at + field, value)
    if local is not None:
        offset = struct.unpack_from("<I", data, at + 42)[0]
        struct.pack_into(form, data, offset + local, value)
    return bytes(data)


def packed(name="data.pkl"):
    made = zipfile.ZipInfo(f"archive/{name}")
    made.compress_type = zipfile.ZIP_DEFLATED
    return made


def twice():
    with pytest.warns(UserWarning, match="Duplicate"):
        return archive(GOOD, entry("data.pkl", GOOD))


GOOD = program(pairs(a=tensor()))
LEGAL = archive(GOOD)
PKL = b"archive/data.pkl"
FILES = {
    "compressed": lambda: archive(None, (packed(), GOOD)),
    "encrypted by the directory only": lambda: in_directory(PKL, 8, "<H", 1),
    "odd flags": lambda: in_directory(PKL, 8, "<H", 0x20, 6),
    "local name differs": lambda: changed(LEGAL, (PKL, b"archive/data.pkx", 0)),
    "local size differs": lambda: changed(LEGAL, (struct.pack("<II", len(GOOD), len(GOOD)), bytes(8), 0)),
    "data.pkl twice": twice,
    "data.pkl missing": lambda: archive(None),
    "data.pkl and more": lambda: archive(GOOD + b"N."),
    "data.pkl is empty": lambda: archive(b""),
    "storage too short": lambda: archive(GOOD, data=bytes(15)),
    "4 GB": lambda: in_directory(b"archive/data/0", 20, "<Q", (0xFFFFFFF0 << 32) | 0xFFFFFFF0, 18),
    "begins at 2^32": lambda: in_directory(PKL, 42, "<I", 0xFFFFFFFE),
    "begins in the data of another": lambda: inside(),
    "two names for one place": lambda: in_directory(b"archive/data/0", 42, "<I", 0),
    "big endian": lambda: changed(LEGAL, (b"little", b"big\0\0\0", 0)),
    "two folders": lambda: archive(GOOD, entry("data.pkl", GOOD, "other")),
    "absolute name": lambda: archive(GOOD, entry("x", b"", "/archive")),
    "name with ..": lambda: archive(GOOD, entry("../x", b"")),
    "name with a backslash": lambda: archive(GOOD, entry("a\\b", b"")),
    "something before": lambda: b"PK\3\4" + bytes(40) + LEGAL,
    "something behind": lambda: LEGAL + b"\0",
    "count too small": lambda: LEGAL[:-14] + struct.pack("<HH", 1, 1) + LEGAL[-10:],
    "10^9 files": lambda: LEGAL[:-14] + struct.pack("<HHII", 65535, 65535, 1 << 31, 0) + LEGAL[-2:],
    "only an end": lambda: b"PK\3\4" + LEGAL[-22:],
    "64-bit directory of 2^63": lambda: wide(1 << 63, 0),
    "64-bit directory that wraps": lambda: wide((1 << 64) - 98, 98),
    "no bytes": lambda: b"",
    "a plain pickle": lambda: pickle.dumps({"a": 1}, 2),
    "legacy: wrong magic": lambda: in_legacy(LEGACY, magic=0x1950A86A20F9469CFC6D),
    "legacy: big endian": lambda: in_legacy(b"}", system={"little_endian": False}),
    "legacy: no system": lambda: in_legacy(b"}", system=[]),
    "legacy: unknown key": lambda: in_legacy(LEGACY, keys=("1",)),
    "legacy: key twice": lambda: in_legacy(LEGACY, keys=("0", "0")),
    "legacy: other count": lambda: in_legacy(LEGACY, struct.pack("<q", 3) + bytes(16)),
    "legacy: cut numbers": lambda: in_legacy(LEGACY, struct.pack("<q", 4) + bytes(15)),
    "legacy: more behind": lambda: in_legacy(LEGACY, struct.pack("<q", 4) + bytes(17)),
    "legacy: endless": lambda: in_legacy(b"]" + b"Na" * 3_000_000),
}


def wide(start, length):
    whole = saved({"a": torch.ones(1)})
    return whole[:-58] + struct.pack("<QQ", length, start) + whole[-42:-10] + b"\xff" * 8 + whole[-2:]


def inside():
    """A storage whose own header is right, and lies in the data of another."""
    other = archive(GOOD, entry("data/1", bytes(16)))
    begin = other.find(b"archive/data/1") - 30
    header = other[begin : begin + 60]
    whole = bytearray(archive(GOOD, entry("data/1", bytes(16)), data=header))
    at = whole.rfind(b"archive/data/1") - 46
    struct.pack_into("<I", whole, at + 42, whole.find(header))
    return bytes(whole)


@pytest.mark.parametrize("name", [*FILES, *BODIES])
def test_an_odd_file_is_refused(tmp_path, name):
    (tmp_path / "x.bin").write_bytes(FILES[name]() if name in FILES else in_zip(BODIES[name]))
    unexecuted(tmp_path / "x.bin", tmp_path / "canary")


def test_a_file_with_holes_of_a_terabyte_is_refused_soon(tmp_path):
    path = tmp_path / "x.bin"
    for head in (b"PK\3\4", b"\x80\x02X", in_legacy(b"]")):
        path.write_bytes(head)
        try:
            os.truncate(path, 1 << 40)
        except OSError as error:
            pytest.skip(f"no file with so large a hole here: {error}")
        unexecuted(path, tmp_path / "canary")


def test_five_hundred_mutants_raise_nothing_but_one_line(tmp_path):
    chance, path, canary = random.Random(0), tmp_path / "x.bin", tmp_path / "canary"
    small = {"a": torch.ones(2, 3).t(), "b": {"c": torch.nn.Parameter(torch.ones(2))}, "d": [1, 2.5, "x"]}
    whole = [saved(small, **how) for how in FORMATS.values()]
    with zipfile.ZipFile(io.BytesIO(whole[0])) as file:
        inner = file.read("archive/data.pkl")
    inner = [inner, *map(program, programs(canary).values())]
    opcodes = pickle_file._ALLOWED + b"}bioP\x81\x92\x82"

    def mutant(turn):
        texts = whole if turn % 2 == 0 else inner if turn % 4 == 3 else inner[:1]
        data = bytearray(chance.choice(texts))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data))
            new = (bytes([chance.randrange(256)]), bytes([chance.choice(opcodes)]), data[at : at + 9] * 2, b"")
            data[at : at + chance.randrange(3)] = chance.choice(new)
        return archive(bytes(data), entry("data/1", bytes(8)), data=bytes(24)) if turn % 2 else data

    assert 0 < count_readable(pickle_file.tensors, path, map(mutant, range(500))) < 250
    assert not canary.exists()


# What executes what it reads has no place in the package.

EXECUTES = re.compile(
    r"^\s*(import|from) (_?c?pickle|marshal|shelve|dill|joblib|cloudpickle)\b|\b(torch|serialization|hub)\.load\("
    r"|(?<![\w.])(eval|exec|compile|__import__)\(|jinja2 import .*\bEnvironment\b|allow_pickle=True",
    re.MULTILINE | re.IGNORECASE,
)


def test_nothing_in_the_package_executes_what_it_reads():
    files = sorted(Path(dunes.__file__).parent.rglob("*.py"))
    assert len(files) > 80
    found = {(file.name, match[0].strip()) for file in files for match in EXECUTES.finditer(file.read_text())}
    assert found == {("pickle_file.py", "import pickle")}, "which makes inert stand-ins only"

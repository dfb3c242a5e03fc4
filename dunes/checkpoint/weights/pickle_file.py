"""Read the tensors of `torch.save` files without executing anything.

A pickle is a program for a stack machine (<https://docs.python.org/3/library/pickletools.html>) that may name and
call any function. The standard library's pure-Python unpickler is restricted here to the opcodes and names that
torch writes for tensors. These names resolve to inert stand-ins, so that nothing is imported or called; any other
name raises ValueError. Storage sizes are checked against the file; values are memory-mapped when read.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, ClassVar

import torch

from dunes.checkpoint.weights.lazy_tensor import MAX_DIMS, LazyTensor, MappedFile, extent, open_mapped, shape_error
from dunes.checkpoint.weights.safetensors_file import MAX_NAME_BYTES, MAX_TENSORS, check_name, quote
from dunes.units import plural

# A tensor takes about 35 opcodes, 70 reads and 150 bytes. The limit on reads grows with the number of storages in
# the archive, so that a small file fails early. The older format's limit is fixed: storages come afterwards.
_MAX_READS, _READS_PER_FILE = 200_000, 128
_MAX_READS_LEGACY = 600_000
MAX_BYTES = 32 << 20
_MAX_TEXT = 1 << 20
_MAX_DEPTH = 8
_MAX_ITEMS = 2 * MAX_TENSORS
_LEGACY = 0x1950A86A20F9469CFC6C, 1001
_REMEDY = "only tensors are read, nothing is executed; ask for safetensors"

# The opcodes that torch writes: MARK, STOP, numbers, strings, tuples, lists, the memo, globals, storages and
# calls.
_ALLOWED = b"(.\x80\x95N\x88\x89KMJ\x8aGX\x8c\x8dTU])t\x85\x86\x87qr\x94hjc\x93suaeQR"
_LOCAL = Struct("<4s5H3I2H")
_END = b"PK\5\6"
_FLAGS = 0x0808  # supported zip flags: sizes after the data, UTF-8 names


@dataclass(frozen=True)
class _Storage:
    """A storage, which several tensors may share."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class _Tensor:
    """A view of a storage; offset and stride count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_STORAGES: dict[tuple[str, str], torch.dtype] = {
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
}


def tensors(path: Path) -> dict[str, LazyTensor]:
    """Tensors of a `torch.save` file in either of torch's two formats, by name, in the file's order.

    Keys of nested dicts are joined with dots. If the file has a dict "state_dict" or "model", only that dict's
    tensors are returned, not the optimizer's tensors. Values that are no tensors are omitted, and so are tensors
    in lists. Tensors may share storages, so that their `nbytes` may sum to more than the file's size. Raises
    ValueError, on one line, for a damaged file and for any opcode or name that torch does not write for tensors.
    """
    with open_mapped(path, _REMEDY) as (mapped, file):
        content, places = (_read_zip if file.read(4) == b"PK\3\4" else _read_legacy)(file, mapped.size)
        return {name: _lazy(mapped, name, t, places) for name, t in _tensors_by_name(content).items()}


def _lazy(mapped: MappedFile, name: str, tensor: _Tensor, places: Mapping[str, tuple[int, int]]) -> LazyTensor:
    """A lazy tensor with values in the file. Raises ValueError if the file lacks the tensor's storage."""
    storage, size = tensor.storage, tensor.storage.dtype.itemsize
    begin, available = places.get(storage.key, (0, -1))
    if storage.count * size > available:
        raise ValueError(
            f"storage {quote(storage.key)} needs {plural(storage.count * size, 'byte')}; the file has "
            f"{'none' if available < 0 else available} for it"
        )
    begin += tensor.offset * size if 0 not in tensor.shape else 0
    return mapped.lazy(name, begin, tensor.shape, storage.dtype, tensor.stride)


def _read_zip(file: BinaryIO, size: int) -> tuple[object, dict[str, tuple[int, int]]]:
    """The unpickled content of a file from torch 1.6 or later, and each storage's offset and size in bytes."""
    files = entries(file, size)
    (prefix, *others) = {name.split("/")[0] for name in files} or {""}
    pickle = files.get(f"{prefix}/data.pkl")
    if others or pickle is None or pickle[1] > MAX_BYTES:
        raise ValueError(f"the archive is not one folder with a data.pkl of at most {MAX_BYTES} bytes")
    order = _read(file, files.get(f"{prefix}/byteorder", (0, 0)), 16)
    if order not in (b"", b"little"):
        raise ValueError(f"its byte order is {quote(order.decode('latin-1'))}; expected 'little'")
    text = io.BytesIO(_read(file, pickle, MAX_BYTES))
    content = _Unpickler(text, _MAX_READS + _READS_PER_FILE * len(files)).run()
    if text.read(1):
        raise ValueError(f"the pickle ends before data.pkl does, at byte {text.tell() - 1}")
    folder = f"{prefix}/data/"
    places = {name.removeprefix(folder): place for name, place in files.items() if name.startswith(folder)}
    return content, places


def _read(file: BinaryIO, place: tuple[int, int], most: int) -> bytes:
    file.seek(place[0])
    return file.read(min(place[1], most))


def _read_legacy(file: BinaryIO, size: int) -> tuple[object, dict[str, tuple[int, int]]]:
    """Read a file from before torch 1.6, like `_read_zip`: five pickles, then each storage's size and values."""
    file.seek(0)
    unpickler = _Unpickler(file, _MAX_READS_LEGACY)
    if file.read(1) != b"\x80":
        raise ValueError("it is not a file of torch.save")
    file.seek(0)
    if any(unpickler.run() != number for number in _LEGACY):
        raise ValueError("it is a pickle, but not one of torch.save")
    system = unpickler.run()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("it was not written on a little-endian machine")
    content, keys = unpickler.run(), unpickler.run()
    places: dict[str, tuple[int, int]] = {}
    for key in keys if isinstance(keys, list) else [None]:
        storage = unpickler.storages.get(key) if isinstance(key, str) else None
        head = file.read(8)
        if storage is None or key in places or len(head) < 8 or int.from_bytes(head, "little") != storage.count:
            raise ValueError(f"its list of storages is damaged at {quote(key)}")
        places[storage.key] = file.tell(), min(storage.count * storage.dtype.itemsize, size - file.tell())
        file.seek(sum(places[storage.key]))
    if file.tell() != size:
        raise ValueError(f"{plural(size - file.tell(), 'byte follows', 'bytes follow')} the last storage")
    return content, places


class _Dict(dict[object, object]):
    """A dict in a pickle. Keys must be unique strings or integers, as hashing nested tuples can be very slow."""

    def __setitem__(self, key: object, value: object) -> None:
        if type(key) not in (str, int) or key in self:
            raise ValueError(
                f"its pickle has the key {quote(key)} twice, or this key is neither a string nor an integer"
            )
        super().__setitem__(key, value)


class _BoundedFile:
    """Wraps a file of pickles to limit the number of reads and the number of bytes read."""

    def __init__(self, file: BinaryIO | io.BytesIO, reads: int) -> None:
        self.file, self.left, self.reads = file, MAX_BYTES, reads

    def read(self, count: int) -> bytes:
        self.left -= count
        self.reads -= 1
        if self.reads < 0:
            raise ValueError("its pickle takes too many steps")
        if count > _MAX_TEXT or self.left < 0:
            raise ValueError(f"its pickle has more than {MAX_BYTES} bytes, or {_MAX_TEXT} in one string")
        data = self.file.read(count)
        if len(data) < count:
            raise ValueError("its pickle is truncated")
        return data

    def readline(self) -> bytes:
        data = self.file.readline(256)
        self.left -= len(data)
        if not data.endswith(b"\n"):
            raise ValueError("its pickle has a name of more than 255 bytes, or is cut off")
        return data


class _Unpickler(pickle._Unpickler):  # a few bytes make the C version allocate any amount
    """Reads the pickles of one file in order; `storages` has the storages that the pickles refer to, by key.

    Only numbers and strings are compared, hashed or printed, since n opcodes can build a value of 2^n parts.
    """

    stack: list[Any]
    metastack: list[Any]
    read: Callable[[int], bytes]

    def __init__(self, file: BinaryIO | io.BytesIO, reads: int) -> None:
        super().__init__(_BoundedFile(file, reads), encoding="utf-8")
        self.storages: dict[str, _Storage] = {}

    def run(self) -> object:
        """Read the next pickle of the file and return its value."""
        self.memo: dict[int, object] = {}
        try:
            value: object = self.load()
        except KeyError as error:
            raise ValueError(f"its pickle has the opcode {bytes([error.args[0]])!r}") from None
        except (pickle.UnpicklingError, struct.error, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"its pickle is damaged: {' '.join(str(error).split())[:200]}") from None
        if self.stack or self.metastack:
            raise ValueError("its pickle ends in the middle")
        return value

    def find_class(self, module: str, name: str) -> object:
        """The stand-in for a name that a pickle imports. Raises ValueError if the name has no stand-in."""
        if (module, name) not in _STAND_INS:
            raise ValueError(f"its pickle imports {ascii(f'{module}.{name}')[1:-1]}")
        return _STAND_INS[module, name]

    def persistent_load(self, pid: object) -> _Storage:
        """The storage that a persistent id describes."""
        match pid:
            case ("storage", torch.dtype() as dtype, str() as key, str(), int() as count, *view):
                storage = _Storage(key, dtype, count)
            case _:
                raise ValueError("its pickle refers to an object that is not a storage of a known type")
        if view not in ([], [None]) or type(count) is not int or not 0 <= count < 1 << 59:
            raise ValueError(f"storage {quote(key)} has an invalid size or is part of another storage")
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"storage {quote(key)} has two types or sizes")
        return storage

    def load_frame(self) -> None:
        """Skip a frame's size; the opcodes in the frame are read like all other opcodes."""
        self.read(8)

    def load_dict(self) -> None:
        self.stack.append(_Dict())

    def load_text(self) -> None:
        """Read a string whose length is stored in four bytes. Raises UnicodeEncodeError for lone surrogates."""
        super().load_binunicode()  # type: ignore[misc]
        self.stack[-1].encode()

    def load_build(self) -> None:
        """Drop the `_metadata` of a state dict. Raises ValueError if an object has any other state."""
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is not _Dict or type(state) is not _Dict or state.keys() != {"_metadata"}:
            raise ValueError("its pickle sets attributes of an object")

    dispatch: ClassVar[dict[int, Any]] = {code: pickle._Unpickler.dispatch[code] for code in _ALLOWED} | {
        pickle.FRAME[0]: load_frame,
        pickle.EMPTY_DICT[0]: load_dict,
        pickle.BINUNICODE[0]: load_text,
        pickle.BUILD[0]: load_build,
    }


def _sizes(values: object) -> tuple[int, ...]:
    """A tensor's sizes or strides. Raises ValueError unless they are at most MAX_DIMS non-negative integers."""
    if type(values) is not tuple or len(values) > MAX_DIMS:
        raise ValueError(f"a tensor's sizes or strides are not a tuple of at most {MAX_DIMS} integers")
    if not all(type(v) is int and v >= 0 for v in values):
        raise ValueError("a tensor has a negative or invalid size or stride")
    return values


def _parameter(tensor: object, grad: object, hooks: object) -> _Tensor:
    if not isinstance(tensor, _Tensor) or type(grad) is not bool or type(hooks) is not _Dict or hooks:
        raise ValueError("a parameter is made from something other than a tensor")
    return tensor


def _tensor(
    storage: object, offset: object, size: object, step: object, grad: object, hooks: object, *more: object
) -> _Tensor:
    """The tensor that these arguments of `torch._utils._rebuild_tensor_v2` describe; `more` is its metadata."""
    shape, stride = _sizes(size), _sizes(step)
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0 or len(shape) != len(stride):
        raise ValueError("a tensor has no storage, an invalid offset, or not one stride for each size")
    plain = all(v is None or (type(v) is _Dict and not v) for v in (hooks, *more))
    if type(grad) is not bool or not plain:
        raise ValueError("a tensor has hooks or metadata")
    if reason := shape_error(shape):
        raise ValueError(f"a tensor {reason}")
    if (count := extent(shape, stride)) and offset + count > storage.count:
        raise ValueError(f"a tensor of {shape} exceeds its storage of {plural(storage.count, 'element')}")
    if _overlaps(shape, stride):
        raise ValueError(f"a tensor of {shape} with strides {stride} has overlapping elements")
    return _Tensor(storage, offset, shape, stride)


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if a stride is within the extent of smaller strides, so that two indices may share an element."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step <= reach and 0 not in shape:
            return True
        reach += (size - 1) * step
    return False


def _tensors_by_name(content: object) -> dict[str, _Tensor]:
    """Tensors of nested dicts, each named by its keys, joined with dots."""
    if type(content) is not _Dict:
        raise ValueError("it is not a dict of tensors")
    inner = {key: value for key in ("state_dict", "model") if type(value := content.get(key)) is _Dict}
    if len(inner) > 1:
        raise ValueError("it has both a 'state_dict' and a 'model', which is ambiguous")
    if inner and any(isinstance(value, _Tensor) for value in content.values()):
        raise ValueError(f"it has tensors beside its {next(iter(inner))!r}, which is ambiguous")
    result: dict[str, _Tensor] = {}
    for i, (name, value, depth) in enumerate(_items(next(iter(inner.values()), content))):
        if i >= _MAX_ITEMS or depth > _MAX_DEPTH:
            raise ValueError(f"its dicts are more than {_MAX_DEPTH} deep or have more than {_MAX_ITEMS} values")
        if isinstance(value, _Tensor):
            if check_name(name) in result or len(result) >= MAX_TENSORS:
                raise ValueError(f"tensor {quote(name)} occurs twice, or there are more than {MAX_TENSORS}")
            result[name] = value
    if not result:
        raise ValueError("it has no named tensor")
    return result


def _items(values: _Dict, prefix: str = "", depth: int = 1) -> Iterator[tuple[str, object, int]]:
    """Names, values and depths of the items of nested dicts, in order."""
    for key, value in values.items():
        # The key is cut, since a dict with a long, invalid key may occur many times.
        name = prefix + str(key)[: MAX_NAME_BYTES + 1]
        yield name, value, depth
        if type(value) is _Dict:
            yield from _items(value, f"{name}.", depth + 1)


_STAND_INS: dict[tuple[str, str], object] = {
    **_STORAGES,
    ("collections", "OrderedDict"): lambda: _Dict(),  # takes no pairs
    ("torch", "Size"): _sizes,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}


def entries(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """Offset and length in bytes of each file in a zip archive of `size` bytes, by name.

    Raises ValueError for a compressed or encrypted file, for a name that is not relative and unique, and for files
    that overlap each other or the central directory.
    """
    file.seek(max(size - 22, 0))
    if not (tail := file.read(22)).startswith(_END) or tail[20:] != b"\0\0":
        raise ValueError("it does not end like an archive; it was truncated or something was added")
    file.seek(0)
    places: dict[str, tuple[int, int]] = {}
    end = 0
    try:
        with zipfile.ZipFile(file) as archive:
            # In file order, so that no byte is read twice.
            infos, directory = sorted(archive.infolist(), key=lambda i: i.header_offset), archive.start_dir
            counts = {int.from_bytes(tail[i : i + 2], "little") for i in (8, 10)}
            if not counts <= {len(infos), 0xFFFF} or (infos and infos[0].header_offset):
                raise ValueError(
                    f"the archive's end counts {max(counts)} files, or there are bytes before the first one"
                )
            for info in infos:
                first = _first_byte(file, info)
                if info.filename in places or info.header_offset < end or first + info.file_size > directory:
                    raise ValueError(f"{info.filename!a} occurs twice, or overlaps another part")
                end = first + info.file_size
                places[info.filename] = first, info.file_size
    except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"the archive cannot be read: {error}") from None
    return places


def _first_byte(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Offset of an archived file's data. Raises ValueError if the file's header contradicts the directory."""
    name = info.filename
    plain = info.orig_filename.isprintable() and "\\" not in name and len(name.encode()) <= 1024
    if not plain or any(part in ("", ".", "..") for part in info.orig_filename.split("/")):
        raise ValueError(f"the archive has a file named {info.orig_filename[:80]!a}")
    if info.compress_type or info.flag_bits & ~_FLAGS or info.compress_size != info.file_size:
        raise ValueError(f"{name!a} is compressed or encrypted (flags {info.flag_bits:#x})")
    file.seek(info.header_offset)
    header = file.read(_LOCAL.size).ljust(_LOCAL.size, b"\0")
    signature, _, flags, method, _, _, _, packed, size, length, more = _LOCAL.unpack(header)
    sizes = {info.file_size, 0xFFFFFFFF} | ({0} if flags & 8 else set())
    same = (signature, flags, method, file.read(length)) == (b"PK\3\4", info.flag_bits, 0, name.encode())
    if not same or not {size, packed} <= sizes:
        raise ValueError(f"the header of {name!a} contradicts the directory")
    return int(info.header_offset + _LOCAL.size + length + more)

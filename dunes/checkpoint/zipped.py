"""Where the files of an uncompressed zip archive lie in it: <https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT>.

Stricter than the format: an archive that two programs could read in two ways is refused. Nothing may lie behind
the end record, and what the directory and a file's own header say must be the same.
"""

from collections.abc import Iterator
from struct import Struct
from typing import BinaryIO

from dunes.plural import plural

ENTRIES = 101_000
_END, _END64, _LOCATOR = Struct("<4s4H2IH"), Struct("<4sQ2H2I4Q"), Struct("<4sIQI")
_DIRECTORY, _LOCAL = Struct("<4s6H3I5H2I"), Struct("<4s5H3I2H")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
# Sizes that follow the data, and names in UTF-8. Bit 0 is encryption; the others change the format, too.
_FLAGS = 0x0808


def entries(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """The first byte and the length of each file of an archive of `size` bytes, by name.

    Raises ValueError that says what is not as it must be: every file is stored as it is (neither compressed
    nor encrypted), lies before the directory and overlaps no other; names are unique, relative and plain.
    """
    count, start, length = _directory(file, size)
    file.seek(start)
    held = file.read(length)
    found: dict[str, tuple[int, int]] = {}
    end = 0
    # In the order in which they lie, so that no byte is looked at twice, however many names it is given.
    for offset, name, flags, nbytes in sorted(_listed(held, count)):
        if name in found:
            raise ValueError(f"the archive holds {name!a} twice")
        first = _data(file, name, flags, offset, nbytes)
        if offset < end or first + nbytes > start:
            raise ValueError(f"{name!a} lies in the archive where something else lies, or behind its end")
        end = first + nbytes
        found[name] = first, nbytes
    return found


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """How many files are listed, where the list begins, and its bytes."""
    if size < _END.size:
        raise ValueError("it is too short for an archive")
    file.seek(max(size - 98, 0))
    tail = file.read(98).rjust(98, b"\0")
    mark, disk, other, here, count, length, start, comment = _END.unpack(tail[-22:])
    end = size - 22
    if mark != b"PK\5\6" or comment:
        raise ValueError("it does not end as an archive does; it was cut or something was added")
    if tail[56:60] == b"PK\6\7":
        end, said = size - 98, (here, count, length, start)
        _, _, place, _ = _LOCATOR.unpack(tail[56:76])
        mark, _, _, _, disk, other, here, count, length, start = _END64.unpack(tail[:56])
        same = all(a in (_MAX16, _MAX32, b) for a, b in zip(said, (here, count, length, start), strict=True))
        if mark != b"PK\6\6" or place != end or not same:
            raise ValueError("the archive's two end records disagree")
    if disk or other or here != count or count > ENTRIES:
        raise ValueError(f"the archive is said to hold {count} files; at most {ENTRIES} in one part are read")
    if start + length != end or length > count * 1024:
        raise ValueError(f"the archive's directory of {plural(length, 'byte')} at {start} does not end at {end}")
    return count, start, length


def _listed(held: bytes, count: int) -> Iterator[tuple[int, str, int, int]]:
    """Place of the header, name, flags and bytes of each file of the directory."""
    at = 0
    for _ in range(count):
        if at + _DIRECTORY.size > len(held):
            raise ValueError("the archive's directory is shorter than it says")
        mark, _, _, flags, method, _, _, _, packed, nbytes, n, x, c, disk, _, _, offset = _DIRECTORY.unpack_from(
            held, at
        )
        at += _DIRECTORY.size
        name = _name(held[at : at + n])
        if mark != b"PK\1\2" or c or disk:
            raise ValueError(f"the archive's directory is damaged at {name!a}")
        nbytes, packed, offset = _long(held[at + n : at + n + x], [nbytes, packed, offset])
        if method or flags & ~_FLAGS or packed != nbytes:
            raise ValueError(f"{name!a} is compressed or encrypted (method {method}, flags {flags:#x})")
        yield offset, name, flags, nbytes
        at += n + x
    if at != len(held):
        raise ValueError("the archive's directory is longer than it says")


def _name(raw: bytes) -> str:
    name = raw.decode("utf-8")
    plain = name.isprintable() and "\\" not in name and len(raw) <= 1024
    if not plain or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the archive holds a file named {name[:80]!a}")
    return name


def _long(extra: bytes, values: list[int]) -> list[int]:
    """Replace the values that did not fit into 32 bits by those of 64 in the extra field."""
    while len(extra) >= 4 and _MAX32 in values:
        kind, length = int.from_bytes(extra[:2], "little"), int.from_bytes(extra[2:4], "little")
        body, extra = extra[4 : 4 + length], extra[4 + length :]
        if kind == 1:
            longs = iter([int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body) - 7, 8)])
            return [next(longs, v) if v == _MAX32 else v for v in values]
    return values


def _data(file: BinaryIO, name: str, flags: int, offset: int, nbytes: int) -> int:
    """Where a file's data begins, if its own header says what the directory says."""
    file.seek(min(offset, 1 << 62))
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size:
        raise ValueError(f"{name!a} is said to begin at byte {offset}, behind the archive's end")
    mark, _, local, method, _, _, _, packed, size, n, x = _LOCAL.unpack(head)
    rest = file.read(n + x)
    size, packed = _long(rest[n:], [size, packed])
    sizes = {nbytes, 0} if flags & 8 else {nbytes}
    same = (mark, local, method, rest[:n]) == (b"PK\3\4", flags, 0, name.encode())
    if not same or not {size, packed} <= sizes or len(rest) < n + x:
        raise ValueError(f"{name!a} has a header of its own that says something else than the directory")
    return offset + _LOCAL.size + len(rest)

"""The offsets of the files in an uncompressed zip archive, so that they can be mapped.

`zipfile` reads the directory. It accepts ambiguous archives (bytes before or after the archive, a file header that
contradicts the directory), which are refused here.
"""

import zipfile
from struct import Struct
from typing import BinaryIO, cast

_LOCAL = Struct("<4s5H3I2H")
_END = b"PK\5\6"
_FLAGS = 0x0808  # sizes that follow the data, and names in UTF-8; the other flags change the format
_DIRECTORY = 32 << 20


class _Bounded:
    """A file whose reads are bounded: zipfile trusts the size of the directory in the archive."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell, self.seekable = file, file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > _DIRECTORY:
            raise ValueError(f"the archive's directory claims {size} bytes; expected {_DIRECTORY} at most")
        return self.file.read(_DIRECTORY if size < 0 else size)


def entries(file: BinaryIO, size: int) -> dict[str, tuple[int, int]]:
    """The offset and the length of each file of an archive of `size` bytes, by name.

    Raises ValueError unless every file is stored (neither compressed nor encrypted), before the directory and
    without overlap; names must be unique and relative.
    """
    file.seek(max(size - 22, 0))
    if not (tail := file.read(22)).startswith(_END) or tail[20:] != b"\0\0":
        raise ValueError("it does not end like an archive; it was truncated or something was added")
    file.seek(0)
    places: dict[str, tuple[int, int]] = {}
    end = 0
    try:
        with zipfile.ZipFile(cast(BinaryIO, _Bounded(file))) as archive:
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
                    raise ValueError(f"{info.filename!a} occurs twice, or overlaps something else")
                end = first + info.file_size
                places[info.filename] = first, info.file_size
    except (zipfile.BadZipFile, NotImplementedError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"the archive cannot be read: {error}") from None
    return places


def _first_byte(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """The offset of a file's data. Raises ValueError unless its own header agrees with the directory."""
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
        raise ValueError(f"{name!a} has a header of its own that contradicts the directory")
    return int(info.header_offset + _LOCAL.size + length + more)

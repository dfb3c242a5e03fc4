"""Read MNIST's digits from IDX files, plain or gzipped, or draw similar digits without any files.

An IDX file has two zero bytes, the data type, the number of dimensions, the size of each dimension as four
big-endian bytes, then the data (http://yann.lecun.com/exdb/mnist/).
"""

# Shapes: N digits.

import gzip
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dunes.context import prefix_errors
from dunes.data.files import open_plain
from dunes.files.atomic import write_file
from dunes.units import plural

SIDE, CLASSES = 28, 10
UINT8 = b"\0\0\x08"
"""First bytes of an IDX file of unsigned bytes."""
MAX_DIMENSIONS = 8
"""Maximum number of dimensions of an IDX file."""

URLS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
SECONDS = 10.0
"""Timeout of a request, in seconds."""


@dataclass(frozen=True)
class Digits:
    """Images (N, 28, 28), uint8 from 0 (background) to 255, and labels (N,), int64 from 0 to 9."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: slice) -> "Digits":
        return Digits(self.images[index], self.labels[index])


def read_digits(folder: str | Path, split: str = "train") -> Digits:
    """The digits in a folder's files `SPLIT*-images-idx3-ubyte` and `SPLIT*-labels-idx1-ubyte`, gzipped or not.

    The splits of MNIST are "train" and "t10k". Raises ValueError for missing, truncated or mismatched files, and
    for files of another format.
    """
    paths = [_find(Path(folder).expanduser(), f"{split}*-{part}-ubyte") for part in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path) for path in paths)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{paths[0]}: images of {tuple(images.shape[1:])}; expected ({SIDE}, {SIDE})")
    if labels.dim() != 1 or len(labels) != len(images):
        raise ValueError(f"{paths[1]}: labels of shape {tuple(labels.shape)} for {plural(len(images), 'image')}")
    if len(labels) and int(labels.max()) >= CLASSES:
        first = int((labels >= CLASSES).nonzero()[0])
        raise ValueError(f"{paths[1]}: label {first} is {int(labels[first])}; expected 0 to {CLASSES - 1}")
    return Digits(images, labels.long())


def read_idx(path: Path) -> Tensor:
    """The unsigned bytes in an IDX file, which is decompressed if its name ends in .gz.

    Raises ValueError for any other file.
    """
    errors, end = (OSError, EOFError, zlib.error), "; copy or download it again"
    with prefix_errors(f"{path}: cannot be read", errors, end=end), open_plain(path) as file:
        stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        shape = _shape(path, stream.read(4 + 4 * MAX_DIMENSIONS))
        count = math.prod(shape)
        stream.seek(4 + 4 * len(shape))
        content = stream.read(count + 1)
    if len(content) != count:
        raise ValueError(f"{path}: not the {count:,} bytes that its header promises; download it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape) if count else torch.zeros(shape)


def _shape(path: Path, header: bytes) -> list[int]:
    """The shape in an IDX header. Raises ValueError for an invalid header."""
    dimensions = header[3] if header.startswith(UINT8) and len(header) > 3 else 0
    if not dimensions or len(header) < 4 + 4 * dimensions:
        raise ValueError(f"{path}: begins with {header[:4].hex() or 'nothing'}; expected 000008 and a shape (IDX)")
    shape: list[int] = np.frombuffer(header, ">u4", dimensions, 4).tolist()
    return shape


def _find(folder: Path, pattern: str) -> Path:
    """The one plain file that matches, else the one gzipped file. Raises ValueError for none or several."""
    matches = sorted(folder.glob(pattern)) or sorted(folder.glob(f"{pattern}.gz"))
    if len(matches) != 1:
        names = ", ".join(path.name for path in matches[:3])
        raise ValueError(
            f"{folder}: {names or 'no file'} for {pattern}[.gz]; expected one; fetch_digits fetches MNIST"
        )
    return matches[0]


def fetch_digits(folder: str | Path) -> None:
    """Download the files of MNIST that the folder lacks (at most 11 MB), and check their SHA-256.

    Raises ValueError if a download fails. A file is never left incomplete.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, digest in SHA256.items():
        if not (folder / name).exists():
            write_file(folder / name, _download(name, digest))


def _download(name: str, digest: str) -> bytes:
    """Download a file from the first of URLS that works. If none works, raises ValueError with the reasons."""
    from urllib.request import urlopen  # not needed to read files

    reasons = []
    for url in URLS:
        try:
            with urlopen(url + name, timeout=SECONDS) as reply:
                content: bytes = reply.read()
        except (OSError, HTTPException) as error:
            reasons.append(f"{url}: {error}")
            continue
        if sha256(content).hexdigest() == digest:
            return content
        reasons.append(f"{url}: {len(content):,} bytes with another SHA-256")
    raise ValueError(
        f"{name} cannot be fetched ({'; '.join(reasons)}); copy MNIST's files into the folder, or use drawn_digits"
    )


# Each digit as polylines of points (x, y) in the unit square, y downwards.
_ROUND = [(0.5 + 0.28 * math.sin(t), 0.5 - 0.4 * math.cos(t)) for t in np.linspace(0, 2 * math.pi, 13)]
_STROKES: list[list[list[tuple[float, float]]]] = [
    [_ROUND],
    [[(0.35, 0.25), (0.52, 0.1), (0.52, 0.9)]],
    [[(0.25, 0.3), (0.35, 0.12), (0.6, 0.1), (0.73, 0.28), (0.62, 0.5), (0.25, 0.9), (0.78, 0.88)]],
    [[(0.25, 0.15), (0.68, 0.12), (0.7, 0.35), (0.45, 0.48), (0.74, 0.6), (0.7, 0.85), (0.25, 0.86)]],
    [[(0.62, 0.9), (0.62, 0.1), (0.2, 0.65), (0.8, 0.65)]],
    [[(0.72, 0.12), (0.32, 0.12), (0.28, 0.46), (0.62, 0.44), (0.75, 0.65), (0.62, 0.87), (0.25, 0.85)]],
    [[(0.65, 0.1), (0.35, 0.4), (0.27, 0.7), (0.45, 0.9), (0.7, 0.8), (0.68, 0.58), (0.45, 0.52), (0.28, 0.66)]],
    [[(0.22, 0.13), (0.76, 0.13), (0.42, 0.9)]],
    [[(0.5, 0.48), (0.3, 0.3), (0.5, 0.1), (0.7, 0.3), (0.5, 0.48),
      (0.27, 0.7), (0.5, 0.9), (0.73, 0.7), (0.5, 0.48)]],
    [[(0.72, 0.3), (0.5, 0.48), (0.29, 0.32), (0.48, 0.11), (0.72, 0.3), (0.66, 0.9)]],
]  # fmt: skip


def drawn_digits(count: int = 400, seed: int = 0) -> Digits:
    """Digits drawn by code, with random slant, size, position and pen width: a stand-in that needs no download.

    Drawn digits are much easier to classify than MNIST. The same count and seed give the same digits.
    """
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    generator.shuffle(labels)
    images = [_draw(_STROKES[label], generator) for label in labels]
    pixels = torch.from_numpy(np.stack(images)) if count else torch.zeros(0, SIDE, SIDE, dtype=torch.uint8)
    return Digits(pixels, torch.from_numpy(labels.astype(np.int64)))


def _draw(strokes: Sequence[Sequence[tuple[float, float]]], generator: np.random.Generator) -> NDArray[np.uint8]:
    """One image (28, 28), uint8: the value of a pixel depends on its distance to the nearest line."""
    slant, shrink = generator.normal(0, 0.15), generator.uniform(0.65, 0.9, 2)
    matrix = np.array([[shrink[0], slant], [generator.normal(0, 0.05), shrink[1]]])
    centre, pen = generator.normal(0.5, 0.03, 2), generator.uniform(0.035, 0.06)
    y, x = (np.mgrid[:SIDE, :SIDE] + 0.5) / SIDE
    pixels = np.stack([x, y], -1)
    distance = np.full((SIDE, SIDE), np.inf)
    for stroke in strokes:
        points = (np.array(stroke) - 0.5 + generator.normal(0, 0.015, (len(stroke), 2))) @ matrix.T + centre
        for a, b in pairwise(points):
            along = np.clip((pixels - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
            distance = np.minimum(distance, np.linalg.norm(pixels - a - along[..., None] * (b - a), axis=-1))
    ink = np.clip((pen - distance) * SIDE + 0.5, 0, 1)
    return (255 * ink).astype(np.uint8)

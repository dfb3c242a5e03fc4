"""MNIST: its files, digits drawn by code, two networks, and what the recipe reaches on the real digits."""

import gzip
import hashlib
import struct
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from torch import nn

from conftest import data, refuses
from dunes.data import Rows, drawn_digits, fetch_digits, read_digits
from dunes.data import mnist_files as files
from dunes.models import mnist

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(*shape, content=None, kind=8):
    count = torch.Size(shape).numel()
    body = bytes(i % 10 for i in range(count)) if content is None else content
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


def write(folder, images=None, labels=None, gz=False):
    for name, content in ((IMAGES, images or idx(3, 28, 28)), (LABELS, labels or idx(3))):
        (folder / f"{name}{'.gz' * gz}").write_bytes(gzip.compress(content) if gz else content)
    return folder


@pytest.mark.parametrize("gz", [False, True])
def test_digits_of_files(tmp_path, gz):
    digits = read_digits(write(tmp_path, gz=gz))
    assert digits.images.shape == (3, 28, 28)
    assert digits.images.dtype == torch.uint8
    assert digits.images.flatten().tolist() == [i % 10 for i in range(3 * 784)]
    assert digits.labels.tolist() == [0, 1, 2]
    assert len(digits[:2]) == 2


WHOLE = idx(3, 28, 28)
BAD_IMAGES = (WHOLE[:-1], WHOLE + b"x", WHOLE[:7], idx(3, 28, 28, kind=13), idx(3, 28, 27))
BAD = [*((bad, None) for bad in BAD_IMAGES), (None, idx(3, content=b"\x01\x0a\x02")), (None, idx(2))]


@pytest.mark.parametrize(("images", "labels"), BAD)
def test_a_bad_file_is_one_line(tmp_path, images, labels):
    write(tmp_path, images, labels)
    refuses(str(tmp_path / "train-"), read_digits, tmp_path)


def test_a_damaged_or_missing_file_is_one_line(tmp_path):
    refuses(r"no file for train\*-images-idx3-ubyte\[.gz\]; expected one; fetch", read_digits, tmp_path)
    path = write(tmp_path, gz=True) / f"{IMAGES}.gz"
    broken = bytearray(gzip.compress(idx(3, 28, 28)))
    broken[10] = 7  # no type of a block
    for content in (path.read_bytes()[:40], b"no gzip", broken):
        path.write_bytes(content)
        refuses(r"ubyte\.gz: cannot be read: .*; copy or download it again", read_digits, tmp_path)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves a folder with one small file, whose name and digest stand in for MNIST's."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "small.gz").write_bytes(b"content")
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *words: None)
    monkeypatch.setattr(files, "SHA256", {"small.gz": hashlib.sha256(b"content").hexdigest()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        monkeypatch.setattr(files, "URLS", (f"http://127.0.0.1:{http.server_port}/",))
        yield folder
        http.shutdown()


def test_fetching_compares_digests(tmp_path, server):
    fetch_digits(tmp_path / "new")
    assert (tmp_path / "new/small.gz").read_bytes() == b"content"
    (server / "small.gz").write_bytes(b"other")
    fetch_digits(tmp_path / "new")  # nothing is missing
    refuses(r"small\.gz .*: 5 bytes with another SHA-256", fetch_digits, tmp_path / "again")
    (server / "small.gz").unlink()
    refuses(r"cannot be fetched \(http://127.*404.*\); copy MNIST's files", fetch_digits, tmp_path / "again")
    assert not list((tmp_path / "again").iterdir())


def test_drawn_digits_are_the_same_for_a_seed_and_differ_otherwise():
    digits = drawn_digits(60)
    assert torch.equal(digits.images, drawn_digits(60).images)
    assert not torch.equal(digits.images, drawn_digits(60, seed=1).images)
    assert digits.labels.bincount().tolist() == [6] * 10
    assert digits.images.flatten(1).unique(dim=0).shape[0] == 60
    ink = (digits.images > 0).flatten(1).float().mean(1)
    assert 0.03 < ink.min() < ink.max() < 0.5


def test_every_epoch_has_each_row_once_in_another_order():
    rows = Rows((torch.arange(10), torch.arange(10)), batch_size=4, seed=3)
    stream = rows.indices()
    order = torch.cat([next(stream) for _ in range(5)])
    first, second = order.split(10)
    assert first.sort().values.tolist() == second.sort().values.tolist() == [*range(10)]
    assert first.tolist() != second.tolist()
    resumed = rows.indices(3)
    assert torch.equal(torch.cat([next(resumed) for _ in range(2)]), order[12:])
    assert (rows.steps(2), rows.steps(1)) == (5, 3)
    x, y = next(rows.batches())
    assert torch.equal(x, y)


@pytest.mark.parametrize(("lengths", "size"), [((3, 4), 2), ((), 1), ((3,), 4), ((3,), 0)])
def test_rows_that_make_no_batch_are_refused(lengths, size):
    refuses("rows", Rows, tuple(map(torch.arange, lengths)), size)


@pytest.mark.parametrize(("build", "parameters"), [(mnist.mlp, 101_770), (mnist.conv_net, 21_840)])
def test_the_classic_networks(build, parameters):
    model = build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    images = drawn_digits(5).images
    model.eval()
    assert model(images).shape == (5, 10)
    assert torch.equal(model(images), model(images.float()))
    refuses(r"images of shape \(5, 784\); expected \(B, 28, 28\)", model, images.flatten(1))
    assert sum(isinstance(m, nn.ReLU) for m in model.modules()) == (1 if build is mnist.mlp else 3)


def test_the_real_files():
    training, test = read_digits(data("mnist")), read_digits(data("mnist"), "t10k")
    assert (len(training), len(test)) == (10_000, 10_000)
    assert test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    mean, std = training.images.float().mean().item(), training.images.float().std().item()
    assert (mean, std) == pytest.approx((mnist.MEAN, mnist.STD), rel=0.01)

"""Verify that a model is an adapter's base, by the digests of the base's weights in the adapter's card.

The card has digests in three dtypes, so a base that was cast to one of these dtypes is also recognized.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dunes.augment import lora
from dunes.augment.quantized import Quantized
from dunes.checkpoint.card import CARD
from dunes.checkpoint.weights.safetensors_file import quote
from dunes.files import atomic

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""A card has a digest of the dense base after a cast to each of these dtypes."""
READ = (".safetensors", ".bin", ".pth", ".gguf", ".json")
"""Suffixes of the files that make up a model."""
ANY_BASE_HINT = "or use this one unverified: any_base=True (--any-base)"


class BaseWeights:
    """A model's weights, by default without adapters, and their SHA-256 digests, computed on first use."""

    def __init__(self, model: nn.Module, adapters: bool = False) -> None:
        base = model if adapters else lora.base_model(model)
        self.quantized = {type(m).__name__ for m in base.modules() if isinstance(m, Quantized)}
        self.dtypes = {t.dtype for t in base.parameters()}
        self.kind = ", ".join(sorted({*self.quantized, *map(str, self.dtypes)}))
        self._tensors = sorted(base.state_dict().items())
        self._digest_cache: dict[torch.dtype | None, str] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of all weights; None if they have several dtypes or are quantized."""
        return next(iter(self.dtypes)) if len(self.dtypes) == 1 and not self.quantized else None

    def sha256(self, *dtypes: torch.dtype | None) -> list[str]:
        """For each dtype, a digest of the weights' names, shapes and values after a cast to this dtype (None: no
        cast).
        """
        exact = [dtype or self.dtype for dtype in dtypes]
        if new := [dtype for dtype in dict.fromkeys(exact) if dtype not in self._digest_cache]:
            self._digest_cache |= dict(zip(new, map(_digest, self._lines(new)), strict=True))
        return [self._digest_cache[dtype] for dtype in exact]

    def part_digests(self) -> dict[str, str]:
        """Digests of each block and each other child of the model, by name."""
        parts: dict[str, list[str]] = {}
        for (name, _), line in zip(self._tensors, self._lines([self.dtype])[0], strict=True):
            parts.setdefault(_part(name), []).append(line)
        return {part: _digest(lines) for part, lines in parts.items()}

    def _lines(self, dtypes: list[torch.dtype | None]) -> list[list[str]]:
        """Lines to hash: for each of the dtypes, a list with one line for each tensor."""
        lines: list[list[str]] = [[] for _ in dtypes]
        with atomic.progress("hashing the base", sum(t.nbytes for _, t in self._tensors)) as advance:
            for name, tensor in self._tensors:
                cast_to = [(d if tensor.is_floating_point() else None) or tensor.dtype for d in dtypes]
                for lines_of_dtype, dtype, digest in zip(
                    lines, cast_to, atomic.tensor_digests(tensor, cast_to), strict=True
                ):
                    lines_of_dtype.append(f"{name} {dtype} {tuple(tensor.shape)} {digest}")
                advance(tensor.nbytes)
        return lines

    def can_round_to(self, dtype: torch.dtype) -> bool:
        """True if the weights are dense, and either all have this dtype or some have a wider one."""
        bits = max((torch.finfo(d).bits for d in self.dtypes), default=0)
        return not self.quantized and (self.dtypes == {dtype} or torch.finfo(dtype).bits < bits)


def _digest(lines: list[str]) -> str:
    return sha256("\n".join(lines).encode()).hexdigest()


def _part(name: str) -> str:
    """Name of the child or ModuleList entry that contains a weight: "blocks.3" for "blocks.3.attn.q.weight"."""
    child, *rest = name.split(".")
    return f"{child}.{rest[0]}" if rest and rest[0].isdigit() else child


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of names, dtypes, shapes and values of all weights, adapters included."""
    return BaseWeights(model, adapters=True).sha256(None)[0]


def weights_identity(model: nn.Module) -> dict[str, str]:
    """Digests of the model's blocks and other children, by name, and `kind` as in `base_identity`."""
    weights = BaseWeights(model, adapters=True)
    return {"kind": weights.kind, **weights.part_digests()}


def changed_part(model: nn.Module, identity: Mapping[str, str]) -> str | None:
    """Name of the first block or other child whose weights differ from an earlier `weights_identity`, or None."""
    parts = weights_identity(model)
    differing = {part for part in parts.keys() | identity.keys() if parts.get(part) != identity.get(part)}
    return next(
        (part for part in map(_part, model.state_dict()) if part in differing), min(differing, default=None)
    )


def base_identity(model: nn.Module, folder: Path | None = None) -> dict[str, Any]:
    """Digests of the base's weights, without adapters, as stored in an adapter's card.

    `kind` is the dtype or quantization, and `sha256` the digest of the weights. For a dense base, `digests` has
    the digests after casts to float32, bfloat16 and float16. If the model was just loaded from `folder`, pass
    `folder` to record its `file_stamps` as `files`. While these stamps stay the same, loading the adapter need not
    compute the digests.
    """
    files = {} if folder is None else {"files": file_stamps(folder)}
    weights = BaseWeights(model)
    if weights.quantized:
        return {"kind": weights.kind, "sha256": weights.sha256(None)[0], **files}
    exact, *rounded = weights.sha256(None, *DTYPES.values())
    return {"kind": weights.kind, "sha256": exact, "digests": dict(zip(DTYPES, rounded, strict=True)), **files}


def file_stamps(base: Path) -> dict[str, list[int]]:
    """Size (bytes) and modification time (ns) of each file with a suffix in READ, by name."""
    files = sorted(base.iterdir()) if base.is_dir() else [base]
    stats = {file.name: file.stat() for file in files if file.suffix in READ and file.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def is_unchanged(base: Path, card: Mapping[str, Any]) -> bool:
    """True if the `file_stamps` of a base equal those in an adapter's card."""
    entry = card.get("base")
    return isinstance(entry, dict) and entry.get("files") == file_stamps(base)


@dataclass(frozen=True)
class BaseRecord:
    """The `base_identity` in an adapter's card, which identifies the weights that the adapter was trained on.

    `digests` maps dtypes to digests of the dense base, and is empty if none was computed before quantization.
    """

    kind: str
    sha256: str
    digests: Mapping[torch.dtype, str]

    @classmethod
    def read(cls, card: Mapping[str, Any], folder: Path) -> "BaseRecord | None":
        """The record in a card; None if the card has no digests. Raises ValueError for a damaged record."""
        base = card.get("base") or {}
        try:
            if not base.keys() & {"kind", "sha256", "digests"}:
                return None
            stored = base.get("digests", {})
            digests = {dtype: str(stored[name]) for name, dtype in DTYPES.items() if name in stored}
            return cls(str(base["kind"]), str(base["sha256"]), digests)
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"{folder / CARD}: its entry for the base is damaged; download the folder again, {ANY_BASE_HINT}"
            ) from None

    def is_of(self, weights: BaseWeights) -> bool:
        """True if the adapter was trained on exactly these weights."""
        return weights.kind == self.kind and weights.sha256(None) == [self.sha256]

    def quantized_from(self, weights: BaseWeights) -> bool:
        """True if the recorded weights are the result of quantizing `weights`."""
        quantized, _, dtype = self.kind.rpartition(", ")
        if weights.dtype is None or dtype != str(weights.dtype) or not quantized or "torch." in quantized:
            return False
        return weights.sha256(weights.dtype) == [self.digests.get(weights.dtype)]


def read_base_record(card: Mapping[str, Any], folder: Path) -> BaseRecord | None:
    """The record in an adapter's card; warns and returns None if the card has no digests. Raises ValueError if the
    record is damaged.
    """
    record = BaseRecord.read(card, folder)
    if record is None:
        warnings.warn(
            f"{folder}: has no digests of its base's weights, so the base cannot be verified", stacklevel=2
        )
    return record


def check_base(weights: BaseWeights, record: BaseRecord, folder: Path) -> None:
    """Raise ValueError unless the weights, or the weights cast to one of the record's dtypes, match the record."""
    if record.is_of(weights):
        return
    comparable = [dtype for dtype in record.digests if weights.can_round_to(dtype)]
    if any(weights.sha256(dtype) == [record.digests[dtype]] for dtype in comparable):
        return
    if weights.kind != record.kind and not comparable:
        raise ValueError(
            f"{folder}: made for a base in {quote(record.kind)}, with which a base in {weights.kind} cannot be "
            f"compared; load the original base, neither cast nor quantized, {ANY_BASE_HINT}"
        )
    raise ValueError(
        f"{folder}: made for a different base, with SHA-256 {quote(record.sha256[:12])} instead of "
        f"{weights.sha256(None)[0][:12]!r}; load that base, {ANY_BASE_HINT}"
    )

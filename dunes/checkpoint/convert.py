"""Convert folders of any format to Hugging Face's format, and verify the result."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dunes.checkpoint.architecture import Architecture
from dunes.checkpoint.open import OpenedModel, open_model
from dunes.checkpoint.verify import Verification, verify
from dunes.checkpoint.weights.lazy_tensor import cast, hf_weights
from dunes.checkpoint.write import Edit, require_described, rewrite, special_ids, write_model
from dunes.files import json_file
from dunes.files.model_file import read_file
from dunes.models import FAMILIES, refusal, written_names
from dunes.models.names import fields
from dunes.progress import phase
from dunes.text import Tokenizer
from dunes.text.tokenizer import original_files

FOREIGN = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""Keys of a config.json that are not copied, since they refer to code or get new values."""
WRITTEN = 0.3
"""Progress (0 to 1) when the result is written, but not yet compared with the source."""


def convert(
    source: OpenedModel, out: Path, *, dtype: torch.dtype | None = None, facts: Mapping[str, Any] | None = None
) -> Verification:
    """Write the source's model as a new Hugging Face folder.

    Tensors are written one at a time into a temporary folder. The folder is read back and verified, then renamed
    to `out`. `facts` about the source go into the card. Raises ValueError, and writes nothing, if the source is
    incomplete, if `out` exists, or if the logits of source and result differ.
    """
    edit = partial(_converted, source, dtype, facts or {})
    return rewrite(source.folder, out, edit, phase("writing", 0.0, WRITTEN))


def _converted(source: OpenedModel, dtype: torch.dtype | None, facts: Mapping[str, Any]) -> Edit[Verification]:
    """The `Edit` for `rewrite`: the source's model with Hugging Face's names, cast to `dtype` if it is given."""
    weights, model = source.weights() if dtype is None else cast(source.weights(), dtype), source.architecture
    if not source.is_own and refusal(model.family, model.config):
        model = require_described(source.outline(), source.context_length, source.folder)
    tokenizer = Tokenizer.load_if_present(source.folder)
    rounded = dtype if any(w.dtype != dtype for w in source.files.values()) else None
    card = {"family": model.family, "context_length": source.config.context_length, "changes": []}
    card |= {k: v for k, v in source.card.items() if k not in ("files", "format", "dunes", "family")}
    converted = {"format": source.format, "notes": list(source.assumed), **facts}
    earlier = {"before": card["converted"]} if "converted" in card else {}

    def compare(staged: Path) -> tuple[Verification, Mapping[str, Any]]:
        for path in original_files(source.folder):  # tokenizer files of other libraries
            (staged / path.name).write_bytes(read_file(path))
        with phase("comparing", WRITTEN, 1.0):
            verified = verify(source, open_model(staged), rounded)
        return verified, {"converted": converted | {"verified": verified.card()} | earlier}

    write = partial(
        write_model,
        weights=hf_weights(written_names(model.family, model.config), weights),
        config=special_ids(tokenizer) | _hf_config(source, model, dtype),
        card=card,
        tokenizer=(tokenizer, source.config.context_length),
    )
    return write, compare


def _hf_config(source: OpenedModel, model: Architecture, dtype: torch.dtype | None) -> dict[str, Any]:
    """The content of the config.json to write: the family's keys, and the source's other keys except FOREIGN."""
    dtypes = [w.dtype for w in source.files.values()]
    name = str(dtype or max(set(dtypes), key=dtypes.count)).removeprefix("torch.")
    others = {k: v for k, v in source.hf_config.items() if k not in FOREIGN}
    known: dict[str, Any] = FAMILIES[model.family].to_hf(model.config)
    return others | known | {"dtype": name, "torch_dtype": name}


def read_name_table(path: Path) -> dict[str, str]:
    """Read a JSON file that maps a model's tensor names to Hugging Face's; `{i}` stands for an index in both
    names.
    """
    content = json_file.read(path.resolve())  # follows symbolic links, since the user chose the path
    if wrong := [k for k, v in content.items() if not isinstance(v, str)]:
        raise ValueError(f"{path}: the value of {wrong[0]!r} must be a name in quotes")
    if wrong := [k for k, v in content.items() if fields(v) - fields(k)]:
        raise ValueError(f"{path}: {content[wrong[0]]!r} has a field in braces that {wrong[0]!r} lacks")
    return content

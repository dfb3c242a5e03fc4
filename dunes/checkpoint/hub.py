"""Models of the Hugging Face Hub: their names, and the files to download.

These are weights in one format only, and never code. `dunes.files.hub_cache` downloads them.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from dunes.checkpoint.wheel import MODELS
from dunes.files import hub_cache
from dunes.units import plural

BESIDE = (
    r"(config|generation_config|params|special_tokens_map|tekken|dunes|tokenizer\w*)\.json"
    r"|tokenizer\.model(\.v\w+)?|chat_template\.jinja"
)
# Patterns of weights' file names, the preferred first (safetensors before pickles), and the index of the shards.
FORMS = {
    r"model\.safetensors": None,
    r"model-[\w-]+\.safetensors": "model.safetensors.index.json",
    r"consolidated\.safetensors": None,
    r"consolidated-[\w-]+\.safetensors": "consolidated.safetensors.index.json",
    r"consolidated\.\d+\.pth": None,
    r"pytorch_model\.bin": None,
    r"pytorch_model-[\w-]+\.bin": "pytorch_model.bin.index.json",
}


def parse_name(model: str, revision: str | None) -> tuple[str, str]:
    """Repository and revision from a model's name. Raises ValueError for names that the Hub does not permit."""
    name, separator, suffix = model.partition("@")
    if not hub_cache.NAME.fullmatch(name):
        raise ValueError(
            f"{model}: no such folder; pass a model folder, a Hugging Face model (org/name[@revision]), or "
            f"{', '.join(MODELS)}"
        )
    if separator and revision and suffix != revision:
        raise ValueError(f"{model}: revision {revision!r} is given, too; pass only one")
    return name, hub_cache.check_revision(name, suffix if separator else revision or "main")


def download(name: str, revision: str) -> tuple[Path, str]:
    """Download the missing files of a revision; returns the revision's folder in the cache, and its commit."""
    commit, files, _ = hub_cache.resolve(f"models/{name}", revision)
    return hub_cache.download(f"models/{name}", revision, commit, select_files(files, name)), commit


def select_files(files: Mapping[str, int], name: str) -> dict[str, int]:
    """Files to download, with weights in one format only. Raises ValueError if there are no weights."""
    for weights, index in FORMS.items():
        if any(re.fullmatch(weights, file) for file in files):
            names = f"{BESIDE}|{weights}"
            return {file: size for file, size in files.items() if re.fullmatch(names, file) or file == index}
    raise ValueError(
        f"{name}: no weights in a supported format (model*.safetensors, consolidated*.safetensors, "
        f"consolidated.*.pth or pytorch_model*.bin) among its {plural(len(files), 'file')}; choose another model"
    )

"""What a server says of its models."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from dunes import __version__
from dunes.checkpoint import LoadedModel
from dunes.runs.run import read_config
from dunes.runs.train_config import TrainConfig
from dunes.serve import ollama
from dunes.serve.asked import REFERENCE
from dunes.serve.llama_cpp import settings

Facts = Mapping[str, Any]
Named = Sequence[tuple[str, Facts]]
"""The names of models and of their adapters, with their facts."""


def describe_model(folder: Path, stamp: Sequence[int], loaded: LoadedModel | None) -> Facts:
    """The facts of a model that was written at these times; most of one in training are zero."""
    written = max(stamp) / 1e9
    facts: dict[str, Any] = {
        "modified_at": datetime.fromtimestamp(written, UTC).isoformat().replace("+00:00", "Z"),
        "digest": sha256(repr((str(folder), stamp)).encode()).hexdigest(),
        "created": int(written),
        "family": "dunes",
        "folder": str(folder),
    }
    facts |= dict.fromkeys(("parameters", "size", "context_length", "vocab", "dim"), 0)
    facts |= dict.fromkeys(("dtype", "bos", "eos"), "")
    if loaded is None:
        config = read_config(folder, TrainConfig)
        return facts | {"context_length": config.context_length if config else 0}
    tokenizer, parameters = loaded.require_tokenizer(), [*loaded.model.parameters()]
    return facts | {
        "family": str(loaded.card.get("family") or "dunes"),
        "parameters": sum(p.numel() for p in parameters),
        "size": sum(p.numel() * p.element_size() for p in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "context_length": loaded.context_length,
        "vocab": tokenizer.vocab,
        "dim": parameters[0].shape[-1],
        "eos": tokenizer.inner.id_to_token(tokenizer.eos) or "",
        "bos": "".join(tokenizer.inner.id_to_token(i) or "" for i in tokenizer.bos),
    }


def health(models: Named) -> dict[str, Any]:
    """The reference server's /health, with what Tabby's clients read."""
    version = dict.fromkeys(("build_date", "build_timestamp", "git_sha", "git_describe"), "")
    device = {"device": "cpu", "arch": "", "cpu_info": "", "cpu_count": 1, "cuda_devices": []}
    return {"status": "ok", "model": models[0][0], **device, "version": version}


def list_models(models: Named) -> dict[str, Any]:
    """OpenAI's /v1/models, with what clients of Ollama read."""
    return {"object": "list", "data": [_entry(*model) for model in models], **ollama.tags(models)}


def _entry(name: str, facts: Facts) -> dict[str, Any]:
    meta = {"vocab_type": 2, "n_vocab": facts["vocab"], "n_ctx": facts["context_length"]}
    meta |= {"n_ctx_train": facts["context_length"], "n_embd": facts["dim"], "n_params": facts["parameters"]}
    meta |= {"size": facts["size"], "ftype": facts["dtype"]}
    return {
        "id": name,
        "aliases": [name],
        "tags": [],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": facts["created"],
        "owned_by": "dunes",
        "meta": meta,
    }


def props(models: Named) -> dict[str, Any]:
    """The reference server's /props; llama.vscode reads the context length."""
    name, facts = models[0]
    known: dict[str, Any] = REFERENCE["props"]
    return known | {
        "default_generation_settings": {"params": settings(None), "n_ctx": facts["context_length"]},
        "model_alias": name,
        "model_ftype": facts["dtype"],
        "model_path": facts["folder"],
        "bos_token": facts["bos"],
        "eos_token": facts["eos"],
        "build_info": f"dunes-{__version__}",
    }


def slots(models: Named) -> list[dict[str, Any]]:
    """The reference server's /slots: one, which is free between two requests."""
    return [REFERENCE["slot"] | {"n_ctx": models[0][1]["context_length"], "params": settings(None)}]

"""What a server says of its models."""

from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from dunes import __version__
from dunes.serve.asked import REFERENCE
from dunes.serve.llama_cpp import settings
from dunes.serve.served import ServedModel


def describe_model(model: ServedModel) -> dict[str, Any]:
    """The facts of a model; those of one in training are zero."""
    written = max(model.now.stamp) / 1e9
    changed = datetime.fromtimestamp(written, UTC).isoformat().replace("+00:00", "Z")
    digest = sha256(repr((str(model.folder), model.now.stamp)).encode()).hexdigest()
    facts = {
        "modified_at": changed,
        "digest": digest,
        "created": int(written),
        "family": "dunes",
    }
    facts |= {"parameters": 0, "size": 0, "context_length": 0, "vocab": 0, "dim": 0, "dtype": ""}
    facts |= {"bos": "", "eos": "", "folder": str(model.folder)}
    if (loaded := model.now.loaded) is None:
        return facts
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


def model_entry(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    """A model in /v1/models."""
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


def props(model: ServedModel, facts: dict[str, Any]) -> dict[str, Any]:
    """The reference server's /props; llama.vscode reads the context length."""
    known: dict[str, Any] = REFERENCE["props"]
    return known | {
        "default_generation_settings": {"params": settings(None), "n_ctx": facts["context_length"]},
        "model_alias": model.name,
        "model_ftype": facts["dtype"],
        "model_path": facts["folder"],
        "bos_token": facts["bos"],
        "eos_token": facts["eos"],
        "build_info": f"dunes-{__version__}",
    }


def slots(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The reference server's /slots: one, which is free between two requests."""
    return [REFERENCE["slot"] | {"n_ctx": facts["context_length"], "params": settings(None)}]

"""Save a model as a Hugging Face model folder with a card, `dunes.json`; write an edited model to a new folder."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import nn

from dunes import tree
from dunes.augment import lora
from dunes.augment.prune import masked_places
from dunes.checkpoint import architecture as architectures
from dunes.checkpoint.architecture import Architecture, hf_config_of
from dunes.checkpoint.card import CARD, CONFIG, exclusive_folder, require_new_folder, write_card, write_files
from dunes.checkpoint.weights.lazy_tensor import LazyTensor, Weights, hf_weights, in_memory, track_reads
from dunes.checkpoint.weights.safetensors_file import write_tensors
from dunes.models import FAMILIES, written_names
from dunes.parts import Decoder
from dunes.progress import advance
from dunes.text import Tokenizer
from dunes.text.tokenizer import SPLIT_RULE
from dunes.units import plural

SPECIAL_TOKENS = ("bos", "eos", "pad")
MASKED = "masked"
"""The card's key for the names of pruned layers, whose zeros stay zero in training."""
NOT_INHERITED = (
    *("files", "format", "dunes", "adapter", "base", "family", "config", "structure", "changes", "history"),
    MASKED,
)
"""Keys of a card that are not copied to the card of a changed model."""
Check = Callable[[Path], Mapping[str, Any]]
T = TypeVar("T")
Edit: TypeAlias = tuple[Callable[..., None], Callable[[Path], tuple[T, Mapping[str, Any]]]]
"""Two functions for an edited model. The first function writes it: `save` or `write_model`, with all arguments
bound except `folder` and `check`. The second function compares the temporary folder with the model, and returns a
report and entries for the card.
"""


def save(
    model: nn.Module,
    folder: Path | str,
    tokenizer: Tokenizer | None = None,
    context_length: int | None = None,
    facts: Mapping[str, Any] | None = None,
    check: Check = lambda staged: {},
    *,
    architecture: Architecture | None = None,
) -> None:
    """Write the model as a folder that Hugging Face's tools open; `facts` go into the card.

    A model that no family describes is saved in dunes' own format with its `architecture`; raises ValueError if
    this builds another structure. `architecture` is `Architecture.of_function(build, **arguments)` for a function
    that builds the model, or a loaded model's architecture with later changes appended. `load` needs this function
    again, as an argument or imported by the name in the card.

    A network that is no language model has no tokenizer and no context length. Save such a network with
    `save(network, folder, architecture=...)`, and load the folder with `load_network`.

    The save is atomic. Files are written into a temporary folder, and the complete folder is renamed to `.ready`.
    Then the files are renamed into place one by one; after an interruption, the next load or save continues.
    `check` is called with the temporary folder and may raise; its result is added to the card. Raises ValueError
    if no family describes the model and `architecture` is None. Also raises ValueError for a tokenizer with more
    ids than the embedding has rows, and for a context length below 1.
    """
    model, folder = tree.uncompiled(model), Path(folder)
    if isinstance(model, Decoder) if context_length is None else context_length < 1:
        raise ValueError(f"context_length is {context_length}; expected 1 or more tokens")
    reason = f"{type(model).__name__} has no context length"
    described = reason if context_length is None else hf_config_of(model, context_length)
    if architecture is None and context_length is not None and isinstance(described, str):
        own = hf_config_of(model, context_length, loads=False)
        architecture = own if isinstance(own, Architecture) else None
    facts = {key: value for key, value in (facts or {}).items() if key != MASKED}
    facts |= {MASKED: masked} if (masked := masked_places(model)) else {}
    if isinstance(described, Architecture):
        known, settings, weights = hf_parts(model, described)
        if tokenizer is not None and tokenizer.vocab > (rows := described.config.vocab):
            ids = plural(tokenizer.vocab, "id")
            raise ValueError(f"the tokenizer has {ids}, the embedding {plural(rows, 'row')}; each id needs a row")
        changes = () if architecture is None else architecture.changes
        facts["changes"] = [*facts.get("changes", []), *(change.record() for change in changes)]
    elif architecture is not None:
        (known, weights), settings = architectures.describe(model, architecture), {}
        facts |= {"adapter": lora.active_adapter(model), "history": facts.get("changes", [])}
    else:
        raise ValueError(
            f"no family describes this model: {described}; save it with its architecture: after changes to a "
            "loaded model, replace(loaded.architecture, changes=(*loaded.architecture.changes, change)); for a "
            "function that builds it, Architecture.of_function(build), then checkpoint.load(folder, build=build)"
        )
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.") if weights else None
    config = settings | special_ids(tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    # `known` and `length` come first to be first in the file, and again last so that `facts` cannot override them.
    length = {} if context_length is None else {"context_length": context_length}
    card = {**known, **length, "changes": [], **facts, **length, **known}
    write_model(folder, weights, config, card, (tokenizer, context_length), check)


def save_weights(model: nn.Module, folder: Path | str, facts: Mapping[str, Any] | None = None) -> None:
    """Write the parameters and persistent buffers of any network to a folder, with a card.

    The card has `facts`, and digests of the files and of the network's structure. Raises ValueError for lazy
    parameters without a shape, for tensors on the meta device, and for dtypes that safetensors does not support.
    """
    known, weights = architectures.describe(tree.uncompiled(model))
    write_model(Path(folder), weights, None, {**(facts or {}), **known})


def write_model(
    folder: Path,
    weights: Weights,
    config: Mapping[str, Any] | None,
    card: Mapping[str, Any],
    tokenizer: tuple[Tokenizer | None, int | None] = (None, None),
    check: Check = lambda staged: {},
) -> None:
    """Write a model folder atomically; `tokenizer` is a pair of a tokenizer and the context length.

    The result of `check` for the temporary folder is added to the card; if `check` raises, nothing is written.
    """
    size = sum(w.nbytes for w in weights.values())

    def fill(staged: Path) -> None:
        write_tensors(staged, track_reads(weights, advance(size)))
        write_tokenizer(staged, *tokenizer)
        if config is not None:
            (staged / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (staged / CARD).write_text(json.dumps({"files": {}, **card}))  # `check` may load the folder
        write_card(staged, {**card, **check(staged)})

    write_files(folder, fill, size)


def inherited(card: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a card that stay true for a changed model."""
    return {key: value for key, value in card.items() if key not in NOT_INHERITED}


def require_described(model: nn.Module, context_length: int, folder: Path, reader: str = "") -> Architecture:
    """Family and config that describe a model. Raises ValueError, naming `folder` and the `reader` of the result,
    if no Hugging Face config describes it.
    """
    if isinstance(described := hf_config_of(model, context_length, loads=not reader), str):
        refusal = f"{reader} does not know" if reader else "no Hugging Face config describes"
        raise ValueError(f"{folder}: {refusal} this model: {described}")
    return described


def hf_parts(
    model: nn.Module, described: Architecture
) -> tuple[dict[str, Any], dict[str, Any], dict[str, LazyTensor]]:
    """Card entries, config.json, and tensors by Hugging Face's names, for a model of a family."""
    family, config = described.family, described.config
    weights = hf_weights(written_names(family, config), in_memory(model.state_dict()))
    return {"family": family}, FAMILIES[family].to_hf(config), weights


def special_ids(tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Special token ids for config.json; {} without a tokenizer."""
    if tokenizer is None:
        return {}
    names = tokenizer.special_tokens_map
    return {
        f"{n}_token_id": tokenizer.token_id(names[k]) if (k := f"{n}_token") in names else None
        for n in SPECIAL_TOKENS
    }


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None, context_length: int | None) -> None:
    """Write a tokenizer, if any, and its config files."""
    if tokenizer is None:
        return
    tokenizer.save(folder)
    names = tokenizer.special_tokens_map
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    settings |= {SPLIT_RULE: tokenizer.split_rule} if tokenizer.split_rule else {}
    configs: dict[str, dict[str, Any]] = {
        "generation_config.json": {k: v for k, v in special_ids(tokenizer).items() if v is not None},
        "tokenizer_config.json": names | settings | {"clean_up_tokenization_spaces": False},
        "special_tokens_map.json": names,
    }
    for name, content in configs.items():
        if name not in tokenizer.extra_files:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def rewrite(
    source: Path, out: Path, edit: Callable[[], Edit[T]], writing: AbstractContextManager[Any] | None = None
) -> T:
    """Edit the model in `source`, write it to the new folder `out`, compare both, and return the report.

    Inside the context `writing`, the result is written into a temporary folder, read back and compared, and
    renamed into place. Raises ValueError, before any work, if `out` exists or another process writes to it.
    """
    require_new_folder(source, out)
    reports: list[T] = []
    with exclusive_folder(out):
        require_new_folder(source, out)  # another process may have written `out` before the lock
        write, compare = edit()

        def check(staged: Path) -> Mapping[str, Any]:
            report, entries = compare(staged)
            reports.append(report)
            return entries

        with writing or nullcontext():
            write(folder=out, check=check)
    return reports[0]

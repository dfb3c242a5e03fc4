"""`FolderCompleter` completes lines with a folder's model; `CopyCompleter` and `CopyNearest` only copy."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from dunes import checkpoint, measure
from dunes.checkpoint import LoadedModel
from dunes.checkpoint.card import ADAPTER, CONFIG, finish_save, read_card
from dunes.checkpoint.formats.adapter import is_reference
from dunes.checkpoint.open import round_for_speed
from dunes.checkpoint.trained_text import require_own_sources, split_documents, trained_text
from dunes.completion import Cancelled, Suggestion
from dunes.completion.copy_gate import read_gate
from dunes.completion.engine import CompletionEngine, knows_paths
from dunes.completion.index import TextIndex, read_index, read_sources
from dunes.completion.keystrokes import ACCEPTANCE
from dunes.completion.names import Place, newest
from dunes.completion.search import DEFAULTS, LIMIT, CompleteOptions
from dunes.completion.text import first_line, line_start, near_text, without_overlap
from dunes.data import Document, header_name
from dunes.data.document import NamedText, document_texts
from dunes.data.duplicates import content_digest
from dunes.data.files import source_roots
from dunes.flags import HUB
from dunes.generate.context_index import ContextIndex
from dunes.generate.copying import TextSource, longest_match
from dunes.generate.decode_packages import step_source
from dunes.progress import advance

LONGEST = 128
"""At most this many bytes before the cursor are searched for."""
FILTERED = 4
"""Number of copies of the index, each without certain files, that a `CopyCompleter` caches."""
_REST_OF_LINE = re.compile(rb"[^\0\r\n]*")
T = TypeVar("T")


class FolderCompleter(CompletionEngine):
    """The completer of a model folder. The evaluation also gets the training files and test documents from it."""

    def __init__(self, folder: Path, any_base: bool = False, loaded: LoadedModel | None = None) -> None:
        loaded = loaded or round_for_speed(checkpoint.load_with_tokenizer(folder, measure.device(), any_base))
        index, fitted = read_index(folder), read_gate(folder)
        self.folder, self.facts = folder, fitted[1] if fitted else {}
        gate = fitted[0] if fitted and index else None
        self.copies = index is not None and (gate is None or bool(self.facts.get("copies")))
        budget = self.facts.get("prompt_tokens")
        super().__init__(loaded, index, gate, knows_paths(loaded), step_source(loaded.model), budget)

    def alternatives(
        self, before: str, after: str = "", name: str = "", options: CompleteOptions = DEFAULTS
    ) -> list[Suggestion]:
        """The most probable suggestions. Only the copied line is returned if the folder has an index and no gate,
        or if training chose to copy without the model (`fit.choose_copies`). Raises Cancelled once
        `options.cancelled()` is true."""
        if not self.copies:
            return super().alternatives(before, after, name, options)
        opened, far = newest(self._open.texts, name, options), self.far(name, options.files)
        return [_copy_line(far, opened, before, after, options, self.shorten)]

    @cached_property
    def training_files(self) -> list[tuple[str, str]]:
        """The name and text of each file in the index."""
        return self.index.texts() if self.index else []

    def threshold(self, acceptance: float = ACCEPTANCE) -> float:
        """Minimum probability of the first word of a shown suggestion, so that users accept about the share
        `acceptance`.

        The result is the lowest of the thresholds that were fitted for this or a larger share. Without fitted
        thresholds, the result is 0. If all thresholds were fitted for lower shares, the result is 2 (show
        nothing).
        """
        pairs = self.facts.get("thresholds", {}).get("word", ())
        return min((threshold for share, threshold in pairs if share >= acceptance), default=2.0 if pairs else 0.0)

    def seen_digests(self) -> set[bytes] | None:
        """Digests of all training and validation texts; None if the training text is unknown."""
        with suppress(ValueError, OSError):
            corpus = split_documents(self.loaded.card)
            return {content_digest([text]) for _, text in document_texts([*corpus.train, *corpus.valid])}
        return None

    def test_documents(self) -> list[Document]:
        """The files of the test split. Raises ValueError if the split has no files."""
        if documents := split_documents(self.loaded.card).test:
            return documents
        raise ValueError(f"{self.folder}: its training left no files for a test; pass files to complete")


class CopyCompleter:
    """Copies from the current file, open files and an index, for a run that has no model yet."""

    def __init__(self, index: TextIndex) -> None:
        self.index, self._open = index, dict[str, str | None]()
        self._without = lru_cache(FILTERED)(index.without)

    @property
    def training_files(self) -> list[tuple[str, str]]:
        """The name and text of each file in the index."""
        return self.index.texts()

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line, copied after the longest match. The indexed text of the file `name` is not
        searched."""
        return self.alternatives(before, after, name)[0]

    def alternatives(
        self, before: str, after: str = "", name: str = "", options: CompleteOptions = DEFAULTS
    ) -> list[Suggestion]:
        """A list with one suggestion, cut at a stop string. Raises Cancelled once `options.cancelled()` is
        true."""
        opened = newest(self._open, name, options)
        sources = [TextSource(text.encode(errors="replace")) for text in reversed(opened)]
        far = [self._without(self.index.names & {name, *self._open}), *sources]
        shorten = lambda text, tokens: text[: 4 * (tokens or LIMIT)]  # an estimate
        return [_copy_line(far, opened, before, after, options, shorten)]

    def with_texts(self, texts: Mapping[str, str | None]) -> Mapping[str, str | None]:
        """Return the texts unchanged, to pass to `use`."""
        return texts

    def use(self, files: Mapping[str, str | None]) -> None:
        """From now on, also copy from `files`, which maps names to texts (None: deleted)."""
        self._open = {**{n: t for n, t in self._open.items() if n not in files}, **files}  # newest last

    def threshold(self, acceptance: float = ACCEPTANCE) -> float:
        """Minimum probability of a shown copy; a match of 32 bytes has this probability."""
        return 0.5


def _copy_line(
    far: Sequence[TextSource],
    opened: Sequence[str],
    before: str,
    after: str,
    options: CompleteOptions,
    shorten: Callable[[str, int | None], str],
) -> Suggestion:
    """The copied line, cut at a stop string, and to the maximum number of tokens by `shorten`. Raises Cancelled
    once `options.cancelled()` is true."""
    if options.cancelled():
        raise Cancelled("a newer request came")
    near, copier = near_text(before), CopyNearest(far)
    place = Place(near, after, opened, far, lambda text: [copier.complete(near + text, after)])
    return replace(options.limit(place.suggestions()[0], shorten), source="copies")


def name_in_sources(path: Path, folder: Path) -> str:
    """The file's name in training: the path relative to the source that contains the file."""
    for source in training_sources(folder, of_anyone=True)[0]:
        with suppress(OSError, ValueError, RuntimeError):  # another user's path may be invalid
            for root in map(Path.resolve, source_roots(source)):
                if path.resolve().is_relative_to(root) and root.is_dir():
                    return header_name(path.resolve().relative_to(root).as_posix())
    return header_name(path.name)


def training_sources(folder: Path, of_anyone: bool = False) -> tuple[Sequence[str], bool]:
    """The training sources of a model or run, and True if links in them were followed. Another user's sources are
    returned only with `of_anyone`."""
    with suppress(ValueError):  # a damaged record, or sources of another user
        trained = trained_text(read_card(folder) or {"trained": read_sources(folder)})
        if trained and not of_anyone:
            require_own_sources(trained)
        sources = trained.get("sources", ())  # data sets have no files to edit, and may need the network
        return tuple(s for s in sources if not s.startswith(HUB)), bool(trained.get("follow_links"))
    return (), False


def model_or_copies(folder: Path, line: Callable[[str], object], load: Callable[[], T]) -> T | CopyCompleter:
    """The result of `load()`, or a `CopyCompleter` if a run has no model yet or its base model cannot be loaded.

    If a `CopyCompleter` is returned, `line` is called with the reason.
    """
    has_model, why = any((finish_save(folder) / name).exists() for name in (CONFIG, ADAPTER)), ""
    try:
        if has_model or (index := read_index(folder)) is None:
            return load()
        why = "the model is still in training"
    except (ValueError, OSError) as error:
        if not (has_model and is_reference(read_card(folder)) and (index := read_index(folder))):
            raise
        why = " ".join(str(error).split())
    line(f"{why}; copying from the training files alone")
    return CopyCompleter(index)


def find_completer(
    folder: Path, line: Callable[[str], object], any_base: bool = False, loaded: LoadedModel | None = None
) -> FolderCompleter | CopyCompleter:
    """The completer of a model folder or run, chosen by `model_or_copies`.

    `line` is called with a note if the completer only copies.
    """
    completer = model_or_copies(folder, line, lambda: FolderCompleter(folder, any_base, loaded))
    if isinstance(completer, FolderCompleter) and completer.copies:
        why = completer.facts.get("verdict", "worse than copying") if completer.gate else "it has no gate (yet)"
        line(f"the model does not complete lines ({why}); copying from the training files alone")
    return completer


class CopyNearest:
    """Copies the text that follows the longest match (at most 128 bytes) of the text before the cursor.

    This text is searched for in `far`, and in the file above and below the cursor. Among equally long matches,
    matches in the file precede matches in `far`, and later matches in a text precede earlier ones. A suggestion's
    probability is no estimate; it only grows with the length of the match.
    """

    def __init__(self, far: Sequence[TextSource]) -> None:
        self._far = far

    @classmethod
    def of_files(cls, files: Sequence[NamedText]) -> "CopyNearest":
        """A completer that copies from these files."""
        data = b"".join(text.encode(errors="replace") + b"\0" for _, text in files)
        items = np.frombuffer(data, np.uint8)
        return cls([TextSource(data, ContextIndex(items, depth=LONGEST, progress=advance(1)))])

    def complete(self, before: str, after: str = "", name: str = "") -> Suggestion:
        """The rest of the line after the match; empty if nothing matches."""
        above = before.encode(errors="replace")
        sources = TextSource(above), TextSource(after.encode(errors="replace")), *self._far
        length, positions, text = longest_match(sources, above[-LONGEST:])
        line = _REST_OF_LINE.match(text, positions[0]) if length else None
        typed = before[line_start(before) :] if first_line(after).strip() else ""
        rest = without_overlap(line[0].decode(errors="ignore"), after, typed) if line else ""
        return Suggestion(rest, length / (length + 32), length / (length + 32))

"""Which files are source code, by the suffixes of their names."""

from collections.abc import Iterable

from dunes.data.document import Document

CODE_SUFFIXES = frozenset((
    ".ada", ".adb", ".ads", ".agda", ".asm", ".bash", ".bat", ".c", ".cc", ".clj", ".cljs", ".cmake",
    ".coffee", ".cpp", ".cs", ".css", ".cu", ".cuh", ".cxx", ".d", ".dart", ".el", ".elm", ".erl", ".ex",
    ".exs", ".f", ".f90", ".fish", ".fs", ".glsl", ".go", ".gradle", ".groovy", ".h", ".hh", ".hpp", ".hs",
    ".hxx", ".java", ".jl", ".js", ".jsx", ".kt", ".kts", ".lean", ".lisp", ".lua", ".m", ".metal", ".mjs",
    ".ml", ".mli", ".mm", ".nim", ".nix", ".pas", ".php", ".pl", ".pm", ".proto", ".ps1", ".purs", ".py",
    ".pyi", ".pyx", ".r", ".rb", ".rkt", ".rs", ".s", ".scala", ".scm", ".scss", ".sh", ".sol", ".sql",
    ".sv", ".svelte", ".swift", ".tcl", ".tf", ".ts", ".tsx", ".v", ".vb", ".vhd", ".vim", ".vue", ".wgsl",
    ".zig", ".zsh",
))  # fmt: skip
"""Suffixes of files in programming languages, in lower case; prose and data (.md, .html, .json) are none."""


def code_fraction(documents: Iterable[Document]) -> float:
    """The fraction of the documents' bytes that are source code, in [0, 1]."""
    sizes = [(d.path.suffix.lower() in CODE_SUFFIXES, d.size) for d in documents]
    return sum(size for is_code, size in sizes if is_code) / max(1, sum(size for _, size in sizes))

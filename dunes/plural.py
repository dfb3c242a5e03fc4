"""Counts in sentences."""


def plural(count: float, noun: str, nouns: str = "") -> str:
    """The count with its noun: "1 file", "2 files", "1.5 minutes"; `nouns` where that is not noun + s."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else nouns or noun + 's'}"

"""Counts in sentences."""


def plural(count: int, noun: str, nouns: str = "") -> str:
    """The count with the noun in the number it takes: "1 file", "2 files"; `nouns` if that is not noun + s."""
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"

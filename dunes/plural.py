"""Counts and sizes in sentences."""


def plural(count: float, noun: str, nouns: str = "") -> str:
    """The count with its noun: "1 file", "2 files", "1.5 minutes"; `nouns` where that is not noun + s."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else nouns or noun + 's'}"


def byte_size(count: float) -> str:
    """1.2 GB, 34 MB, 56 kB."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    scale, unit = next((u for u in units if abs(count) >= 0.9995 * u[0]), (1.0, "B"))
    return f"{count / scale:.3g} {unit}"

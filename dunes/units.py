"""Format counts with nouns; format bytes, counts and seconds with three significant digits and a unit."""

SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, ""))
TIMES = ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"), (1e-9, " ns"))


def plural(count: float, noun: str, nouns: str = "") -> str:
    """The count with its noun, like "1 file", "2 files", "1.5 minutes"; `nouns` is the plural if irregular."""
    number = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{number} {noun if count == 1 else nouns or noun + 's'}"


def format_bytes(size: float) -> str:
    """A number of bytes as text, like "1.2 GB", "34 MB" or "567 B"."""
    return _scale(size, SIZES, " ")


def format_count(count: float) -> str:
    """A count as text, like "12.3M", "4.1k" or "87"."""
    return _scale(count, COUNTS)


def format_seconds(seconds: float) -> str:
    """A duration as text: "2:03:09" or "1:05" for one minute or more, "1.23 s" or "45.6 ms" for less."""
    if seconds < 59.95:
        return _scale(seconds, TIMES)
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def _scale(number: float, units: tuple[tuple[float, str], ...], space: str = "") -> str:
    """The number as text, in the largest unit in which the rounded number is at least 1."""
    scale, unit = next((u for u in units if abs(number) >= 0.9995 * u[0] or (not number and u[0] == 1)), units[-1])
    return f"{number / scale:.3g}{space}{unit}"

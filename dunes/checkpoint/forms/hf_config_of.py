"""The Hugging Face config of a built model, derived from its modules alone."""

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from dunes.checkpoint.forms.architecture import Architecture, module_rows
from dunes.models import FAMILIES
from dunes.models.meta import build_on_meta
from dunes.units import plural


def hf_config_of(model: nn.Module, context_length: int) -> Architecture | str:
    """The family and config that build exactly this model, or the first difference from the closest one."""
    reasons: dict[str, tuple[int, str]] = {}
    for family, module in FAMILIES.items():
        try:
            hf = module.to_hf(module.read(model, context_length))
            config = module.from_hf(hf)  # some fields of a Config have no key in the family's config.json
            rebuilt = build_on_meta(family, config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            reasons[family] = 0, _unread(model, error)
            continue
        if (difference := _first_difference(model, rebuilt)) is None:
            return Architecture(family, config)
        reasons[family] = difference
    equal_rows = max(rows for rows, _ in reasons.values())
    closest = {reason: family for family, (rows, reason) in reasons.items() if rows == equal_rows}
    (reason, families), *_ = Counter(r for rows, r in reasons.values() if rows == equal_rows).most_common(1)
    return reason if families > 1 else f"not {closest[reason]}: {reason}"


def _unread(model: nn.Module, error: Exception) -> str:
    """Why a family's `read` ended with an error: the part that it does not know, by its place and class."""
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    lacking = re.match(r"'(\w+)' object has no attribute", str(error))
    parts = ((place, type(part)) for place, part in _parts(model))
    place, kind = next(((p, k) for p, k in parts if lacking and k.__name__ == lacking[1]), ("", type(model)))
    known = kind.__module__.partition(".")[0] == "dunes"
    reason = "which the family does not have there" if known else "which no Hugging Face config describes"
    return f"{place or 'the model'} is {kind.__name__}, {reason}"


def _parts(model: nn.Module) -> Iterator[tuple[str, object]]:
    """The modules and what they hold that is none, such as a position, by their places."""
    for place, module in model.named_modules():
        yield place, module
        yield from ((f"{place}.{name}".strip("."), part) for name, part in vars(module).items() if name[0] != "_")


def _first_difference(model: nn.Module, rebuilt: nn.Module) -> tuple[int, str] | None:
    """The number of equal modules before the first that differs, and the difference."""
    actual, expected = list(module_rows(model)), list(module_rows(rebuilt))
    for i, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a.place != b.place:
            return i, f"it has a module {a.place} before {b.place}"
        if a != b:
            changed, original = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
            return i, f"{a.place or 'the model'} is {changed}, not {original}"
    n, m = len(actual), len(expected)
    return None if n == m else (min(n, m), f"{plural(n, 'module')}, not {m}")

"""The Hugging Face config of a built model, derived from its modules alone."""

from torch import nn

from dunes.checkpoint.forms.architecture import Architecture, module_rows
from dunes.models import FAMILIES
from dunes.models.meta import build_on_meta
from dunes.units import plural


def hf_config_of(model: nn.Module, context_length: int) -> Architecture | str:
    """The family and config that build exactly this model, or the first difference from the closest one."""
    reasons = [(-1, "it is not a stack of attention blocks")]
    for family, module in FAMILIES.items():
        try:
            hf = module.to_hf(module.read(model, context_length))
            config = module.from_hf(hf)  # some fields of a Config have no key in the family's config.json
            rebuilt = build_on_meta(family, config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            reasons.append((0, f"not {family}: {' '.join(str(error).split())}"))
            continue
        if (difference := _first_difference(model, rebuilt)) is None:
            return Architecture(family, config)
        equal_rows, reason = difference
        reasons.append((equal_rows, f"not {family}: {reason}"))
    return max(reasons, key=lambda reason: reason[0])[1]


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

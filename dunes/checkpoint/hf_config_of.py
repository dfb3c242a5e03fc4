"""The Hugging Face config of a built model, derived from its modules alone."""

from collections import Counter
from dataclasses import replace

from torch import nn

from dunes.checkpoint.architecture import Architecture
from dunes.models import FAMILIES, build_on_meta
from dunes.tree.summary import ModuleRow, module_rows
from dunes.units import plural


def hf_config_of(model: nn.Module, context_length: int) -> Architecture | str:
    """The family and config that build exactly this model, or the first difference from the closest family."""
    reasons: dict[str, tuple[bool, int, str]] = {}  # the family reads the model; equal modules; difference
    for family, module in FAMILIES.items():
        try:
            hf = module.to_hf(module.read(model, context_length))
            config = module.from_hf(hf)  # some fields of a Config have no key in the family's config.json
            rebuilt = build_on_meta(family, config)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            reasons[family] = False, *_first_other_part(model, family, error)
            continue
        if (difference := _first_difference(model, rebuilt)) is None:
            return Architecture(family, config)
        reasons[family] = True, *difference
    most = max(reason[:2] for reason in reasons.values())
    closest = {reason: family for family, (*rank, reason) in reasons.items() if tuple(rank) == most}
    (reason, families), *_ = Counter(r for *rank, r in reasons.values() if tuple(rank) == most).most_common(1)
    return reason if families > 1 else f"not {closest[reason]}: {reason}"


def _first_difference(model: nn.Module, rebuilt: nn.Module) -> tuple[int, str] | None:
    """Number of equal modules before the first difference, and the difference; None if all are equal."""
    actual, expected = list(module_rows(model)), list(module_rows(rebuilt))
    for i, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a.place != b.place:
            return i, f"it has a module {a.place} before {b.place}"
        if a != b:
            return i, f"{a.place or 'the model'} {_difference(a, b)}"
    n, m = len(actual), len(expected)
    return None if n == m else (min(n, m), f"{plural(n, 'module')}, not {m}")


def _difference(a: ModuleRow, b: ModuleRow) -> str:
    """Text on the first difference of two modules: the class, a setting or a tensor."""
    if a.class_name != b.class_name:
        return f"is {a.class_name}, not {b.class_name}"
    actual, expected = {**a.attributes, **a.tensors}, {**b.attributes, **b.tensors}
    key = next(key for key in {**actual, **expected} if actual.get(key) != expected.get(key))
    return f"has {key} {actual.get(key, 'none')}, not {expected.get(key, 'none')}"


def _first_other_part(model: nn.Module, family: str, error: Exception) -> tuple[int, str]:
    """Number of parts before the first that a family cannot read, and text on that part.

    If all parts have the family's classes, the text is the message of `error`.
    """
    config = FAMILIES[family].Config.from_size(32, 32, 1, 32)
    twin = build_on_meta(
        family, replace(config, **({"experts": 1, "top_k": 1} if hasattr(config, "experts") else {}))
    )
    parts, classes = dict(model.named_modules()), {row.place: row.class_name for row in module_rows(model)}
    for i, row in enumerate(module_rows(twin)):
        if row.place not in classes:
            return i, f"it has no {row.place}"
        if classes[row.place] != row.class_name:
            return i, f"{row.place or 'the model'} is {classes[row.place]}, not {row.class_name}"
        for key, value in vars(twin.get_submodule(row.place)).items() if row.place else ():
            if type(own := getattr(parts[row.place], key, None)) is not type(value):
                return i, f"{row.place} has {key} {type(own).__name__}, not {type(value).__name__}"
    return len(classes), " ".join(str(error).split())

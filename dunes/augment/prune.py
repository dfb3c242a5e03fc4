"""Unstructured and N:M pruning of linear layers by SparseGPT, Wanda or magnitude; zeros stay zero in training.

SparseGPT https://arxiv.org/abs/2301.00774, Wanda https://arxiv.org/abs/2306.11695. In memory and in files, pruned
weights are stored as dense matrices. This module is registered in the table `CHANGES` in `changes.py`.
"""

# Shapes: O outputs, I inputs. SparseGPT transposes weights, so that a column is contiguous.

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dunes import tree
from dunes.augment.adapted import keeps_zeros, linear_of, not_plain
from dunes.augment.calibrate import Gram, assign_weight, calibrate_blocks, calibration_tokens, require_text
from dunes.augment.change import Change, Part, modules_at, part_name
from dunes.augment.gptq import Hessian, hessian, sweep
from dunes.augment.options import Prune
from dunes.progress import each
from dunes.units import plural

__all__ = ["calibration_tokens"]
VERSION = 1
BLOCK = 128
"""Number of columns in which SparseGPT selects weights together."""
DAMP = 0.01
"""Damping of the Hessian's diagonal in SparseGPT, as a fraction of the diagonal's mean."""
HALF = 0.5
"""Default fraction of weights to set to zero."""
REFITS = 10
"""Maximum iterations of `refit`."""
REFIT_TOLERANCE = 1e-4
"""`refit` stops when the squared norm of the gradient has fallen to this fraction of its initial value."""
TINY = 1e-30


def decide(model: nn.Module, options: Prune, ids: Tensor | None = None) -> Change:
    """The record of the change: every setting, and the places of the layers to prune.

    SparseGPT and Wanda need calibration text `ids` (S, T) int64. Raises ValueError for invalid options, for layers
    that are not dense or have weights that are not finite, and for text that is too short.
    """
    request, target = options.request(), Sparsity.of(options.sparsity, options.pattern)
    if (ids is not None) != options.reads_text:
        raise ValueError(f"method {options.method} {'needs' if ids is None else 'takes no'} calibration text")
    if target.pattern is not None and BLOCK % target.pattern.group:
        raise ValueError(f"pattern is {options.pattern}; expected groups that divide {BLOCK}")
    linears = _find_linears(model, request["where"])
    for name, linear in linears.items():
        inputs = linear.in_features
        if target.pattern is not None and inputs % target.pattern.group:
            raise ValueError(
                f"{name}: its {inputs} inputs are no multiple of {target.pattern.group} ({options.pattern})"
            )
        if not linear.weight.isfinite().all():
            raise ValueError(f"{name}: has weights that are not finite; dunes inspect --values lists them")
    if ids is not None:
        require_text(model, ids, linears)
    return Change("prune", VERSION, request | {"sparsity": target.fraction}, {name: {} for name in linears})


def _find_linears(model: nn.Module, globs: list[str]) -> dict[str, nn.Linear]:
    """The linear layers to prune, by name. Raises ValueError for a tied head and for layers that are not dense."""
    if getattr(model, "head", True) is None and tree.matches(globs, "head"):
        raise ValueError("head: tied to the embedding, which is not pruned; exclude it with '!head'")
    linears = {}
    for place in tree.find(model, globs, tree.linear):
        if isinstance(place.module, nn.Linear):
            linears[place.name] = place.module
        elif not any(True for _ in tree.innermost(place.module).children()):
            raise not_plain(place.name, place.module)
    return linears


@torch.no_grad()
def solve(model: nn.Module, change: Change, ids: Tensor | None) -> Iterator[Part]:
    """Prune the layers, block by block; the record gets the numbers of weights and of nonzero weights per layer.

    A layer with fewer calibration tokens than inputs, such as a rarely used expert, is pruned by magnitude. Its
    entry in the record then has the method "magnitude".
    """
    linears = modules_at(model, change.places)
    places: dict[str, dict[str, Any]] = {}

    def prune(grams: Mapping[str, Gram | None]) -> None:
        for name, gram in grams.items():
            places[name] = _prune(name, linears.pop(name), gram, change.request)

    def record(part: Change) -> Part:
        return Part(replace(part, places={name: places[name] for name in part.places}))

    parts = change.parts()
    if change.request["method"] == "magnitude":
        for part in each(parts.values()):
            prune(dict.fromkeys(part.places))
            yield record(part)
        return
    assert ids is not None
    for _ in calibrate_blocks(model, ids, change.places.keys(), prune):
        yield record(parts[part_name(next(reversed(places)))])


def _prune(name: str, linear: Any, gram: Gram | None, request: Mapping[str, Any]) -> dict[str, Any]:
    """Prune one layer in place; return its entry in the record's `places`."""
    weight: Tensor = linear.weight
    method, sparsity = request["method"], Sparsity.of(request["sparsity"], request["pattern"])
    decided = {}
    if gram is not None and gram.tokens < linear.in_features:
        method, decided = "magnitude", {"method": "magnitude", "tokens": gram.tokens}
    if method == "sparsegpt":
        assert gram is not None
        h = gram.factors = gram.factors or hessian(gram, DAMP, name)
        zeros = weight == 0 if keeps_zeros(linear) else None
        pruned = refit(prune_columns(weight, h, sparsity, zeros=zeros), weight, h)
        decided = {} if h.damp == DAMP else {"damp": h.damp}
    else:
        scores = weight.float().abs() if method == "magnitude" or gram is None else wanda_scores(weight, gram)
        pruned = weight.masked_fill(sparsity.choose_all(scores, by_output=method == "wanda"), 0)
    assign_weight(linear, pruned)
    return {"weights": weight.numel(), "nonzero": int(linear.weight.count_nonzero()), **decided}


def describe(change: Change) -> str:
    """One sentence for users: the share of zeros, and the layers pruned by magnitude because of too few tokens."""
    weights, nonzero = (sum(place[key] for place in change.places.values()) for key in ("weights", "nonzero"))
    few = [name for name, place in change.places.items() if "tokens" in place]
    more = f"; {plural(len(few), 'layer')} by magnitude: fewer tokens than inputs ({few[0]}, ...)" if few else ""
    pattern = "" if change.request["pattern"] is None else f", {change.request['pattern']}"
    zeros = f"{1 - nonzero / weights:.1%} of {weights:,} weights are zero"
    return f"{zeros} ({change.request['method']}{pattern}){more}"


def shape(model: nn.Module, change: Change) -> None:
    """Make the layers keep their zeros. Raises ValueError, before any change, like `mask_linears`."""
    mask_linears(model, change.places)


class MaskedLinear(nn.Linear):
    """A pruned linear layer: weights that are zero before an optimizer step are zero after the step.

    The trainer calls `before_step` and `after_step`; a training loop of your own must call both. The layer's
    forward and its state dict are the same as in `nn.Linear`.
    """

    structure_name = "Linear"  # the mask is no part of the structure
    keeps_zeros = True  # adapters on this layer keep its zeros, too
    _zeros: Tensor | None = None

    @torch.no_grad()
    def before_step(self) -> None:
        """Remember which weights are zero, if the weight is trainable."""
        if self.weight.requires_grad:
            self._zeros = self.weight == 0

    @torch.no_grad()
    def after_step(self) -> None:
        """Reset to zero the weights that were zero in `before_step`."""
        if self._zeros is not None:
            self.weight.masked_fill_(self._zeros, 0)
            self._zeros = None


def mask_linears(model: nn.Module, places: Collection[str]) -> None:
    """Replace the dense linear layers at these places (also inside wrappers) by `MaskedLinear`.

    Raises ValueError for a place without a dense linear layer, since training would change its zeros.
    """
    linears = {p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), nn.Linear)}
    if missing := {*places} - linears:
        raise ValueError(f"{min(missing)[:200]}: this model has no such dense linear layer")
    _convert_linears(model, places, MaskedLinear)


def unmask_linears(model: nn.Module) -> None:
    """Replace every `MaskedLinear` by `nn.Linear`, so that zeros are trained again."""
    _convert_linears(model, masked_places(model), nn.Linear)


def masked_places(model: nn.Module) -> list[str]:
    """The places of all `MaskedLinear` layers."""
    return [p.name for p in tree.places(model) if isinstance(tree.innermost(p.module), MaskedLinear)]


def _convert_linears(model: nn.Module, places: Collection[str], cls: type[nn.Linear]) -> None:
    make: Any = lambda linear: linear_of(linear.weight, linear.bias, linear.training, cls)
    if places:
        tree.replace(model, {*places}, make, reach="inner")


class Pattern(NamedTuple):
    """An N:M pattern: at most `kept` of every `group` consecutive weights of a row are nonzero."""

    kept: int
    group: int


class Sparsity(NamedTuple):
    """The fraction of weights to set to zero, and the N:M pattern; `pattern` is None for unstructured pruning."""

    fraction: float
    pattern: Pattern | None = None

    @classmethod
    def of(cls, fraction: float | None, pattern: str | None) -> "Sparsity":
        """Parse a pattern like "2:4". The default fraction follows from the pattern, or is 0.5 without a pattern.

        Raises ValueError for other text, and if the fraction contradicts the pattern.
        """
        implied, expected, shape = HALF, "more than 0 and less than 1", None
        if pattern is not None:
            kept, _, group = pattern.partition(":")
            if not (kept.isdecimal() and group.isdecimal()) or not 0 < int(kept) < int(group):
                raise ValueError(f"pattern is {pattern[:80]!r}; expected KEPT:GROUP, like 2:4 or 4:8")
            shape = Pattern(int(kept), int(group))
            implied = 1 - shape.kept / shape.group
            expected = f"{implied:g}, which {pattern} gives"
        fraction = implied if fraction is None else fraction
        if not 0 < fraction < 1 or (shape is not None and abs(fraction - implied) > 1e-9):
            raise ValueError(f"sparsity is {fraction:g}; expected {expected}")
        return cls(fraction, shape)

    def choose(self, scores: Tensor) -> Tensor:
        """Bool mask of the weights to prune: the weights with the lowest scores (columns, O).

        With a pattern, the columns are those of one group, and the lowest scores of each output are chosen.
        """
        if self.pattern is None:
            return smallest(scores, self.fraction)
        return lowest(scores, self.pattern.group - self.pattern.kept, 0)

    def choose_all(self, scores: Tensor, by_output: bool = False) -> Tensor:
        """Bool mask of the weights to prune in a matrix: the weights with the lowest scores (O, I).

        With a pattern, scores are compared within each group. Without a pattern, scores are compared within the
        complete matrix, or within each output if `by_output`.
        """
        if self.pattern is not None:
            groups = scores.view(len(scores), -1, self.pattern.group)
            return lowest(groups, self.pattern.group - self.pattern.kept, 2).flatten(1)
        if by_output:
            return lowest(scores, int(scores.shape[1] * self.fraction), 1)
        return smallest(scores, self.fraction)


def prune_columns(
    weight: Tensor, h: Hessian, sparsity: Sparsity, block: int = BLOCK, zeros: Tensor | None = None
) -> Tensor:
    """Prune a weight (O, I) by SparseGPT, in blocks of `block` columns; returns the pruned weight in float32.

    In each block, the weights with the lowest error are pruned. The error is w² divided by the squared diagonal of
    the Cholesky factor; the square roots are compared, since squares may underflow. With a pattern, weights are
    selected per output and group, when the sweep reaches the group's first column. Weights at which the bool
    tensor `zeros` (O, I) is True are pruned first.
    """
    columns = weight.detach().float().T.clone(memory_format=torch.contiguous_format)
    columns[h.dead] = 0
    zeros = torch.zeros_like(columns, dtype=torch.bool) if zeros is None else zeros.T
    blocks = _spans(len(columns), block)
    spans = blocks if sparsity.pattern is None else _spans(len(columns), sparsity.pattern.group)
    scales, pruned = h.factor.diagonal()[:, None], zeros.clone()

    def replace(j: int, current: Tensor) -> Tensor:
        if j in spans:
            span = slice(j, spans[j])
            pruned[span] |= sparsity.choose((current[span] / scales[span]).abs().masked_fill(zeros[span], -1))
        return current[j].masked_fill(pruned[j], 0)

    sweep(columns, h.factor, blocks, replace)
    return columns.T.contiguous()


def _spans(columns: int, size: int) -> dict[int, int]:
    """The start and stop of each span of `size` columns; the last span may be shorter."""
    return {start: min(start + size, columns) for start in range(0, columns, size)}


def refit(pruned: Tensor, weight: Tensor, h: Hessian) -> Tensor:
    """Refit the nonzero values of a pruned weight (O, I), by least squares, to the outputs of `weight`.

    SparseGPT's sweep compensates a zero only in later columns; this function changes earlier columns, too.
    Conjugate gradients, preconditioned by the diagonal, solve the least-squares problems of all rows at once. A
    row changes only if this reduces its error by a finite amount. This error is measured with the Hessian without
    damping.
    """
    fitted, nonzero, diagonal = pruned, pruned != 0, h.matrix.diagonal()
    missing = weight.float() - pruned
    residual = before_fit = (missing @ h.matrix) * nonzero
    scaled = direction = residual / diagonal
    size = (residual * scaled).sum(1, keepdim=True)
    enough = REFIT_TOLERANCE * size.sum()
    for _ in range(REFITS):
        if size.sum() <= enough:
            break
        product = (direction @ h.matrix) * nonzero
        step = size / (direction * product).sum(1, keepdim=True).clamp(min=TINY)
        fitted, residual = fitted + step * direction, residual - step * product
        scaled = residual / diagonal
        size, before = (residual * scaled).sum(1, keepdim=True), size
        direction = scaled + size / before.clamp(min=TINY) * direction
    # With m = `missing` and c = `change` (0 at pruned weights), the error falls by m H m - (m - c) H (m - c).
    change = fitted - pruned
    fall = change * (before_fit + residual) - h.added * change * (2 * missing - change)
    fall = fall.sum(1, keepdim=True)  # products may overflow, or underflow to zero
    return torch.where(fall.isfinite() & (fall > 0), fitted, pruned)


def wanda_scores(weight: Tensor, gram: Gram) -> Tensor:
    """Wanda's scores (O, I) float32: |w| times the norm, over all tokens, of the input that w multiplies."""
    return weight.detach().float().abs() * gram.matrix.diagonal().sqrt()


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Bool mask of the `int(n * sparsity) + 1` lowest of n scores, as in the published code.

    If several scores equal the threshold, only as many as needed are in the mask, since a layer with few distinct
    values would otherwise lose too many weights. If the threshold is zero, all zeros are in the mask.
    """
    count = int(scores.numel() * sparsity) + 1
    threshold = scores.flatten().kthvalue(count).values
    chosen = scores <= threshold
    if threshold > 0 and (extra := int(chosen.sum()) - count):
        chosen.view(-1)[(scores == threshold).flatten().nonzero()[-extra:]] = False
    return chosen


def lowest(scores: Tensor, count: int, dim: int) -> Tensor:
    """Bool mask of the `count` lowest scores along `dim`; of equal scores, the first are in the mask."""
    order = torch.sort(scores, stable=True, dim=dim).indices.narrow(dim, 0, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(dim, order, True)

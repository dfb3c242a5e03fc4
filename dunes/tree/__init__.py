"""Find, replace, freeze, move, count, watch and print the modules of any `nn.Module`.

Start with `print_layers`, `find`, `replace`, `freeze`, `watch` and `statistics`.
"""

from dunes.tree.places import (
    Place,
    Where,
    count,
    find,
    freeze,
    innermost,
    insert,
    is_dense,
    linear,
    linears,
    matches,
    mode,
    move,
    places,
    remove,
    replace,
    require_shapes,
    uncompiled,
)
from dunes.tree.summary import Layer, layers, print_layers, print_statistics
from dunes.tree.watch import ModuleStatistics, Statistics, hooks, statistics, watch

__all__ = [
    "Layer", "ModuleStatistics", "Place", "Statistics", "Where", "count", "find", "freeze",
    "hooks", "innermost", "insert", "is_dense", "layers", "linear", "linears", "matches", "mode", "move",
    "places", "print_layers", "print_statistics", "remove", "replace", "require_shapes", "statistics",
    "uncompiled", "watch",
]  # fmt: skip

"""Track the running module in forward and backward passes."""

from bisect import bisect_right
from typing import Any, Self

import torch
from torch import nn


class ModuleTracker:
    """`with ModuleTracker(model) as tracker:`, then `tracker.now()` is the dotted name of the running module.

    In a forward pass it is the innermost module whose `forward` runs. In a backward pass it is the module whose
    forward created the running graph node: nodes are numbered in order of creation, so recording the numbers at
    which modules begin and end suffices. The model has hooks only inside the `with`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[str] = []
        self.calls = 0
        self._numbers: list[int] = []
        self._names: list[str] = []
        self._hooks: list[Any] = []
        self._owners: dict[int, str] = {}

    def __enter__(self) -> Self:
        for name, module in self.model.named_modules(remove_duplicate=False):
            if not isinstance(module, torch.jit.ScriptModule):  # has no hooks
                self._hooks.append(module.register_forward_pre_hook(self._begin(name)))
                self._hooks.append(module.register_forward_hook(self._end, always_call=True))
            self._owners |= {id(p): name for p in module.parameters(recurse=False)}
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def now(self) -> str | None:
        """The running module, or that of a parameter's own graph node; None outside all modules."""
        if self.stack:
            return self.stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return None
        if (parameter := getattr(node, "variable", None)) is not None:
            return self._owners.get(id(parameter))
        index = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (self._names[index] or None) if index >= 0 else None

    def _begin(self, name: str) -> Any:
        def begin(module: nn.Module, inputs: Any) -> None:
            self.stack.append(name)
            self.calls += 1
            self._note()

        return begin

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        """Record the innermost module as the creator of the next nodes, unless they are created in backward."""
        if not in_backward():
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._names.append(self.stack[-1] if self.stack else "")


def in_backward() -> bool:
    """True if a backward pass runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)

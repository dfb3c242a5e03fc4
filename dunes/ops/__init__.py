"""Tensor operations with a plain reference and a fast form, one file each.

`operation` makes a differentiable operation from a forward and a backward; `check` compares it with its reference.
"""

from dunes.ops.check import Report, check
from dunes.ops.kernels import Cpp, Metal, Triton
from dunes.ops.operation import Operation, operation

__all__ = ["Cpp", "Metal", "Operation", "Report", "Triton", "check", "operation"]

"""Tensor operations with a fast form. Each file holds the plain reference beside the fast form.

`operation` makes one of a forward and a backward, and `check` tries what can be wrong with it.
"""

from dunes.ops.check import Report, check
from dunes.ops.kernels import Cpp, Metal, Triton
from dunes.ops.operation import Operation, operation

__all__ = ["Cpp", "Metal", "Operation", "Report", "Triton", "check", "operation"]

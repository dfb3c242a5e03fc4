"""Tensor operations, each with a fast and a plain implementation, and checks that compare the two.

`operation` builds an operation from a forward and a backward function, and `check` tests it. Kernels are written
with `Cpp`, `Metal`, or another class with a method `missing`.
"""

from dunes.ops.check import Report, check
from dunes.ops.kernels import Cpp, Metal
from dunes.ops.operation import Operation, operation

__all__ = ["Cpp", "Metal", "Operation", "Report", "check", "operation"]

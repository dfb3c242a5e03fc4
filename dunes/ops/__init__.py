"""Tensor operations with a fast form. Each file holds the plain reference beside the fast form."""

from dunes.ops.kernels import Cpp, Metal, Triton
from dunes.ops.operation import Operation, operation

__all__ = ["Cpp", "Metal", "Operation", "Triton", "operation"]

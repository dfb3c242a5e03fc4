"""Kernels in C++ and Metal, and functions that report a missing compiler."""

import functools
import hashlib
import shutil
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from dunes.context import prefix_errors

T = TypeVar("T")


class Kernels(Protocol):
    def missing(self, device: str) -> str | None:
        """The reason why these kernels cannot run on this type of device, in one line; None if they can."""


class Cpp:
    """C++ functions on `torch::Tensor` for the CPU.

    Functions are attributes: `Cpp(source, "square").square(x)`. The first call compiles the source, in half a
    minute; torch caches the result on disk. The call raises ValueError if the source does not compile.
    """

    def __init__(self, source: str, *functions: str) -> None:
        self._source, self._functions = source, functions

    def missing(self, device: str) -> str | None:
        """The reason why the functions cannot run on this type of device, in one line; None if they can."""
        return f"its C++ is for the CPU, not {device}" if device != "cpu" else missing_compiler()

    @functools.cached_property
    def _module(self) -> Any:
        from torch.utils import cpp_extension

        name = "dunes_" + hashlib.sha256(self._source.encode()).hexdigest()[:16]
        try:
            build: Any = cpp_extension.load_inline
            return build(name, self._source, functions=list(self._functions), extra_cflags=["-O3"])
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if " error: " in line] or str(error).splitlines()
            raise ValueError(f"C++ does not compile: {lines[0]}") from None

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("_functions", ()):
            raise AttributeError(name)
        return getattr(self._module, name)


@functools.cache
def missing_compiler() -> str | None:
    from torch.utils import cpp_extension

    extension: Any = cpp_extension  # untyped
    compiler = extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); install one, or set CXX"
    return None if extension.is_ninja_available() else "there is no ninja; pip install ninja"


class Metal:
    """Kernels in Apple's Metal Shading Language, compiled at the first call by `torch.mps.compile_shader`.

    Kernels are attributes, called with tensors and numbers: `Metal(source).square(y, x)` runs one thread for each
    element of y.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def missing(self, device: str) -> str | None:
        """The reason why the kernels cannot run on this type of device, in one line; None if they can."""
        return None if device == "mps" else f"its Metal kernels are for Apple's GPU, not {device}"

    @functools.cached_property
    def _library(self) -> Any:
        return torch.mps.compile_shader(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._library, name)


def why_not_compiled() -> str:
    """The reason why Inductor cannot compile for the CPU on this machine; "" if it can."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except RuntimeError:
        return "no C++ compiler; install g++ or clang"
    except OSError as error:  # the import creates the compiler's cache folder, which may fail
        return one_line(error)
    return ""


def one_line(error: BaseException) -> str:
    """The first 200 characters of the error's message, on one line; the class name if the message is empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def attempt(message: str, work: Callable[[], T]) -> T:
    """The result of `work()`, which runs torch's compiler.

    Any error becomes a one-line ValueError that starts with `message`.
    """
    with prefix_errors(message, Exception, describe=one_line):  # torch's compiler may raise any error
        return work()

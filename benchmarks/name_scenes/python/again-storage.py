"""Where files are kept."""

from abc import ABC, abstractmethod


class Storage(ABC):
    @abstractmethod
    def read(self, path): ...

    @abstractmethod
    def write(self, path, data): ...

    @abstractmethod
    def remove(self, path): ...


class MemoryStorage(Storage):
    def __init__(self):
        self.files = {}

    def read(self, path):
        return self.files[path]

    def write(self, path, data):
        self.files[path] = data

    def ▏≠__init__…¦≠read…¦≠write…▕
        del self.files[path]

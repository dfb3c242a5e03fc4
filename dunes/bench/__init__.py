"""Measuring: benchmarks, where time and memory go, tables, pictures, comparisons."""

from dunes.bench.benchmarks import BENCHMARKS, benchmark
from dunes.bench.race import Lap, Work, race
from dunes.bench.timed import Report, timed
from dunes.measure import allocations

__all__ = ["BENCHMARKS", "Lap", "Report", "Work", "allocations", "benchmark", "race", "timed"]

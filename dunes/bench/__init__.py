"""Benchmarks, profiles of time and memory, tables, plots, comparisons.

Start with `benchmark` and `runner.bench`. `race` compares workloads, `profile_modules` measures the time of
modules, and `allocations` records memory.
"""

from dunes.bench.benchmarks import BENCHMARKS, benchmark
from dunes.bench.profile_modules import Report, profile_modules
from dunes.bench.runner import Lap, race
from dunes.bench.subject import Work
from dunes.measure import allocations

__all__ = ["BENCHMARKS", "Lap", "Report", "Work", "allocations", "benchmark", "profile_modules", "race"]

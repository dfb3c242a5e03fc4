"""astral dunes: build, train, change and use small transformers on your own machine.

Importing this package loads nothing heavy; torch comes with the room that needs it.
"""

import os
import sys

__version__ = "0.1.0"

# Threads that wait for each other spin, and where other programs use the cores they spin instead of those that
# they wait for: a step of training took 25 times as long beside two programs (LOG.md, "A machine that does
# something else"). After so many spins they sleep. OpenMP reads this once, when torch is loaded.
if "torch" not in sys.modules and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "1000"

"""astral dunes: build, train, change and use small transformers on your own machine.

Importing this package loads nothing heavy; torch comes with the room that needs it.
"""

__version__ = "0.1.0"

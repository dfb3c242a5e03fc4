"""Instruction data from a stronger model: requests to its endpoint, and the tasks in its answers."""

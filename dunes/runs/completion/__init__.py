"""Completion of lines: the engine, what a run fits and keeps for it, and the evaluation beside baselines."""

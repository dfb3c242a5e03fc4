"""Scores: loss on text, tasks, lines, a model before and after a change."""

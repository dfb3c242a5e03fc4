"""Runs: the training loop, finetuning, changes to folders, and their progress, plots and reports."""

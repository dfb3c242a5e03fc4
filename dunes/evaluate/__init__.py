"""Scores: loss on text, tasks, line completion, and comparisons of a model before and after a change.

Start with `text_loss.score_folder`, `text_loss.evaluate`, `tasks.run_tasks`,
`completion.evaluate_completion` and `comparison.compare_folders`.
"""

"""Scores: loss on text, tasks, lines, a model before and after a change.

Start with `text_loss.score_folder`, `text_loss.evaluate`, `tasks.run_tasks`,
`completion.evaluate_completion` and `comparison.compare_folders`.
"""

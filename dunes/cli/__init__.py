"""The `dunes` command: parses arguments, calls the library, prints results.

`main.main` runs the command; `process.run_recipe` runs a recipe like a verb of the command.
"""

VERBS = {
    "train": "training:train", "finetune": "training:finetune",
    "generate": "verbs:generate", "chat": "verbs:chat", "complete": "verbs:complete",
    "serve": "serve:serve", "lsp": "serve:lsp", "doctor": "serve:doctor",
    "studio": "studio:studio",
    "eval": "verbs:evaluate", "inspect": "verbs:inspect", "convert": "verbs:convert", "export": "verbs:export",
    "augment": "verbs:augment", "compile": "verbs:compile_", "bench": "verbs:bench", "help": "manual:show_help",
}  # fmt: skip
"""The verbs, and their functions as module:function in `dunes.cli`."""
GROUPS = {"augment": "augment_verb", "bench": "bench"}
"""Verbs with subcommands; their modules have `ABOUT` and `commands`."""

"""Names of options in litgpt, unsloth, trl and transformers."""

from collections.abc import Sequence

OPTIONS = {
    "--steps": "max-steps max-iters train:epochs",
    "--epochs (in train: --steps)": "num-epochs num-train-epochs",
    "--lr": "learning-rate",
    "--batch": "batch-size global-batch-size",
    "--context-length": "max-seq-length block-size",
    "--max-tokens": "max-new-tokens n-predict",
    "--rank": "lora-r lora-rank",
    "--alpha": "lora-alpha",
    "--dtype": "precision quantization-method",
    "--out": "out-dir output-dir",
    "--data (in train: SOURCE)": "dataset dataset-name train-data train-file json-path",
    "SOURCE without an option": "train:data eval:data",
    "MODEL without an option (in train: --from)": "model model-name model-name-or-path checkpoint-dir",
    "OUT without an option": "convert:out export:out",
    "the text without an option": "prompt",
}
"""Our options and arguments, each with the names that others have for it; `verb:` limits a name to a verb."""


def check_options(verb: str, arguments: Sequence[str]) -> None:
    """Raise ValueError, naming our options, if arguments are options of others.

    Dashes and underscores are equal, and so are names with and without a prefix like `train.`.
    """
    hints = []
    for word in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        name = word[2:].replace("_", "-").rpartition(".")[2]
        names = {name, f"{verb}:{name}"}
        hints += [f"{ours} for {word}" for ours, others in OPTIONS.items() if names & {*others.split()}]
    if hints:
        raise ValueError(f"use {', '.join(hints)}; dunes {verb} -h lists the options")

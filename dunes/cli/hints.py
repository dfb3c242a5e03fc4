"""Names of options in litgpt, unsloth, trl, transformers and llama-server."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

OPTIONS = {
    "--steps": "max-steps max-iters train:epochs",
    "--epochs (in train: --steps)": "num-epochs num-train-epochs",
    "--lr": "learning-rate",
    "--batch": "global-batch-size train:batch-size finetune:batch-size",
    "--context-length": "max-seq-length block-size",
    "--max-tokens": "max-new-tokens generate:n-predict chat:n-predict",
    "--rank": "lora-r lora-rank",
    "--alpha": "lora-alpha",
    "--dtype": "precision quantization-method",
    "--out": "out-dir output-dir",
    "--data (in train: SOURCE)": "dataset dataset-name train-data train-file json-path",
    "SOURCE without an option": "train:data eval:data",
    "MODEL without an option (in train: --from)": "model model-name model-name-or-path checkpoint-dir",
    "MODEL without an option (smollm2, a file or a folder)": "serve:m serve:hf serve:hf-repo serve:fim-*",
    "OUT without an option": "convert:out export:out",
    "the text without an option": "generate:prompt chat:prompt",
    "nothing (it is not needed)": "serve:[ctb] serve:ctx-size serve:*batch-size serve:threads serve:parallel "
    "serve:n[gp]* serve:*gpu-layers serve:fa serve:flash-attn serve:cache-reuse",
    "--port": "serve:p",
    "FOLDER without an option": "studio:logdir",
    "--adapter FOLDER": "serve:lora",
    "the variable DUNES_API_KEY": "serve:api-key",
    "the address or the port without an option": "doctor:p doctor:port doctor:host",
}
"""Our options and arguments, each with the names that others have for it; `verb:` limits a name to a verb."""


def check_options(verb: str, arguments: Sequence[str]) -> None:
    """Raise ValueError, naming our options, if arguments are options of others.

    Dashes and underscores are equal, and so are names with and without a prefix like `train.`.
    """
    hints, end = list[str](), [*arguments, "--"].index("--")  # then only text follows
    for word in (a.partition("=")[0] for a in arguments[:end] if a[:1] == "-" and a.lstrip("-")[:1].isalpha()):
        name = word.lstrip("-").replace("_", "-")
        names = [f"{prefix}{n}" for n in {name, name.rpartition(".")[2]} for prefix in ("", f"{verb}:")]
        for ours, others in OPTIONS.items():
            if any(fnmatchcase(n, other) for n in names for other in others.split()):
                hints.append(f"{ours} for {word}")
    if hints:
        raise ValueError(f"use {', '.join(hints)}; dunes {verb} -h lists the options")

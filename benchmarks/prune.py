"""Increase of a model's validation loss by pruning, for every method and sparsity.

python benchmarks/prune.py MODEL CALIBRATION [VALIDATION_TOKENS]

CALIBRATION is the text that the model was trained on; its last tenth is for validation. See
docs/log/quantization.md, "Pruning: SparseGPT, Wanda, magnitude".
"""

import sys
from copy import deepcopy
from pathlib import Path

from dunes import checkpoint
from dunes.augment import apply_change
from dunes.augment.calibrate import calibration_tokens
from dunes.checkpoint import LoadedModel
from dunes.evaluate.text_loss import calibration_ids, evaluate

import numpy as np

SETTINGS = {
    "50 %": {"sparsity": 0.5},
    "4:8": {"pattern": "4:8"},
    "2:4": {"pattern": "2:4"},
    "70 %": {"sparsity": 0.7},
}


def main(folder: str, text: str, tokens: str = "27904") -> None:
    loaded = checkpoint.load_with_tokenizer(Path(folder))
    ids = np.array(loaded.require_tokenizer().encode(Path(text).read_text()))
    valid = ids[int(0.9 * len(ids)) :][: int(tokens)]
    calibration = calibration_ids(loaded, [text], calibration_tokens(loaded.model))
    before = evaluate(loaded, valid).loss
    print(f"dense {before:.4f} nats/token on {len(valid):,} tokens; calibration {tuple(calibration.shape)}")
    print(f"| | {' | '.join(SETTINGS)} |")
    for method in ("magnitude", "wanda", "sparsegpt"):
        text_ids = {} if method == "magnitude" else {"ids": calibration}
        losses = []
        for setting in SETTINGS.values():
            model = deepcopy(loaded.model)
            apply_change(model, "prune", method=method, **setting, **text_ids)
            losses.append(
                evaluate(LoadedModel(model, loaded.tokenizer, loaded.context_length), valid).loss - before
            )
        print(f"| {method} | {' | '.join(f'{loss:+.4f}' for loss in losses)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Increase of a model's validation loss by quantization, and bits per weight, for every kind, method and group.

python benchmarks/quantize.py MODEL CALIBRATION [VALIDATION_TOKENS]

CALIBRATION is the text that the model was trained on; its last tenth is for validation. See
docs/log/quantization.md, "Quantization: int4 and int3 by group, GPTQ, AWQ, HQQ".
"""

import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from dunes import checkpoint
from dunes.augment import apply_change
from dunes.augment.calibrate import calibration_tokens
from dunes.augment.quantized import Quantized
from dunes.checkpoint import LoadedModel
from dunes.evaluate.text_loss import calibration_ids, evaluate

import numpy as np

BY_GROUP = [{"group": 64}, {"group": 64, "symmetric": True}, {"group": 0}]
SETTINGS: list[dict[str, Any]] = [
    {"kind": "int8"},
    {"kind": "int8", "method": "gptq"},
    {"kind": "nf4"},
    {"kind": "nf4", "double": True},
    *(
        {"kind": kind, "method": method, **group}
        for kind in ("int4", "int3")
        for group in BY_GROUP
        for method in ("rtn", "gptq")
    ),
]


def main(folder: str, text: str, tokens: str = "111539") -> None:
    loaded = checkpoint.load_with_tokenizer(Path(folder))
    ids = np.array(loaded.require_tokenizer().encode(Path(text).read_text()))
    valid = ids[int(0.9 * len(ids)) :][: int(tokens)]
    calibration = calibration_ids(loaded, [text], calibration_tokens(loaded.model))
    before = evaluate(loaded, valid).loss
    print(f"dense {before:.4f} nats/token on {len(valid):,} tokens; calibration {tuple(calibration.shape)}")
    print("| | nats/token | bits per weight | s |")
    for setting in SETTINGS:
        model, started = deepcopy(loaded.model), time.perf_counter()
        text_ids = {"ids": calibration} if setting.get("method") == "gptq" else {}
        apply_change(model, "quantize", **setting, **text_ids)
        seconds = time.perf_counter() - started
        layers = [m for m in model.modules() if isinstance(m, Quantized)]
        bits = 8 * sum(b.nbytes for m in layers for b in m.buffers())
        bits /= sum(m.in_features * m.out_features for m in layers)
        loss = evaluate(LoadedModel(model, loaded.tokenizer, loaded.context_length), valid).loss - before
        name = " ".join(k if v is True else f"{v}" for k, v in setting.items())
        print(f"| {name} | {loss:+.4f} | {bits:.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

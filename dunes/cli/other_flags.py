"""Flags of other programs that their users try here, and what to write in their place."""

import re
from collections.abc import Sequence

OTHER_FLAGS = {
    "serve": {
        "-m|--model|-hf|-hfr|--hf-repo": "name the model without a flag, as in dunes serve model.gguf",
        "--fim-.*": "name a model, as in dunes serve smollm2, or a run of dunes train",
        "-c|--ctx-size|-b|--batch-size|-ub|--ubatch-size|--cache-reuse|-np|--parallel": "leave it out",
        "-t|--threads|-ngl|--gpu-layers|--n-gpu-layers|-fa|--flash-attn": "leave it out, one core serves",
        "-p": "write --port",
        "--lora": "write --adapter FOLDER",
        "--api-key": "set the key in DUNES_API_KEY",
    },
    "doctor": {"-p|--port|--host": "pass the address or the port without a flag, as in dunes doctor 8080"},
}
"""For each verb: patterns of flags, and the remedy."""


def refuse_other_flags(verb: str, arguments: Sequence[str]) -> None:
    """Raise ValueError for flags that other programs have in place of this verb's."""
    advice, known = list[str](), OTHER_FLAGS.get(verb, {})
    for flag in (argument.partition("=")[0] for argument in arguments):
        advice += [f"{flag}: {remedy}" for pattern, remedy in known.items() if re.fullmatch(pattern, flag)]
    if advice:
        raise ValueError(f"dunes {verb} has no such flags: {'; '.join(advice)}")

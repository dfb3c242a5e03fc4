"""litgpt's mixture of experts for `benchmarks/experts.py --layer`, in litgpt's own environment.

    python litgpt_mixture.py EXPERTS DIM HIDDEN TOP_K TOKENS DTYPE THREADS

Each line of standard input is a phase, "forward" or "training", which is run once and answered by one line. With
bfloat16, weights are float32 under autocast in training, as in litgpt's pretraining (bf16-mixed), and bfloat16 in
the forward phase. https://github.com/Lightning-AI/litgpt/blob/main/litgpt/model.py
"""

import sys
from copy import deepcopy

import torch
from litgpt.config import Config
from litgpt.model import LLaMAMoE


def main() -> None:
    experts, dim, hidden, top_k, tokens = map(int, sys.argv[1:6])
    dtype = getattr(torch, sys.argv[6])
    torch.set_num_threads(int(sys.argv[7]))
    config = Config(
        n_embd=dim, n_expert=experts, n_expert_per_token=top_k, moe_intermediate_size=hidden, bias=False,
        mlp_class_name="LLaMAMoE", intermediate_size=hidden,
    )  # fmt: skip
    model, x = LLaMAMoE(config), torch.randn(1, tokens, dim)
    stored = deepcopy(model).to(dtype)
    for phase in map(str.strip, sys.stdin):
        if phase == "forward":
            with torch.no_grad():
                stored(x.to(dtype))
        else:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                model(x).float().square().mean().backward()
        print("done", flush=True)


if __name__ == "__main__":
    main()

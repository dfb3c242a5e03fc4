"""Computed memory of a rank and time of a step for models of 124M to 47B parameters; nothing is measured.

    python benchmarks/scale.py --counts 1 8 64 --contexts 2048 8192

The memory is of a step on tensors without data (`dunes.runs.memory`): each rank has one row, products are in
bfloat16 and blocks are checkpointed. It does not include the GPU's context and its allocator's losses.
"""

from functools import partial

import tyro

MODELS = {
    "124M": ("llama", {"vocab": 50_257, "dim": 768, "depth": 12, "heads": 12, "kv_heads": 12, "hidden": 2048}),
    "1B": ("llama", {"vocab": 32_000, "dim": 2048, "depth": 16, "heads": 32, "kv_heads": 8, "hidden": 8192}),
    "7B": ("llama", {"vocab": 32_000, "dim": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "hidden": 11_008}),
    "8x7B": ("mixtral", {"vocab": 32_000, "dim": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336}),
}
MFU, PEAK, LINK = 0.4, 989e12, 100e9
"""Of the computed times: a share of an H100's bfloat16 FLOP/s, and bytes/s that a rank receives."""


def received(build, count: int) -> float:
    """Bytes that a rank receives in a step: parameters, the sums of gradients, and Muon's matrices and updates.

    A block's parameters are gathered again for the backward pass unless `keeps_gathered`.
    """
    from dunes import tree
    from dunes.measure import ranks
    from dunes.train import muon_split

    import torch

    with torch.device("meta"):
        model = build()
    with ranks.fake_ranks(count):
        blocks = 0 if ranks.keeps_gathered(model) else tree.count(model.blocks)
    named = dict(model.named_parameters())
    hidden = sum(named[name].numel() for name in muon_split(model)["muon"])
    return 4.0 * (count - 1) / count * (2 * tree.count(model) + blocks + 2 * hidden)


def main(counts: tuple[int, ...] = (1, 8, 64), contexts: tuple[int, ...] = (2048,)) -> None:
    """Print a table in Markdown."""
    from dunes.measure import machine, ranks
    from dunes.models import FAMILIES
    from dunes.runs.autosize import flops
    from dunes.runs.memory import Shape, train_allocations
    from dunes.train.optim import muon_flops

    import torch

    machine.total_memory = lambda device: 80e9 * ranks.count()  # a GPU for each rank
    print("| model | context | ranks | weights, gradients, optimizer | peak | save, each | step |\n|" + 7 * "---|")
    for name, (family, sizes) in MODELS.items():
        for context in contexts:
            head = sizes["dim"] // sizes["heads"]
            config = FAMILIES[family].Config(**sizes, head_dim=head, context_length=context)
            build = partial(FAMILIES[family].build, config)
            with torch.device("meta"):
                model = build()
            work = flops(model, context) * context
            for count in counts:
                log = train_allocations(build, Shape(1, context, torch.bfloat16, True), number=count)
                before = log.by("kind", moment=0)
                weights, averages = before["parameters",], before["optimizer",]
                exchange = received(build, count) / LINK
                seconds = (work + muon_flops(model) / count) / (MFU * PEAK) + exchange
                memory = (2 * weights + averages, log.peak, 3 * weights + averages)
                sizes_gb = " | ".join(f"{size / 1e9:.1f} GB" for size in memory)
                print(f"| {name} | {context} | {count} | {sizes_gb} | {seconds:.2f} s ({exchange:.2f}) |")


if __name__ == "__main__":
    tyro.cli(main)

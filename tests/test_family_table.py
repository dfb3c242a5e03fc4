"""The table of docs/checkpoints.md: what works with each family. `python tests/test_family_table.py` writes it."""

import sys
from pathlib import Path

import pytest
import torch

from dunes import checkpoint
from dunes.augment import Adapted, attach, quantize
from dunes.checkpoint.formats import gguf
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.generate import generate
from dunes.generate.step import Step, export_step
from dunes.models import FAMILIES
from dunes.parts import Cache, cache_for
from dunes.text import Tokenizer
from dunes.train import Trainer, muon
from dunes.train.loss import next_token_loss
from small_models import random_model, small_config

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
SIZES = {"vocab": 265, "dim": 64, "depth": 2, "context": 64}
IDS = torch.arange(48).view(2, 24) * 5 + 3
UNTIED = ("olmo2",)
"""Families whose GGUF has a head of its own."""


def trains(family, model, folder):
    losses = [step.loss for step in Trainer(model, muon(model), next_token_loss).run([IDS] * 8)]
    assert losses[-1] < losses[0]


def loads_and_saves(family, model, folder):
    checkpoint.save(model, folder / "model", Tokenizer.train("bytes", []), 64)
    loaded = checkpoint.load(folder / "model")
    assert loaded.architecture.family in (family, "mistral")  # a Phi-3 is saved as a Mistral
    assert torch.equal(loaded.model(IDS), model(IDS))


def generates(family, model, folder):
    tokens = [t.id for t in generate(model, IDS[0].tolist(), max_tokens=6, context_length=64)]
    logits = model(torch.tensor([[*IDS[0].tolist(), *tokens]]))
    assert logits[0, 23:-1].argmax(-1).tolist() == tokens


@torch.no_grad()
def compiles(family, model, folder):
    cache, own = cache_for(model, 1, 64), Cache(1, 64)
    for filled in (cache, own):
        model(IDS[:1, :5], cache=filled)
    run = export_step(Step(model).eval(), cache, tokens=1).module()
    slot, positions = cache.start_row(1, 1)
    got, _ = run(IDS[0, 5:6], torch.arange(slot, slot + 1), positions, cache.keys, cache.values)
    want = model(IDS[:1, 5:6], cache=own)[0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def takes_lora(family, model, folder):
    exact = model(IDS)
    attach(model, rank=2, where="blocks.*.attn.*")
    for adapted in model.modules():
        if isinstance(adapted, Adapted):
            for p in adapted.adapters.parameters():
                p.data += 0.05
    checkpoint.save_adapter(model, folder / "adapter")
    base = made(family)
    checkpoint.load_adapter(base, folder / "adapter", any_base=True)
    assert (base(IDS) - model(IDS)).abs().max() <= 1e-5 * exact.abs().max() < (model(IDS) - exact).abs().max()


def is_quantized(family, model, folder):
    exact = model(IDS)
    quantize(model, kind="int8")
    differences = (model(IDS) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < differences.median() <= 0.1  # of a mixture, some tokens change their experts


def is_written_as_gguf(family, model, folder):
    if family in UNTIED:
        model, config = (made(family, tied=False), small_config(family, **SIZES, tied=False))
    else:
        config = small_config(family, **SIZES)
    architecture = checkpoint.Architecture(family, config)
    gguf.write(
        folder / "a.gguf", architecture, in_memory(model.state_dict()), Tokenizer.train("bytes", []), "float32"
    )


def made(family, **fields):
    return random_model(family, **SIZES, **fields)


COLUMNS = {
    "train": trains,
    "load, save": loads_and_saves,
    "generate": generates,
    "compile": compiles,
    "LoRA": takes_lora,
    "quantize": is_quantized,
    "GGUF": is_written_as_gguf,
}


def row(family, folder):
    """The line of a family. A cell is empty where a ValueError says why not."""
    cells = []
    for name, use in COLUMNS.items():
        try:
            (place := folder / f"{family}-{name}").mkdir()
            use(family, made(family), place)
            cells.append("yes")
        except ValueError as error:
            print(f"{family}, {name}: {error}", file=sys.stderr)
            cells.append("")
    return f"| `{family}` | {' | '.join(cells)} |"


def table(folder):
    head = ["", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(row(family, folder) for family in FAMILIES)]
    return f"{BEGIN}\n" + "\n".join(lines) + f"\n{END}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:PEFT refuses the out_proj")
def test_the_table_of_families_is_what_works(tmp_path):
    assert table(tmp_path) in PAGE.read_text()


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    text = PAGE.read_text()
    with TemporaryDirectory() as folder:
        PAGE.write_text(text[: text.index(BEGIN)] + table(Path(folder)) + text[text.index(END) + len(END) :])

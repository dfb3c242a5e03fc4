"""Write the gallery: small models in every form on disk, and what they compute, by the package as it is.

    python tests/make_gallery.py /gallery && cp -r /gallery tests/gallery

Cards name paths of sources and bases, so the folder should have a neutral one. `expected.safetensors` has logits,
`expected.json` greedy ids, changes and completions.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dunes import checkpoint
from dunes.checkpoint.card import read_card
from dunes.cli.main import run_command
from dunes.completion.completer import FolderCompleter
from dunes.generate import generate
from dunes.models import mnist
from dunes.runs import run as run_module
from dunes.train import Trainer

PLAIN = "--size 2x32 --vocab-size 280 --context-length 64 --batch 4 --steps 6"
SAME = "--threads 1 --dtype float32 --device cpu --compile off --seed 7 --quiet"
MIXTURE = "--experts 4 --experts-per-token 2"
TRAINED = {
    **{family: f"--family {family}" for family in ("arcee", "gpt2", "llama", "mistral", "qwen2", "qwen3")},
    **{family: f"--family {family} {MIXTURE}" for family in ("mixtral", "qwen3_moe")},
    "bias": f"{MIXTURE} --shared-experts 1 --balancing bias",
    "completion": "--size 2x64 --vocab-size 330 --context-length 96 --steps 60 --complete",
    "killed": "",
}
METHODS = {
    **dict.fromkeys(("full", "lora", "rslora", "dora", "pissa"), "llama"),
    **dict.fromkeys(("qlora", "qdora", "qlora-int8", "lora-experts"), "llama"),
    "expand-lora": "expand",
}
"""The folders that are finetuned, by method."""
CHANGES = {
    "int8": "quantize llama --kind int8",
    "int4-gptq": "quantize llama --kind int4 --method gptq --group 32",
    "int3": "quantize llama --kind int3 --method rtn --group 32 --symmetric --override blocks.0.**=int8",
    "nf4": "quantize llama --kind nf4",
    "nf4-double": "quantize llama --kind nf4 --double",
    "sparsegpt": "prune llama --method sparsegpt --sparsity 0.5",
    "wanda-2-4": "prune llama --method wanda --pattern 2:4",
    "narrow": "narrow llama --neurons 48",
    "expand": "expand llama --blocks 1",
    "experts": "experts llama --experts 4 --top-k 2",
    "experts-shared": "experts llama --experts 4 --split importance --shared 1 --gate noisy --scale official",
    "upcycle": "upcycle llama --experts 4",
    "lora-experts-linear": "lora-experts llama --experts 2 --rank 4",
    "lora-experts-mlp": "lora-experts llama --experts 2 --rank 4 --router mlp",
    "expand-int8": "quantize expand --kind int8",
    "merged-lora": "merge lora",
    "merged-dora": "merge dora",
    "expand-pruned": "prune expand --method wanda --sparsity 0.5",
    "expand-pruned-experts": "experts expand-pruned --experts 4 --top-k 2",
    "expand-pruned-experts-int8": "quantize expand-pruned-experts --kind int8",
    "expand-lora-merged": "merge expand-lora",
    "expand-lora-merged-nf4": "quantize expand-lora-merged --kind nf4",
}
EXPORTS = {
    "float32.gguf": "llama --to gguf --dtype float32",
    "q8_0.gguf": "llama --to gguf --dtype q8_0",
    "packed": "int4-gptq --to compressed-tensors",
    "hf": "nf4 --to hf",
}
STATES = ("killed", "full", "lora", "network-trained")
"""Runs that keep their training states."""
IDS = (3, 40, 41, 90, 7, 100, 55, 200, 31, 64, 9, 12)
NEW, CUTS = 12, 200
"""Greedy ids, and cursors that are completed."""


def run(out: Path, *args: object) -> None:
    """Run a command that makes a folder, if there is none. Raises RuntimeError where it fails."""
    if out.exists():
        return
    if status := run_command([*map(str, args)]):
        raise RuntimeError(f"{' '.join(map(str, args))}: status {status}")


def kill_at_step_4(out: Path, *args: object) -> None:
    """Run a command that ends without warning after a state was saved."""
    finish, log_step = run_module._finish, run_module._log_step

    def stop(folder: Path, step: Any, score: Any) -> None:
        log_step(folder, step, score)
        if step.number == 4:
            os.kill(os.getpid(), signal.SIGINT)

    def killed(session: Any) -> int:
        session.saver.last(session.run)
        raise KeyboardInterrupt

    run_module._finish, run_module._log_step = killed, stop
    try:
        run(out, *args)
    except KeyboardInterrupt:
        pass
    finally:
        run_module._finish, run_module._log_step = finish, log_step


def programs() -> dict[str, str]:
    """Forty small programs by name, in the order of names; they are too many lines to be kept."""
    line = "def task_{0}_{1}(value, limit={1}):\n    return value * {2} + limit\n"
    made = {f"module_{i}.py": "\n".join(line.format(i, j, i + j) for j in range(9)) for i in range(40)}
    return dict(sorted(made.items()))


def write_programs(folder: Path) -> None:
    """Write the programs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs().items():
        (folder / name).write_text(text)


def write_texts(root: Path) -> None:
    """Forty small programs, and twenty examples of instructions."""
    write_programs(root / "programs")
    asked = [
        {"instruction": f"Write task {i}.", "output": f"def task_{i}(value):\n    return {i}\n"} for i in range(20)
    ]
    (root / "examples.json").write_text(json.dumps(asked))


def write_models(root: Path) -> None:
    """Write all folders."""
    for name, options in TRAINED.items():
        verb = kill_at_step_4 if name == "killed" else run
        kind = [] if name == "completion" else ["--no-complete"]
        verb(
            root / name,
            "train",
            root / "programs",
            "--out",
            root / name,
            *f"{PLAIN} {options} {SAME}".split(),
            *kind,
        )
    few = f"--steps 4 --batch 4 --template alpaca --context-length 256 {SAME}".split()
    run(root / "expand", "augment", *CHANGES["expand"].split()[:1], root / "llama", root / "expand", "--blocks", 1)
    for name, base in METHODS.items():
        kind = "lora" if name == "expand-lora" else name
        method = ["--method", kind, *(["--rank", 4] if name != "full" else []), *few]
        run(root / name, "finetune", root / base, "--data", root / "examples.json", "--out", root / name, *method)
    for name, command in CHANGES.items():
        change, source, *options = command.split()
        run(root / name, "augment", change, root / source, root / name, *options)
    for name, command in EXPORTS.items():
        source, *options = command.split()
        run(root / name, "export", root / source, root / name, *options)
    run(root / "from-q8_0", "convert", root / "q8_0.gguf", root / "from-q8_0")
    write_networks(root)


def _class_loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    images, targets = batch
    return nn.functional.cross_entropy(network(images), targets, reduction="sum"), len(targets)


def train_network(network: nn.Module, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train two steps, from this state on; the trainer's state after them."""
    trainer = Trainer(network, torch.optim.AdamW(network.parameters(), 1e-2), _class_loss, seed=7)
    if state is not None:
        trainer.load_state_dict(state)
    images = torch.arange(8 * 784).reshape(8, 28, 28) % 251
    for _step in trainer.run([(images, torch.arange(8))] * 2):
        pass
    return trainer.state_dict()


def write_networks(root: Path) -> None:
    """A network, and one after two steps with their training state."""
    torch.manual_seed(7)
    architecture = checkpoint.Architecture.of_function(mnist.mlp, hidden=8)
    network = mnist.mlp(8)
    if not (root / "network").exists():
        checkpoint.save(network, root / "network", architecture=architecture)
    if not (root / "network-trained").exists():
        state = train_network(network)
        checkpoint.save(network, root / "network-trained", architecture=architecture)
        checkpoint.save_state(root / "network-trained", 2, {"trainer": state})


def resumed_network(root: Path) -> nn.Module:
    """The trained network after two more steps."""
    network = checkpoint.load_network(root / "network-trained")
    state = checkpoint.latest_state(root / "network-trained")
    assert state is not None
    train_network(network, checkpoint.load_state(state)["trainer"])
    return network


def model_folders(root: Path) -> Iterator[Path]:
    """The folders of language models."""
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and folder.name not in ("programs", "network", "network-trained", "killed"):
            yield folder


def cursors() -> Iterator[tuple[str, str, str]]:
    """The texts before and behind cursors in the programs, and the names of files that no index has."""
    texts = [*programs().values()]
    for i in range(CUTS):
        text = texts[i % len(texts)]
        cut = (131 * i) % len(text)
        end = text.find("\n", cut)
        yield text[:cut], text[end if end >= 0 else len(text) :], f"new_{i}.py"


def last_logits(model: nn.Module) -> Tensor:
    """The logits (2, V) after the last two of some ids."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([IDS]))[0, -2:].float()
    return logits.contiguous()


def greedy_ids(model: nn.Module) -> list[int]:
    """The ids that follow greedily."""
    return [token.id for token in generate(model, IDS, max_tokens=NEW, context_length=64)]


def scores(network: nn.Module) -> Tensor:
    """The scores (1, 10) of a made-up image."""
    with torch.no_grad():
        found: Tensor = network(torch.arange(784).reshape(1, 28, 28) % 251)
    return found


def completions(root: Path, every: int = 1) -> list[str]:
    """The completions at every n-th cursor."""
    completer = FolderCompleter(root / "completion")
    return [completer.complete(*cursor).text for cursor in [*cursors()][::every]]


def computed(root: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What the gallery computes: logits by folder, and all else."""
    torch.set_num_threads(1)
    models = {folder.name: checkpoint.load(folder).model for folder in model_folders(root)}
    logits = {name: last_logits(model) for name, model in models.items()}
    logits["network"] = scores(checkpoint.load_network(root / "network"))
    logits["network-trained"] = scores(resumed_network(root))
    facts: dict[str, Any] = {
        name: {"greedy": greedy_ids(model), "changes": (read_card(root / name) or {}).get("changes", [])}
        for name, model in models.items()
    }
    return logits, {"models": facts, "completions": completions(root)}


def main(root: Path) -> None:
    """Write the gallery and what is expected of it."""
    write_texts(root)
    write_models(root)
    for folder in root.iterdir():
        if folder.name not in STATES:
            shutil.rmtree(folder / "state", ignore_errors=True)
    for picture in root.rglob("loss.png"):
        picture.unlink()
    shutil.rmtree(root / "programs")
    logits, facts = computed(root)
    save_file(logits, root / "expected.safetensors")
    (root / "expected.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

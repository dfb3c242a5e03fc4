"""litgpt: its generate and the steps of its pretraining.

Reasons for the settings: `litgpt generate` uses bf16-true by default, a cache as long as the answer, and
torch.compile with --compile (https://github.com/Lightning-AI/litgpt/blob/main/litgpt/generate/base.py).
Pretraining uses bf16-mixed and always compiles, with AdamW fused on GPUs only, cross entropy in chunks of 128, and
clipping by Fabric (https://github.com/Lightning-AI/litgpt/blob/main/litgpt/pretrain.py). This is repeated here,
with the settings that all sides share (learning rate, weight decay on matrices only), and in eager forms, too;
decoding one text eagerly is in float32 only, since bfloat16 was half as fast as compiled. float16 is no default,
but the fastest 16-bit setting at 10M. Weights are loaded with the table of its LLaMA converter. Several prompts of
one length use its `batched_generate_fn`, which litgpt does not compile: compiled as for one prompt, 64 texts at
10M took a minute more before the first result, for 3 % more tokens/s. For `first` the converter's file,
lit_model.pth, is read instead of the folder, as in `litgpt generate`.
"""

import json
from pathlib import Path

import lightning
import torch
import work as asked
from litgpt.config import Config
from litgpt.generate import base
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy, load_checkpoint
from safetensors.torch import load_file
from work import Answer, BatchAnswer, Watch, Work


def config(folder: Path) -> Config:
    """Its words for a LLaMA."""
    hf = json.loads((folder / "config.json").read_text())
    return Config(
        name="llama",
        block_size=hf["max_position_embeddings"],
        vocab_size=hf["vocab_size"],
        padded_vocab_size=hf["vocab_size"],
        n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"],
        n_query_groups=hf["num_key_value_heads"],
        head_size=hf["head_dim"],
        n_embd=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        rope_base=int(hf["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )


# Generating, training.
PRECISIONS = {
    "float32": ("32-true", "32-true"),
    "bfloat16": ("bf16-true", "bf16-mixed"),
    "float16": ("16-true", ""),
}


def made(work: Work, fabric: lightning.Fabric) -> GPT:
    with fabric.init_module(empty_init=False):
        model = GPT(config(Path(work.folder)))
    model.load_state_dict(converted(work))
    return model


def converted(work: Work) -> dict[str, torch.Tensor]:
    """The folder's weights by its names."""
    folder, weights = Path(work.folder), {}
    copy_weights_hf_llama(config(folder), {}, weights, load_file(folder / "model.safetensors"))
    return weights


def caching(work: Work, setting: str, model: GPT, fabric: lightning.Fabric, rows: int):
    """The model with a cache for so many rows."""
    longest = len(work.rows[0]) + work.row_new if rows > 1 else len(work.prompt) + work.new
    with fabric.init_tensor():
        model.max_seq_length = max(longest, len(work.prompts[0]) + 1)
        model.set_kv_cache(batch_size=rows)
    if "compiled" in setting:  # as its --compile does
        torch._dynamo.config.automatic_dynamic_shapes = True
        torch._inductor.config.coordinate_descent_tuning = True
        base.next_token = torch.compile(base.next_token, mode="reduce-overhead")
    return fabric.setup_module(model.eval())


def generating(setting: str) -> lightning.Fabric:
    return lightning.Fabric(accelerator="cpu", devices=1, precision=PRECISIONS[setting.split()[0]][0])


def answers(work: Work, setting: str) -> Answer:
    fabric = generating(setting)
    return answering(caching(work, setting, made(work, fabric), fabric, rows=1))


def answering(model) -> Answer:
    def answer(ids, new):
        out = base.generate(model, torch.tensor(ids), len(ids) + new, temperature=0.0, top_k=None)
        return out[len(ids) :].tolist()

    return answer


def batch_answers(work: Work, setting: str) -> BatchAnswer:
    fabric = generating(setting)
    model, cached = made(work, fabric), None

    def answer(prompts, new):
        nonlocal cached
        cached = cached or caching(work, setting, model, fabric, len(prompts))
        steps = base.batched_generate_fn(
            cached,
            torch.tensor(prompts),
            len(prompts[0]) + new,
            sample_args={"temperature": 0.0},
            include_prompt=False,
            include_eos=True,
        )
        return torch.stack([torch.cat(step) for step in steps], 1).tolist()

    return answer


def first_answers(work: Work, setting: str) -> Answer:
    path, fabric = Path(work.folder).parent / "lit_model.pth", generating(setting)
    if not path.exists():
        torch.save(converted(work), path)
    with fabric.init_module(empty_init=False):
        model = GPT(config(Path(work.folder)))
    load_checkpoint(fabric, model, path)
    return answering(caching(work, setting, model, fabric, rows=1))


def train(work: Work, setting: str, watch: Watch) -> None:
    precision, *compiled = setting.split()
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=PRECISIONS[precision][1])
    plain = made(work, fabric)
    plain.max_seq_length = len(work.batches[0][0]) - 1
    model = fabric.setup(torch.compile(plain) if compiled else plain)
    optimizer = torch.optim.AdamW(asked.groups(work, plain), work.lr, tuple(work.betas), fused=False)
    optimizer = fabric.setup_optimizers(optimizer)
    for rows in asked.batches(work):
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss = chunked_cross_entropy(model(ids), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.clip)
        optimizer.step()
        optimizer.zero_grad()
        if watch(loss.item()):
            return


if __name__ == "__main__":
    eager, compiled = ("float32", "bfloat16"), ("float32 compiled", "bfloat16 compiled")
    asked.main(
        {
            "decode": (("float32", *compiled, "float16 compiled"), answers),
            "prefill": ((*eager, *compiled), answers),
            **dict.fromkeys(asked.BATCHES, (eager, batch_answers)),
            "first": (eager, first_answers),
            "train": ((*eager, *compiled), train),
        }
    )

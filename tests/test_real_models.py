"""SmolLM2-135M-Instruct as it is published: read, generate, finetune, merge, quantize, export, read back."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from adapters import difference
from conftest import run_dunes
from dunes import checkpoint
from dunes.generate import generate
from real_models import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
README = Path(__file__).parents[1] / "README.md"
PROMPT = "def fibonacci(n):\n"


def dunes(*arguments):
    done = run_dunes(*arguments, timeout=380)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("real") / "smollm2"
    dunes("convert", smollm2(), path)
    return path


def logits(path):
    loaded = checkpoint.load(path)
    with torch.no_grad():
        return loaded.model(torch.tensor([loaded.tokenizer.encode(PROMPT * 8)])).float()


def greedy(path, count=24):
    loaded = checkpoint.load(path)
    ids = loaded.tokenizer.encode(PROMPT)
    return [t.id for t in generate(loaded.model, ids, max_tokens=count, context_length=loaded.context_length)]


def test_logits_ids_chats_and_greedy_text_are_those_of_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, theirs = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(PROMPT * 8, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = theirs(ids).logits
        prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
        text = theirs.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
    for path in (smollm2(), folder):
        print(
            f"{path.name}: {difference(logits(path), expected):.1e} at rms {expected.square().mean().sqrt():.1f}"
        )
        assert difference(logits(path), expected) < 1e-3
        assert greedy(path) == text
    chat = [{"role": "user", "content": "Name three colours."}]
    answer = dunes("chat", folder, chat[0]["content"], "--max-tokens", "16", "--temperature", "0")
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        said = theirs.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True).strip() in answer


def test_the_chat_in_the_readme_is_what_the_model_says(command):
    (block,) = re.findall(r"^```console\n(.*?)^```$", README.read_text(), re.M | re.S)
    for line, answer in re.findall(r"^\$ dunes (.*)\n((?:[^$].*\n)+)", block, re.M):
        verb, model, *words = shlex.split(line)
        assert model == "smollm2"
        assert command(verb, smollm2(), *words)[:2] == (0, answer)


def test_twenty_steps_a_merge_and_formats_keep_the_model(folder, tmp_path):
    rows = [{"instruction": f"Add {i} and {i + 1}.", "output": f"The sum is {2 * i + 1}."} for i in range(200)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    dunes("finetune", folder, "--data", tmp_path / "rows.json", "--out", tmp_path / "a", "--steps", "20")
    first, last = (
        json.loads((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[i])["loss"] for i in (0, -1)
    )
    assert last < 0.7 * first
    dunes("augment", "merge", tmp_path / "a", tmp_path / "merged", "--dtype", "float32")
    assert difference(logits(tmp_path / "merged"), logits(tmp_path / "a")) < 1e-3
    dunes("export", tmp_path / "merged", tmp_path / "x.gguf", "--to", "gguf")
    assert torch.equal(logits(tmp_path / "x.gguf"), logits(tmp_path / "merged"))
    dunes("augment", "quantize", tmp_path / "merged", tmp_path / "int8", "--kind", "int8")
    exact = logits(tmp_path / "merged")
    assert 0 < (logits(tmp_path / "int8") - exact).norm() < 0.05 * exact.norm()

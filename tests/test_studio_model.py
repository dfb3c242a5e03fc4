"""The studio's view of a model: rows and histograms add up, attention is transformers', a page shows them."""

from pathlib import Path

import pytest
import torch
import transformers

from dunes import checkpoint, tree
from dunes.checkpoint.weights.lazy_tensor import in_memory
from dunes.studio import weights
from studio import needs_browser, opened, studio

GALLERY, TEXT = Path(__file__).parent / "gallery", "def task(value, limit=3): return value * 3 + limit"


@pytest.mark.parametrize("name", ["llama", "mixtral", "lora", "expand-int8", "wanda-2-4", "q8_0.gguf"])
def test_rows_add_up(name):
    root, model = weights.read_rows(GALLERY / name)[0][""], checkpoint.load(GALLERY / name).model
    assert root["bytes"] == sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(p.numel() for n, p in model.named_parameters() if ("adapters" in n) == (name == "lora"))
    assert (root["parameters"], root["trained"]) == (tree.count(model), trained * ("gguf" not in name))
    assert "loads       yes" in [*weights.describe(GALLERY / name)]


@pytest.mark.parametrize(("name", "new"), [("expand", "blocks.2"), ("lora", ".adapters.")])
def test_differences_name_the_new_places(name, new):
    models = {folder: weights.read_rows(GALLERY / folder)[0] for folder in ("llama", name)}
    added = [row["place"] for row in weights.differences(models) if not row["llama"]]
    assert added == [place for place in models[name] if new in place]


def test_a_histogram_counts_each_finite_value():
    tensors = in_memory({"weight": torch.tensor([0.0, 2.0, torch.nan, torch.inf])})
    ((points, figures),) = weights.histograms(tensors).values()
    assert sum(count for _, count in points) == 2
    assert figures == {"mean": 1, "std": 1, "min": 0, "max": 2, "zeros": 1, "not finite": 2}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "qwen3", "mixtral"])
def test_attention_is_that_of_transformers(name):
    tokens, maps, loads = weights.attention(GALLERY / name, TEXT)
    ids = torch.tensor([checkpoint.load(GALLERY / name).tokenizer.prompt(TEXT)])
    model = transformers.AutoModelForCausalLM.from_pretrained(GALLERY / name, attn_implementation="eager")
    ours, theirs = torch.tensor([*maps.values()]), torch.cat(model(ids, output_attentions=True).attentions)
    print(difference := float((ours - theirs.detach()).abs().max()), float((ours.sum(-1) - 1).abs().max()))
    assert max(difference, float((ours.sum(-1) - 1).abs().max())) < 1e-5
    assert [sum(load) for load in loads.values()] == [2 * len(tokens)] * (2 if name == "mixtral" else 0)


@pytest.mark.slow
@needs_browser
def test_a_model_is_opened_in_a_browser():
    with studio(GALLERY) as address, opened(f"{address}/model?model=llama&with=lora") as page:
        for text in ("embed Embedding", "token Embedding", "[280, 32] float32"):
            page.get_by_text(text).first.click()
        page.locator("canvas").wait_for()
        page.get_by_role("button", name="Show attention").click()
        page.locator("canvas").nth(1).wait_for()
        assert page.get_by_text("blocks.0.attn.q.adapters.default.A").is_visible()

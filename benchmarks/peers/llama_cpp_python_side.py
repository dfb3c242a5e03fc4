"""llama.cpp through llama-cpp-python: its generate, on a GGUF file made here from the folder.

Why these settings: built from source for this very processor, which is its default
(https://github.com/abetlen/llama-cpp-python#installation); n_threads and n_threads_batch are what all
sides get; a batch as long as the prompt, so that it is read in one go; flash_attn is the switch that
llama.cpp turns on by itself where it can, and the bindings do not
(https://llama-cpp-python.readthedocs.io/en/latest/api-reference/); it casts keys and values to float16
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp), so there is none in float32. There
the cache is float32, too, so that its ids can be compared; else it is its default, float16. Weights in 8
or 4 bits, by which llama.cpp is mostly used, are another model and no part of this race.

It answers a prompt from what it still has of the last one unless it is reset, so it is.
"""

import json
from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import work as asked
from gguf import GGMLQuantizationType as Kind
from llama_cpp import GGML_TYPE_F32, Llama
from safetensors.numpy import load_file
from work import Answer, Work

KINDS = {"float32": Kind.F32, "bfloat16": Kind.BF16, "float16": Kind.F16}


def written(folder: Path, precision: str) -> Path:
    """The folder's LLaMA as a GGUF file beside it, matrices in this precision; it holds no tokenizer."""
    path = folder.parent / f"{precision}.gguf"
    hf = json.loads((folder / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, hf["num_hidden_layers"])
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(hf["max_position_embeddings"])
    out.add_embedding_length(hf["hidden_size"])
    out.add_block_count(hf["num_hidden_layers"])
    out.add_feed_forward_length(hf["intermediate_size"])
    out.add_head_count(hf["num_attention_heads"])
    out.add_head_count_kv(hf["num_key_value_heads"])
    out.add_key_length(hf["head_dim"])
    out.add_value_length(hf["head_dim"])
    out.add_rope_dimension_count(hf["head_dim"])
    out.add_rope_freq_base(hf["rope_theta"])
    out.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    out.add_vocab_size(hf["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = turned(weight, hf["head_dim"])
        kind = KINDS[precision] if weight.ndim == 2 else Kind.F32
        out.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(weight, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def turned(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from halves (i, i + D/2), as Hugging Face pairs them for rotation, to neighbours."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def answers(work: Work, setting: str) -> Answer:
    precision, *flash = setting.split()
    longest = max(len(work.prompt) + work.new, len(work.prompts[0]) + 1)
    model = Llama(
        str(written(Path(work.folder), precision)),
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=work.threads,
        n_threads_batch=work.threads,
        flash_attn=bool(flash),
        verbose=False,
        **({"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32} if precision == "float32" else {}),
    )

    def answer(ids, new):
        model.reset()
        return list(islice(model.generate(ids, temp=0.0, repeat_penalty=1.0), new))

    return answer


if __name__ == "__main__":
    settings = ("float32", "bfloat16", "bfloat16 flash", "float16", "float16 flash")
    asked.main({"decode": (settings, answers), "prefill": (settings, answers)})

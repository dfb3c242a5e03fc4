"""llama.cpp through llama-cpp-python: its generate, on a GGUF file made from the folder.

Reasons for the settings: it is built from source for this processor, which is the default
(https://github.com/abetlen/llama-cpp-python#installation). n_threads and n_threads_batch are the threads of all
sides; a batch fits all prompts, so that they are evaluated at once. Flash attention is on, as llama.cpp chooses by
itself and the bindings do not (https://llama-cpp-python.readthedocs.io/en/latest/api-reference/), except in
float32, since it casts keys and values to float16
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-graph.cpp). The cache is float32 in float32, so that
ids can be compared, else float16, the default. Several texts are one llama_batch with a sequence id for each
token, and a cache for each sequence (`kv_unified` off), which its header advises for sequences without a common
prefix. 8- and 4-bit weights, for which llama.cpp is mostly used, are compared in `quantized_decode.py`, without
`use_extra_bufts`, with which its AMX kernels crash (https://github.com/ggml-org/llama.cpp/issues/20824).

The context is reset before each prompt, as it would otherwise reuse the cache of the last one. Its generate does
not support several texts, for which llama_decode is called as in llama.cpp's batched-bench
(https://github.com/ggml-org/llama.cpp/tree/master/tools/batched-bench). For one text both are equally fast.
"""

import json
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import llama_cpp as llama
import numpy as np
import work as asked
from work import Answer, BatchAnswer, Work

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


def written(folder: Path, precision: str) -> Path:
    """The folder's LLaMA as a GGUF file beside it, matrices in this precision; it holds no tokenizer."""
    path = folder.parent / f"{precision}.gguf"
    if not path.exists():
        write_gguf(folder, precision, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)
    return path


def write_gguf(folder: Path, precision: str, path: Path) -> None:
    import gguf
    from safetensors import safe_open

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
    file = safe_open(folder / "model.safetensors", "numpy")
    for name in sorted(file.keys()):
        weight = file.get_tensor(name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = turned(weight, hf["head_dim"])
        kind = gguf.GGMLQuantizationType[KINDS[precision] if weight.ndim == 2 else "F32"]
        out.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(weight, kind), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def turned(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from halves (i, i + D/2), as Hugging Face pairs them for rotation, to neighbours."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def answers(work: Work, setting: str) -> Answer:
    precision, *flash = setting.split()
    longest = max(len(work.prompt) + work.new, len(work.prompts[0]) + 1)
    if precision.startswith("q"):
        leave_out_amx()
    model = llama.Llama(
        str(written(Path(work.folder), precision)),
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=work.threads,
        n_threads_batch=work.threads,
        flash_attn=bool(flash),
        verbose=False,
        **({"type_k": llama.GGML_TYPE_F32, "type_v": llama.GGML_TYPE_F32} if precision == "float32" else {}),
    )

    def answer(ids, new):
        model.reset()
        return list(islice(model.generate(ids, temp=0.0, repeat_penalty=1.0), new))

    return answer


def leave_out_amx() -> None:
    defaults = llama.llama_model_default_params

    def parameters():
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama.llama_cpp.llama_model_default_params = parameters


class Context:
    """A context of so many sequences of up to `longest` tokens."""

    def __init__(self, work: Work, setting: str, rows: int, longest: int) -> None:
        precision, *flash = setting.split()
        llama.llama_backend_init()
        file = os.fsencode(written(Path(work.folder), precision))
        self.model = llama.llama_model_load_from_file(file, llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = rows * longest, rows, False
        params.n_batch = params.n_ubatch = rows * longest
        params.n_threads = params.n_threads_batch = work.threads
        params.flash_attn_type = getattr(llama, f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if flash else 'DISABLED'}")
        if precision == "float32":
            params.type_k = params.type_v = llama.GGML_TYPE_F32
        self.context = llama.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp loads the file"
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(rows * longest, 0, 1)

    def next_ids(self, new: Sequence[Sequence[int]], start: int) -> np.ndarray:
        """The likeliest id after each sequence, whose equally many new ids begin at the position `start`."""
        rows, width = len(new), len(new[0])
        view = lambda pointer: np.ctypeslib.as_array(pointer, (rows, width))
        view(self.batch.token)[:] = new
        view(self.batch.pos)[:] = np.arange(start, start + width)
        view(self.batch.n_seq_id)[:] = 1
        view(self.batch.logits)[:] = np.arange(width) == width - 1
        for i in range(rows * width):
            self.batch.seq_id[i][0] = i // width
        self.batch.n_tokens = rows * width
        if code := llama.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode returns {code}")
        return np.ctypeslib.as_array(llama.llama_get_logits(self.context), (rows, self.vocab)).argmax(1)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), False)
        ids, start = self.next_ids(prompts, 0), len(prompts[0])
        steps = [ids]
        for position in range(start, start + new - 1):
            steps.append(self.next_ids(steps[-1][:, None], position))
        return np.stack(steps, 1).tolist()


def batch_answers(work: Work, setting: str) -> BatchAnswer:
    context = None

    def answer(prompts, new):
        nonlocal context
        context = context or Context(work, setting, len(prompts), len(prompts[0]) + new)
        return context.generate(prompts, new)

    return answer


if __name__ == "__main__":
    settings = ("float32", "bfloat16", "bfloat16 flash", "float16", "float16 flash")
    asked.main(
        {
            "decode": (settings, answers),
            "prefill": (settings, answers),
            **dict.fromkeys(asked.BATCHES, (settings, batch_answers)),
            "first": (("float32", "float16 flash"), answers),
        }
    )

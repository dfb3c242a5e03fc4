"""A model from named parts: an Arcee, with some of its parts replaced.

`dunes train --parts mlp=gated position=alibi` trains such a model, and `benchmarks/parts.py` compares parts by
validation loss. `flags.PARTS` maps the names of parts to choices; the first choice is the default. To use a part
of your own, write a function like `build` in a file `mine.py`, and train with `--parts mine.py:build`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import nn

from dunes.flags import PARTS
from dunes.models.llama import Config
from dunes.parts import MLP, Attention, Block, Decoder, Embedding, GatedMLP, RMSNorm, Rotary, squared_relu
from dunes.parts.attention import GatedAttention, ValueResidualAttention
from dunes.parts.decoder import MultiTokenPredictor
from dunes.parts.latent_attention import LatentAttention
from dunes.parts.position import Alibi, PartialRotary, Position
from dunes.parts.recurrent import GatedConvolution, GatedDeltaNet, Mamba2

EPS = 1e-5
LOGIT_CAP, SCORE_CAP = 30.0, 50.0
"""Caps of logits and of attention scores, as in Gemma 2."""
PAIR = 2
"""Window of the first layer with `window=pair`: a token attends to itself and to the token before it."""


def build(vocab: int, dim: int, depth: int, context_length: int, **parts: str) -> Decoder:
    """Build an untrained model; `parts` maps names in `flags.PARTS` to choices.

    All choices of `mlp` have about the same number of parameters. Raises ValueError for an unknown name or choice.
    """
    chosen = {name: choices[0] for name, choices in PARTS.items()} | parts
    for name, choice in chosen.items():
        if choice not in PARTS.get(name, ()):
            raise ValueError(f"part {name}={choice} is unknown; expected {'|'.join(PARTS.get(name, PARTS))}")
    norm = partial(RMSNorm if chosen["norm"] == "rms" else nn.LayerNorm, dim, EPS)
    size = Config.from_size(vocab, dim, depth, context_length)
    blocks = [
        _block(chosen["block"], norm, _mixer(size, chosen, layer), _mlp(chosen["mlp"], dim))
        for layer in range(depth + PARTS["ahead"].index(chosen["ahead"]))
    ]
    ahead = [MultiTokenPredictor(dim, norm(), norm(), block, norm()) for block in blocks[depth:]]
    places = context_length if chosen["position"] == "learned" else None
    head = None if chosen["head"] == "tied" else nn.Linear(dim, vocab, bias=False)
    cap = LOGIT_CAP if chosen["logits"] == "capped" else None
    return Decoder(Embedding(vocab, dim, places), blocks[:depth], norm(), head, cap, ahead)


def _mlp(choice: str, dim: int) -> nn.Module:
    gated = partial(GatedMLP, dim, round(dim * 8 / 3 / 32) * 32)
    makers: dict[str, Callable[[], nn.Module]] = {
        "relu2": partial(MLP, dim, 4 * dim, squared_relu, bias=False),
        "gelu": partial(MLP, dim, 4 * dim, F.gelu, bias=False),
        "gated": gated,
        "geglu": partial(gated, F.gelu),
    }
    return makers[choice]()


def _block(form: str, norm: Callable[[], nn.Module], attn: nn.Module, mlp: nn.Module) -> Block:
    before = nn.Identity if form == "post" else norm
    after = (norm(), norm()) if form in ("post", "sandwich") else (None, None)
    return Block(
        *(before(), attn, before(), mlp),
        attn_post_norm=after[0],
        mlp_post_norm=after[1],
        parallel=form == "parallel",
    )


def _mixer(size: Config, chosen: dict[str, str], layer: int) -> nn.Module:
    """The attention of a layer; a chosen recurrent part replaces attention in 3 of 4 layers, as in Qwen3-Next."""
    width = size.head_dim
    makers: dict[str, Callable[[], nn.Module]] = {
        "convolution": partial(GatedConvolution, size.dim),
        "delta": lambda: GatedDeltaNet(
            size.dim, size.heads, key_dim=width, value_dim=width, norm=RMSNorm(width, EPS)
        ),
        "mamba": lambda: Mamba2(
            *(size.dim, 2 * size.heads), head_dim=width, state_dim=width, norm=RMSNorm(2 * size.heads * width, EPS)
        ),
    }
    if chosen["attention"] in makers and (layer + 1) % 4:
        return makers[chosen["attention"]]()
    return _attention(size, chosen, layer)


def _attention(size: Config, chosen: dict[str, str], layer: int) -> Attention:
    """The attention of a layer. The number of key/value heads divides the number of heads.

    In latent attention, the latent has a quarter of the model's width, and half of each head encodes positions.
    Raises ValueError for latent attention, which has no key/value heads, with a `kv` other than "all".
    """
    if chosen["attention"] == "latent":
        return _latent_attention(size, chosen, layer)
    most = {"all": size.heads, "half": max(1, size.heads // 2), "one": 1}[chosen["kv"]]
    kv_heads = next(n for n in range(most, 0, -1) if size.heads % n == 0)
    values = partial(ValueResidualAttention, first=layer == 0)
    makers: dict[str, Callable[..., Attention]] = {"values": values, "gated": GatedAttention}
    options: dict[str, dict[str, object]] = {
        "normed": {name: RMSNorm(size.head_dim, EPS) for name in ("q_norm", "k_norm")},
        "sinks": {"sinks": True},
        "capped": {"softcap": SCORE_CAP},
    }
    return makers.get(chosen["attention"], Attention)(
        size.dim,
        size.heads,
        kv_heads,
        head_dim=size.head_dim,
        position=_position(chosen["position"], size, layer),
        window=_window(chosen["window"], size, layer),
        **options.get(chosen["attention"], {}),
    )


def _latent_attention(size: Config, chosen: dict[str, str], layer: int) -> LatentAttention:
    if chosen["kv"] != "all":
        raise ValueError(f"attention=latent has no key/value heads; leave out kv={chosen['kv']}")
    half = size.head_dim // 2
    return LatentAttention(
        *(size.dim, size.heads, max(32, round(size.dim / 4 / 32) * 32)),
        nope_dim=half,
        rope_dim=half,
        value_dim=size.head_dim,
        position=_position(chosen["position"], replace(size, head_dim=half), layer),
        window=_window(chosen["window"], size, layer),
    )


def _window(choice: str, size: Config, layer: int) -> int | None:
    if choice == "pair" and layer == 0:
        return PAIR
    return max(1, size.context_length // 2) if choice == "alternating" and layer % 2 == 0 else None


def _position(choice: str, size: Config, layer: int) -> Position | None:
    rotary = Rotary(size.head_dim)
    positions: dict[str, Position | None] = {
        "rotary": rotary,
        "partial": PartialRotary(Rotary(size.head_dim // 4)),
        "some": rotary if (layer + 1) % 4 else None,  # no positions in every fourth layer, as in SmolLM3
        "alibi": Alibi(size.heads),
    }
    return positions.get(choice)

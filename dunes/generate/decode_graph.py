"""Decode graphs: forward passes that can be compiled ahead of time. A graph computes one or a few new tokens in
one row, or new tokens in each of several rows.

torch.export traces the model's own modules, with some operations replaced by functions that Inductor fuses into
few loops. A matrix product becomes a multiplication and a sum, with weights of any dtype; for several rows, it
becomes a call of `ops.row_products`. Attention reads the cache's readable slots, whose number is dynamic. A single
token needs a mask only for an attention window. New keys and values are written into the cache in place.
"""

# Shapes: T new tokens, K key/value heads, S readable slots, D head dim, V vocabulary.

import copy
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dunes import tree
from dunes.context import replaced
from dunes.ops import row_products
from dunes.ops.kernels import attempt
from dunes.parts import Cache, Decoder
from dunes.parts.context import ForwardContext

Function = Callable[..., Any]
Run = Callable[[list[Tensor]], list[Tensor]]
"""A function that runs native code; the next call in the same thread may overwrite the returned tensors."""
LARGE = 1 << 20
"""A matrix with at least this many elements is assumed not to fit into the CPU's cache."""
STACK = 1 << 20
"""Maximum size, in bytes, of the buffers that native code puts on its thread's stack."""
FEW = 4
"""Maximum number of tokens per call of the code for several tokens. A call takes 1.9 times as long as for one
token; with a maximum of 8 tokens, it would take 3.5 times as long."""
TEXT = 0
"""Key of the code for any number of tokens at the start of a text."""
ROWS = -1
"""Key of the code for one token in each of several rows."""
BATCH = -2
"""Key of the code for up to MOST tokens in each of several rows. Models with quantized layers do not have it."""
MOST = 32
"""Maximum number of new tokens per row in a call for a BATCH, which takes half the time of the model's forward."""


class DecodeGraph(nn.Module):
    """Computes float32 logits (T, V) after each new token, and a summary; writes keys and values into the cache.

    Each row of the summary (T, 3), float64, contains the most probable id, its logit, and the logsumexp of the
    logits after subtracting this logit. Raises ValueError unless the model's class is `Decoder` itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if type(model) is not Decoder:
            raise ValueError(f"a compiled step needs a Decoder, not a {type(model).__name__}")
        self.model = model

    def forward(
        self, ids: Tensor, slots: Tensor, slot_positions: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Arguments: new ids (T,), slots (T,) to write, the position of the token in each readable slot
        (S,), and for each layer keys and values (1, K, slots, D).

        For R rows: ids (R, T), slots and positions (2, R, T) of the ids, slot_positions (R, S), keys and values
        (R, K, slots, D). Positions of padding and of empty slots are -1. The logits are (R * T, V).
        """
        ids = ids if slots.dim() == 3 else ids[None]
        return self.score(self._hidden(ids, _context(keys, values, slots, slot_positions)))

    def _hidden(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        assert isinstance(self.model, Decoder)
        x: Tensor = self.model.embed(ids, ctx)
        for layer, block in enumerate(self.model.blocks):
            x = block(x, ctx, layer)
        return x

    def score(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and the summary for outputs x (B, T, dim) of the last block."""
        assert isinstance(self.model, Decoder)
        logits = self.model.logits(self.model.norm(x)).flatten(0, 1).float()
        top = logits.amax(-1)
        summary = logits.argmax(-1), top, (logits - top[:, None]).exp().sum(-1).log()
        return logits, torch.stack([value.double() for value in summary], -1)


class LayerGraph(nn.Module):
    """One block of a `DecodeGraph`. Blocks of equal structure share native code and have their own weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(
        self, x: Tensor, slots: Tensor, slot_positions: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The block's outputs for inputs x (B, T, dim); other arguments are as in `DecodeGraph`, for one layer.

        Raises ValueError for a block that passes tensors to later blocks, or changes the dtype.
        """
        ctx = _context(keys, values, slots, slot_positions)
        y: Tensor = self.block(x, ctx, 0)
        if ctx.carried or y.dtype != x.dtype:
            raise ValueError("expected a block that passes no tensors to later blocks and keeps the dtype")
        return y


class HeadGraph(DecodeGraph):
    """The final norm and the output head of a `DecodeGraph`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The logits and the summary for outputs x (B, T, dim) of the last block."""
        return self.score(x)


class TextGraph(DecodeGraph):
    """Computes the first tokens of a text like the model's own forward, and returns only the last token's logits
    and summary.

    Raises ValueError for attention windows other than 2, since a window's mask would need a constant size.
    """

    def forward(self, ids: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Arguments: ids (T,), and per layer keys and values (1, K, slots, D); the first T slots are written."""
        return self.score(self._hidden(ids[None], _TextContext(keys, values, torch.arange(ids.shape[0])))[:, -1:])


class _TextContext(ForwardContext):
    """Context of the first tokens of a text: each token attends to itself and the tokens before it."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], positions: Tensor) -> None:
        super().__init__(positions[None])
        self.keys, self.values = keys, values

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for cache, x in ((self.keys[layer], k), (self.values[layer], v)):
            cache.narrow(2, 0, x.shape[2]).copy_(x)
        return k, v

    def mask(self, window: int | None = None) -> Tensor:
        if window is not None:
            raise ValueError("a window needs a mask of a constant size")
        return self.positions[:, None, :] <= self.positions[:, :, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
        if window is not None:
            return super().attend(q, k, v, window, dropout)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class _RowContext(ForwardContext):
    """Context of new tokens in several rows; a token attends to the slots of its own row inside the layer's
    window."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor, slot_positions: Tensor) -> None:
        super().__init__(slots[1])
        self.keys, self.values, self.slots, self.slot_positions = keys, values, slots[0], slot_positions

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows, readable = torch.arange(self.slots.shape[0])[:, None, None], self.slot_positions.shape[1]
        for cache, x in ((self.keys[layer], k), (self.values[layer], v)):
            cache.index_put_((rows, torch.arange(x.shape[1])[:, None], self.slots[:, None]), x)
        return self.keys[layer].narrow(2, 0, readable), self.values[layer].narrow(2, 0, readable)

    def key_positions(self) -> Tensor:
        return self.slot_positions

    def mask(self, window: int | None = None) -> Tensor:
        key, query = self.slot_positions[:, None], self.positions[:, :, None]
        readable = (key >= 0) & (key <= query)
        readable = readable if window is None else readable & (key > query - window)
        # Padding attends to all slots. Otherwise, NaN would be stored in a slot that `grow` makes readable.
        return readable | (query < 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
        mask = self.mask(window)[:, None]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


class _StepContext(ForwardContext):
    """Context of new tokens in one row; a single token attends to all slots inside the layer's window."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor, slot_positions: Tensor) -> None:
        super().__init__(slot_positions[slots][None])
        self.keys, self.values, self.slots, self.slot_positions = keys, values, slots, slot_positions

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        readable = self.slot_positions.shape[0]  # `len` would put a constant into the graph
        for cache, x in ((self.keys[layer], k), (self.values[layer], v)):
            cache.index_copy_(2, self.slots, x.to(cache.dtype))
        return self.keys[layer].narrow(2, 0, readable), self.values[layer].narrow(2, 0, readable)

    def key_positions(self) -> Tensor:
        return self.slot_positions[None]

    def mask(self, window: int | None = None) -> Tensor:
        key, query = self.slot_positions[None, None], self.positions[:, :, None]
        readable = key >= 0 if window is None else key > query - window
        return readable if len(self.slots) == 1 else readable & (key <= query)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, dropout: float = 0.0) -> Tensor:
        mask = None if window is None and len(self.slots) == 1 else self.mask(window)[:, None]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def _context(keys: list[Tensor], values: list[Tensor], slots: Tensor, slot_positions: Tensor) -> ForwardContext:
    return (_RowContext if slots.dim() == 3 else _StepContext)(keys, values, slots, slot_positions)


def export_decode_graph(
    graph: DecodeGraph | LayerGraph, cache: Cache, tokens: int = 1, x: Tensor | None = None
) -> torch.export.ExportedProgram:
    """Export the graph for caches of any capacity. The example `cache` (8 slots, some filled) sets the dtypes.

    With ROWS or BATCH as `tokens`, the graph is for several rows. A graph of a part of the model needs an example
    `x` of its inputs (1, tokens, dim), or (3, T, dim) for rows. The graph of a `TextGraph` accepts any number of
    tokens above FEW. In any other graph, operations are replaced by functions that Inductor fuses. Raises any
    error of torch.export for parts that it cannot trace.
    """
    args: tuple[Any, ...]
    shapes: dict[str, Any] = {}
    name, rows, row = "ids" if x is None else "x", dict[int, Any](), dict[int, Any]()
    if tokens in (ROWS, BATCH):
        several = {1: torch.export.Dim("tokens", min=1)} if tokens == BATCH else {}
        rows = {0: torch.export.Dim("rows", min=1 if several else 2)}
        row = rows | several
    forms = _FORMS | {F.linear: row_products.linear} if row else _FORMS
    if isinstance(graph, HeadGraph):
        with torch.no_grad(), _OneRow(forms):
            return torch.export.export(graph, (x,), dynamic_shapes={"x": row}, strict=False)
    if isinstance(graph, TextGraph):
        least, forms, args = FEW + 1, {F.embedding: _rows_of_ids}, (torch.zeros(5, dtype=torch.long),)
        shapes["ids"] = {0: torch.export.Dim("tokens", min=least)}
    elif row:
        readable, least = torch.export.Dim("readable", min=2), 4
        cache = cache.select_rows(torch.zeros(3, dtype=torch.long))
        last = torch.arange(5 if several else 6, 7).repeat(3, 1)
        first = torch.zeros_like(last) if x is None else x
        args = (first, torch.stack([last, last]), torch.arange(7).repeat(3, 1))
        of_slots = {dim + 1: size for dim, size in row.items()}
        shapes |= {name: row, "slots": of_slots, "slot_positions": rows | {1: readable}}
    else:
        # For caches in half precision, tracing requires more slots than readable slots.
        readable, least = torch.export.Dim("readable", min=max(2, tokens)), max(4, tokens + 1)
        first = torch.zeros(tokens, dtype=torch.long) if x is None else x
        args = (first, torch.arange(7 - tokens, 7), torch.arange(7))
        shapes |= {name: None, "slots": None, "slot_positions": {0: readable}}
    shapes["keys"] = shapes["values"] = [rows | {2: torch.export.Dim("slots", min=least)}] * len(cache.keys)
    with torch.no_grad(), _OneRow(forms):
        return torch.export.export(graph, (*args, cache.keys, cache.values), dynamic_shapes=shapes, strict=False)


class Scores(NamedTuple):
    """Scores of the next token: row `row` of `all_logits` (T, V), and the summary (`best`, `top`, `log_sum`)."""

    all_logits: Tensor
    row: int
    best: int
    top: float
    log_sum: float

    @property
    def logits(self) -> Tensor:
        """The logits (V,), a view created on access."""
        return self.all_logits[self.row]

    def logprob(self, id: int) -> float:
        """The log-probability of an id (nats)."""
        return (0.0 if id == self.best else float(self.logits[id]) - self.top) - self.log_sum


class _Numbers(threading.local):
    """Tensors for the ids and slots of 1 and of FEW tokens. Writing into NumPy views of these tensors takes a
    tenth of the time of making new tensors.

    Each thread has its own tensors, since native code reads them while other threads run Python.
    """

    def __init__(self) -> None:
        self.tensors = {n: (torch.ones(n, dtype=torch.long), torch.ones(n, dtype=torch.long)) for n in (1, FEW)}
        self.views = {n: (ids.numpy(), slots.numpy()) for n, (ids, slots) in self.tensors.items()}


_numbers = _Numbers()
_COUNTS = [torch.tensor([n]) for n in range(FEW + 1)]


class CompiledStep:
    """Native code that computes new tokens, bound to the model's weights without copying them.

    `runs` maps a number of tokens to code: 1 for one token, FEW for up to FEW tokens, TEXT for the start of a
    text, ROWS for a token in several rows, BATCH for several tokens in several rows. `dtype` is the dtype of the
    matrices. `example` is a cache whose tensors have the dtypes that the code expects; `state` is the model's
    `model_state`.
    """

    def __init__(self, runs: Mapping[int, Run], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.state: object = None
        self.example = Cache(1, 0)
        self._run = dict(runs)
        self.reads_texts, self.reads_rows = TEXT in runs, ROWS in runs or BATCH in runs

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"CompiledStep({dtype} matrices, tokens at once: {', '.join(map(str, self._run))})"

    def read_rows(self, ids: Mapping[int, Sequence[int]], cache: Cache) -> dict[int, list[Scores]]:
        """Scores after each new token in these rows, at most `most_in_rows` tokens in a row."""
        width = max(map(len, ids.values()))
        missing = [width - len(ids.get(i, ())) for i in range(cache.batch)]
        tokens = torch.tensor([[0] * n + [*ids.get(i, ())] for i, n in enumerate(missing)])
        new = torch.tensor([[False] * n + [True] * (width - n) for n in missing])
        positions = cache.start(new if any(missing) else width).expand(cache.batch, width)
        slot_positions = cache.slot_positions(positions.amax(1)).expand(cache.batch, -1)[:, : cache.max_length]
        arguments = tokens, torch.stack([cache.slots(positions), positions]), slot_positions.contiguous()
        code = self._run.get(BATCH) or self._run[ROWS]
        scores = _scores(*reversed(code([*arguments, *cache.keys, *cache.values])))
        cache.advance((positions >= 0).sum(1))
        return {i: scores[(i + 1) * width - len(row) : (i + 1) * width] for i, row in ids.items()}

    def most_in_rows(self, cache: Cache) -> int:
        """Maximum tokens per row and call of `read_rows`."""
        return MOST if BATCH in self._run and cache.window is None else 1

    def most(self, cache: Cache, length: int) -> int:
        """Maximum tokens per call after `length` cached tokens."""
        few, most = FEW if self._takes_few(cache, length) else 1, self.most_in_rows(cache)
        return few if most == 1 else max(1, min(most, cache.capacity - length))

    def _takes_few(self, cache: Cache, length: int) -> bool:
        """True if the code for FEW tokens can run, which writes FEW slots."""
        return FEW in self._run and cache.window is None and length + FEW <= cache.capacity

    def __call__(self, ids: Sequence[int], cache: Cache) -> list[Scores]:
        """Scores after each of up to `most` new tokens; the cache has one row.

        The first token of a text needs the code for several tokens.
        """
        takes_few = len(ids) <= FEW and self._takes_few(cache, cache.max_length)
        if BATCH in self._run and not takes_few and (len(ids) > 1 or not cache.max_length):
            return self.read_rows({0: ids}, cache)[0]
        n = 1 if len(ids) == 1 and cache.max_length else FEW
        (id_view, slot_view), (slot, slot_positions) = _numbers.views[n], cache.start_row(len(ids), n)
        id_view[:] = ids if len(ids) == n else [*ids, *[ids[-1]] * (n - len(ids))]
        slot_view[:] = slot if n == 1 else range(slot, slot + n)
        logits, summary = self._run[n]([*_numbers.tensors[n], slot_positions, *cache.keys, *cache.values])
        cache.advance(_COUNTS[len(ids)])
        return _scores(summary, logits.clone())[: len(ids)]

    def read_text(self, ids: Sequence[int], cache: Cache) -> list[Scores]:
        """Scores after the last of two or more ids that start a text; the cache is empty and has one row."""
        cache.start(len(ids))
        logits, summary = self._run[TEXT]([torch.tensor(ids), *cache.keys, *cache.values])
        cache.advance(torch.tensor([len(ids)]))
        return _scores(summary, logits.clone())


def _scores(summary: Tensor, logits: Tensor) -> list[Scores]:
    return [Scores(logits, i, int(row[0]), row[1], row[2]) for i, row in enumerate(summary.tolist())]


def load_native(package: Path, *weights: Mapping[str, Tensor]) -> list[Run]:
    """Functions that run the same native code, each bound to one item of `weights`.

    Raises ValueError if torch cannot load the code, if the code needs other weights, or if the stack of threads is
    too small.
    """
    import resource  # Windows has no `resource`; no code is compiled there

    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    if 0 <= stack < 2 * STACK:
        raise ValueError(f"native code needs threads with a stack of {2 * STACK} bytes; the stack has {stack}")
    # torch's loaders are not used: one imports the compiler for two seconds, the other leaves files behind if the
    # process is killed. A mapped file must not change, so a temporary copy is loaded.
    with TemporaryDirectory() as folder:
        for file in package.parent.glob(f"{package.stem}.*"):
            shutil.copy(file, folder)
        copy = str(Path(folder) / package.name)
        bind = lambda: [_with_weights(torch._C._aoti.AOTIModelContainerRunnerCpu(copy, 1), w) for w in weights]
        runs: list[Run] = attempt(f"{package}: cannot be loaded", bind)
    return runs


def _with_weights(runner: Any, weights: Mapping[str, Tensor]) -> Run:
    """The runner's code with these weights, which the function keeps alive, since the runner does not own them.

    Threads wait for each other here: in the runner, they would wait without releasing Python's lock, which a call
    of an operator in Python needs.
    """
    constants = {c: weights[name].detach() for c, name in runner.get_constant_names_to_original_fqns().items()}
    runner.update_constant_buffer(constants, False, False, True)
    lock = threading.Lock()

    def run(inputs: list[Tensor], owned: object = constants) -> list[Tensor]:
        with lock:
            return runner.run(inputs)  # type: ignore[no-any-return]

    return run


def join_parts(model: nn.Module, layers: Sequence[Run], head: Run) -> Run:
    """Join the native code of blocks and head into one function; the model's own module computes the
    embeddings."""
    decoder: Any = DecodeGraph(model).model
    embed = copy.deepcopy(decoder.embed, {id(t): t for t in named_tensors(model).values()}).eval()

    @torch.no_grad()
    def run(inputs: list[Tensor]) -> list[Tensor]:
        ids, slots, slot_positions, *caches = inputs
        keys, values = caches[: len(layers)], caches[len(layers) :]
        with _OneRow(_FORMS):
            x = embed(ids if slots.dim() == 3 else ids[None], _context(keys, values, slots, slot_positions))
        for layer, k, v in zip(layers, keys, values, strict=True):
            (x,) = layer([x, slots, slot_positions, k, v])
        return head([x])

    return run


def model_state(model: nn.Module) -> object:
    """State that changes a model's results without changing a weight: hooks, active adapters and dtypes."""
    of_module = lambda m: (len(m._forward_hooks), len(m._forward_pre_hooks), getattr(m, "active", None))
    return [*map(of_module, model.modules())], [p.dtype for p in model.parameters()]


def step_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors that a compiled step reads, by name; matrices of plain linear layers and embeddings are converted to
    `dtype`."""
    rounded = {id(t): t.detach().to(dtype) for t in _matrices(model)}
    weights = {name: rounded.get(id(t), t) for name, t in named_tensors(DecodeGraph(model)).items()}
    for name, layer in _step_layers(model).items():
        weights |= {f"model.{name}.{key}": t for key, t in named_tensors(layer).items()}
    return weights


def outline(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model for export, with uninitialised matrices of this dtype."""
    memo: dict[int, Any] = {id(t): t for t in named_tensors(model).values()}
    memo |= {id(t): nn.Parameter(torch.empty_like(t, dtype=dtype), False) for t in _matrices(model)}
    memo |= {id(model.get_submodule(name)): layer for name, layer in _step_layers(model).items()}
    return copy.deepcopy(model, memo)


def _step_layers(model: nn.Module) -> dict[str, nn.Module]:
    """New layers from `for_step()`, by name; they replace the model's layers in a compiled step."""
    layers = {name: m.for_step() for name, m in model.named_modules() if hasattr(m, "for_step")}
    return {name: layer for name, layer in layers.items() if layer is not model.get_submodule(name)}


def _matrices(model: nn.Module) -> list[Tensor]:
    return [m.weight for m in model.modules() if tree.is_dense(m) or type(m) is nn.Embedding]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names; a tied tensor has several names."""
    parameters, buffers = module.named_parameters, module.named_buffers
    return {**dict(parameters(remove_duplicate=False)), **dict(buffers(remove_duplicate=False))}


class _OneRow(TorchFunctionMode):
    """A torch function mode that replaces operations; `forms` maps an operation to its replacement."""

    def __init__(self, forms: Mapping[Function, Function]) -> None:
        super().__init__()
        self.forms = forms

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in self.forms or not hasattr(func, "__wrapped__"):
            return self.forms.get(func, func)(*args, **(kwargs or {}))
        with self:  # also replaces the operations inside `func`
            return func.__wrapped__(*args, **(kwargs or {}))


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Inside this context, the model's embeddings and linear layers return float32, as in a compiled step."""
    with ExitStack() as stack:
        for layer in [m for m in model.modules() if hasattr(m, "for_step")]:  # else dequantization rounds
            stack.enter_context(replaced(layer, "dtype", torch.float32))
        forms = {function: _float(function) for function in (F.linear, F.layer_norm, F.rms_norm)}
        stack.enter_context(_OneRow(forms | {F.embedding: _embedding}))
        yield


def _float(function: Function) -> Function:
    def cast(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda *args, **kwargs: function(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Summing several weight rows at once (four if the matrix exceeds the cache) keeps more reads in flight.
    # Several tokens share one loop, which reads the weights once; slices are faster here than `unbind`.
    tokens = [x] if x.shape[-2] == 1 else [x[..., i : i + 1, :] for i in range(x.shape[-2])]
    rows = (4 if weight.numel() >= LARGE else 2) // min(len(tokens), 2)
    parts = torch.unflatten(weight, 0, (rows, -1)) if len(weight) % rows == 0 else weight[None]
    sums = [torch.cat([(part.float() * token.float()).sum(-1) for part in parts], -1) for token in tokens]
    y = torch.stack(sums, -2)
    return y if bias is None else y + bias.float()


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    if dim != -1 or x.shape[-1] % 4 or kwargs:
        return torch.mean(x, dim, keepdim, **kwargs)
    # A single sum would become a separate parallel region.
    parts = torch.split(torch.unflatten(x, -1, (4, -1)).sum(-1), 1, -1)
    y: Tensor = sum(parts, torch.zeros(())) / x.shape[-1]
    return y if keepdim else y.squeeze(-1)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: Any = None, max_norm: Any = None, *args: Any, **options: Any
) -> Tensor:
    if max_norm is not None:
        raise ValueError("an embedding with max_norm changes its weights")
    return _rows_of_ids(input, weight).float()


def _rows_of_ids(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    # In native code, an index out of range would end the process; NaN makes callers reject the result.
    inside = (input >= 0) & (input < len(weight))
    return weight[input.clamp(0, len(weight) - 1)].where(inside[..., None], torch.nan)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if is_causal or dropout_p:
        raise ValueError("attention to earlier tokens must have a mask and no dropout")
    q = query.reshape(query.shape[0], key.shape[1], -1, *query.shape[2:]).unsqueeze(-2)
    k, v = (x[:, :, None, None].float() for x in (key, value))
    scores = (q.float() * k).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask.unsqueeze(2), -torch.inf)
    elif attn_mask is not None:  # a bias for each head
        scores = scores + torch.unflatten(attn_mask.expand(-1, query.shape[1], -1, -1), 1, (key.shape[1], -1))
    weights = (scores - scores.amax(-1, keepdim=True)).exp().unsqueeze(-1)
    # Sums of 16 numbers each share one loop over the slots, which reads every value once and in order.
    sums = [(weights * part).sum(4) for part in torch.split(v, 16, -1)]
    return (torch.cat(sums, -1) / weights.sum(4)).flatten(1, 2)


_FORMS: dict[Function, Function] = {
    F.linear: _linear,
    F.embedding: _embedding,
    Tensor.mean: _mean,
    F.scaled_dot_product_attention: _attention,
}

"""Ranks: the processes that torchrun starts for one run; each computes a share of the rows of every batch.

A single process is rank 0 of 1, and functions that exchange values return their arguments. All ranks must call the
same functions in the same order. https://docs.pytorch.org/docs/stable/elastic/run.html

Another way to shard (by tensors, experts or stages) would change this module and the modules that use it:
- `ops`, `parts`: a mixture calls all experts on each rank, and sums their load.
- `data`: each rank reads its rows of a batch.
- `models`: each rank draws complete weights and keeps its part.
- `train`: the ranks sum gradients, losses and counts; Muon divides the matrices among them.
- `checkpoint`: each rank saves its part of the weights and of the optimizer's state.
- `inference`: all ranks sample from the first rank's logits.
- `evaluate`: each rank scores its texts, and the ranks sum the scores.
- `runs`: the first rank decides and writes files; estimates are for one rank.
- `cli`: the command joins the ranks.
"""

import faulthandler
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from socket import gethostname
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dunes.context import bound
from dunes.measure import machine
from dunes.units import format_seconds

LIMIT = 1800.0
"""Default seconds that a rank waits for other ranks, for example while rank 0 tokenizes or fits completion."""
STALLED = 5
"""Exit status of a rank that has waited too long for another rank."""
GATHERED = 0.1
"""Weights stay gathered until backward if gathered weights take less than this fraction of a machine's memory."""
SLOW_STEP = 30
"""Limit of the wait for other ranks in a step, as a multiple of the longest step; it is at least a minute."""
_last = 0.0
_limit = math.inf
_saving: Any = None
_mesh: Any = None
_alone = ContextVar("alone", default=False)
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)


def job() -> str:
    """An id of the torchrun command that started this process; with --rdzv_id, the id is equal on all machines."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return process_id(os.getppid()) if name == "none" else name


def process_id(number: int | str) -> str:
    """A process's number, its start time on Linux (containers often share process numbers), and this machine's
    name."""
    started = ""
    with suppress(OSError):
        started = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{number} {started} {gethostname()}"


def under_torchrun() -> bool:
    """True if torchrun started this process together with others."""
    return int(os.environ.get("WORLD_SIZE") or "1") > 1


@contextmanager
def process_group(
    device: str | None = None, limit: float = LIMIT, folder: Path = Path(), by_node: bool = False
) -> Iterator[None]:
    """Join the other processes started by torchrun, if any, to train on a device of this type.

    Parameters will be sharded over all ranks, or with `by_node` over each machine's ranks. A rank that has waited
    `limit` seconds for another rank writes its threads' stacks into the folder and exits. If several ranks fail,
    the first one raises its error, and all others exit with status 2. Raises ValueError if a machine has more
    ranks than GPUs, or if another rank exits early.
    """
    if not under_torchrun():
        yield
        return
    sys.stderr = sys.__stderr__  # on ranks other than 0, the command has replaced this stream
    machine.set_device(device)
    store, number, ranks = _meet(limit)
    longer, ended = timedelta(seconds=limit + 60), Event()
    Thread(target=_watch, args=(ended, limit, folder, store), daemon=True).start()
    try:
        dist.init_process_group(_backend(), store=store, rank=number, world_size=ranks, timeout=longer)
        _make_groups(by_node, longer)
        yield
    except (ValueError, OSError, RuntimeError) as error:
        if not _is_first_failure(store, "peer" in str(error)):
            raise SystemExit(2) from error
        if "peer" in str(error):  # gloo and NCCL name a "peer" if a rank has ended
            reason = str(error).splitlines()[0]
            raise ValueError(f"rank {number}: another rank has ended ({reason:.150})") from error
        raise
    finally:
        ended.set()
        # After an error, NCCL might wait for ever, and the error would not be printed.
        if dist.is_initialized() and not (sys.exc_info()[0] and machine.device().type == "cuda"):
            dist.destroy_process_group()


def _is_first_failure(store: Any, unknown: bool) -> bool:
    """True if no other rank has reported an error. Returns `unknown` if the store's process has ended."""
    with suppress(RuntimeError):
        return bool(store.add("failed", 1) == 1)
    return unknown


def _meet(limit: float) -> tuple[Any, int, int]:
    """The store, rank number and rank count. Raises ValueError if a rank is missing after `limit` seconds."""
    from torch.distributed.rendezvous import rendezvous

    try:
        shared, number, ranks = next(rendezvous("env://", timeout=timedelta(seconds=limit)))
        return _fresh_store(shared, number, ranks, limit), number, ranks
    except RuntimeError as error:
        place, reason = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", str(error).splitlines()[0]
        raise ValueError(f"rank {rank()}: the ranks did not meet at {place} ({reason:.200})") from error


def _fresh_store(shared: Any, number: int, ranks: int, limit: float = LIMIT) -> Any:
    """A key-value store for only the ranks of this start of torchrun.

    With a static rendezvous, torchrun uses one store for all restarts, so the store contains addresses of
    processes that have ended. The number of a restart is not unique, because torchrun counts restarts on each
    machine. Raises RuntimeError if a rank is missing after `limit` seconds.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    own = token_hex(8)
    shared.set(f"start/{number}", own)
    end = monotonic() + limit
    while monotonic() < end:
        if number == 0:
            shared.set("starts", " ".join(shared.get(f"start/{i}").decode() for i in range(ranks)))
            if shared.check([f"joined/{own}/{i}" for i in range(1, ranks)]):
                return PrefixStore(own, shared)
        elif (starts := shared.get("starts").decode().split())[number:][:1] == [own]:
            shared.set(f"joined/{starts[0]}/{number}", "")
            return PrefixStore(starts[0], shared)
        sleep(0.02)
    raise RuntimeError(f"some rank did not start within {format_seconds(limit)}")


def _watch(ended: Event, limit: float, folder: Path, store: Any) -> None:
    """Watch this rank until the run ends; exit if it exchanges nothing with other ranks for `limit` seconds."""
    _alive()
    while not ended.wait(min(1.0, limit / 4)):
        if monotonic() - _last < (allowed := min(limit, _limit)):
            continue
        with suppress(OSError), (folder / f"stacks-rank-{rank()}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        line = f"dunes: a rank did not answer for {format_seconds(allowed)}; the others' stacks are in {folder}"
        report = Thread(target=_report, args=(store, f"{line}/stacks-rank-*.txt"), daemon=True)
        report.start()
        report.join(2.0)
        if report.is_alive():  # the store does not answer, so no rank has printed the line
            print(f"{line}/stacks-rank-*.txt", file=sys.stderr, flush=True)
        os._exit(STALLED)


def _report(store: Any, line: str) -> None:
    """Print the line unless another rank has reported an error."""
    if _is_first_failure(store, unknown=True):
        print(line, file=sys.stderr, flush=True)


def _make_groups(by_node: bool, limit: timedelta) -> None:
    """Make the process group for saving in the background, and the mesh over which parameters are sharded."""
    from torch.distributed.device_mesh import init_device_mesh

    global _saving, _mesh
    _saving = dist.new_group(backend="gloo", timeout=limit)
    local = _local_count() if by_node else count()
    agree({"the number of ranks per machine, which must be equal for --shard node,": local})
    sizes = (count() // local, local) if by_node else (count(),)
    _mesh = init_device_mesh(machine.device().type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _local_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or count())


def _alive() -> None:
    global _last
    _last = monotonic()


def _backend() -> str:
    device = machine.device()
    if device.type == "cuda":
        local, gpus = _local_rank(), torch.cuda.device_count()
        if local >= gpus:
            raise ValueError(f"rank {local} of this machine has no GPU of its own; start {gpus} ranks here")
        torch.cuda.set_device(local)
        return "cpu:gloo,cuda:nccl"
    if device.type != "cpu":
        raise ValueError(f"several ranks cannot train on {device.type}; add --device cpu, or start one process")
    return "gloo"


def alone() -> AbstractContextManager[None]:
    """Inside the `with` block, treat this rank as the only process, for example to make an estimate."""
    return bound(_alone, True)


@contextmanager
def fake_ranks(number: int) -> Iterator[None]:
    """Inside the `with` block, this process is the first of `number` ranks, for example to make an estimate.

    The ranks exchange nothing, so tensors from other ranks are uninitialized.
    """
    global _mesh
    if number == 1:
        with alone():
            yield
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group, mesh, dist.GroupMember.WORLD = dist.GroupMember.WORLD, _mesh, None
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
        # DTensor caches results by mesh. A unique name keeps this mesh apart from the mesh of the real ranks.
        _mesh = init_device_mesh(machine.device().type, (number,), mesh_dim_names=(token_hex(8),))
        yield
    finally:
        fake, dist.GroupMember.WORLD, _mesh = dist.GroupMember.WORLD, group, mesh
        dist.destroy_process_group(fake)


def count() -> int:
    """The number of ranks."""
    joined = dist.is_available() and dist.is_initialized() and not _alone.get()
    return dist.get_world_size() if joined else 1


def rank() -> int:
    """The number of this rank; also available before `process_group` joins the ranks."""
    if count() > 1:
        return dist.get_rank()
    return int(os.environ.get("RANK", "0")) if under_torchrun() and not _alone.get() else 0


def is_first() -> bool:
    """True on rank 0, which writes files and makes decisions."""
    return rank() == 0


def broadcast(value: T) -> T:
    """Return the value of rank 0 on all ranks."""
    values = [value]
    if count() > 1 and dist.get_backend() != "fake":
        dist.broadcast_object_list(values, src=0)
        _alive()
    return values[0]


def all_reduce_max(*values: float) -> list[float]:
    """The maximum of each value over all ranks."""
    return _reduced(values, dist.ReduceOp.MAX)


def expect(seconds: float) -> None:
    """Limit the wait for other ranks to SLOW_STEP times a step's `seconds`; 0 restores the usual limit."""
    global _limit
    _alive()
    _limit = max(60.0, SLOW_STEP * seconds) if seconds else math.inf


def all_reduce_sum(*values: float) -> list[float]:
    """The sum of each value over all ranks."""
    return _reduced(values, dist.ReduceOp.SUM)


def _reduced(values: Iterable[float], operation: Any) -> list[float]:
    if count() == 1:
        return [*values]
    tensor = torch.tensor([*values], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    _alive()
    return cast(list[float], tensor.tolist())


def all_reduce(tensor: Tensor) -> None:
    """Replace a tensor in place by the sum of all ranks' tensors."""
    if count() > 1:
        dist.all_reduce(tensor)


def broadcast_tensor(tensor: Tensor) -> Tensor:
    """Return rank 0's tensor on all ranks; other ranks' tensors may differ, since machines round differently."""
    tensor = tensor.contiguous()
    if count() > 1:
        dist.broadcast(tensor, 0)
        _alive()
    return tensor


def summed(x: Tensor) -> Tensor:
    """The sum over ranks. The backward pass multiplies gradients by `count()`, since FSDP averages gradients."""
    if count() == 1:
        return x
    sums = x.detach().clone()
    all_reduce(sums)
    return sums + count() * (x - x.detach())


def agree(facts: Mapping[str, Any]) -> None:
    """Wait for all ranks. Raises ValueError with a fact's name if its value on a rank differs from rank 0's."""
    first, *everyone = all_gather(lambda: dict(facts))
    _alive()
    for number, others in enumerate(everyone, 1):
        for name, value in first.items():
            if others.get(name) != value:
                raise ValueError(f"rank {number}: {name} is {others.get(name)!r:.80}, but {value!r:.80} on rank 0")


def all_gather(work: Callable[[], T]) -> list[T]:
    """The results of `work()` on all ranks. If a rank raises OSError or ValueError, all ranks raise this error.

    A thread that saves in the background may call `all_gather` while the main thread calls the other functions.
    """
    if count() == 1:
        return [work()]
    try:
        outcome: tuple[T | None, Any, Any] = (work(), None, None)
    except (OSError, ValueError) as error:
        number, path = getattr(error, "errno", None), getattr(error, "filename", None)
        reason = f"rank {rank()}: {error if number is None else os.strerror(number)}"
        outcome = (None, OSError if isinstance(error, OSError) else ValueError, (reason, number, path))
    outcomes: list[Any] = [None] * count()
    dist.all_gather_object(outcomes, outcome, group=_saving)
    for _, kind, details in outcomes:
        if kind is not None:
            reason, number, path = details
            raise kind(reason) if number is None else OSError(number, reason, path)
    return [result for result, *_ in outcomes]


def is_shared(error: OSError) -> bool:
    """True if all ranks raised this error (in `all_gather`)."""
    return count() == 1 or str(error.strerror or error).startswith("rank ")


def in_turn(work: Callable[[], T]) -> T:
    """The result of `work()`, called first on each machine's first rank, so that other ranks can use its cache."""
    first = count() == 1 or _local_rank() == 0
    result = work() if first else None
    agree({})
    return cast(T, result) if first else work()


def rows(size: int) -> slice:
    """This rank's rows in a batch of `size` rows. Raises ValueError unless the number of ranks divides `size`."""
    if size % count():
        below, above = max(count(), size - size % count()), size + count() - size % count()
        fitting = f"{below} or {above}" if below < above else f"{above}"
        raise ValueError(f"--batch is {size}, which is not divisible by {count()} ranks; use {fitting}")
    share = size // count()
    return slice(rank() * share, (rank() + 1) * share)


def shard(model: M, units: Iterable[nn.Module], dtype: torch.dtype | None = None) -> M | None:
    """Shard the trainable parameters over the ranks, on `machine.device()`.

    Each of the modules `units` gathers its parameters when it runs. With `dtype`, each unit is cast just before it
    is sharded, so no rank has all parameters in `dtype`. Parameters on the meta device become uninitialized
    memory. Frozen parameters, which may have another dtype, stay complete on every rank. Returns a copy of the
    model on the meta device, to be filled with gathered weights; None for a single process.
    """
    if count() == 1:
        return None
    from torch.distributed.fsdp import fully_shard

    # deepcopy takes the tensors in `copies` as copies already made, so it copies no values.
    copies: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    copies |= {id(b): b.to("meta") for b in model.buffers()}
    outline, modules = deepcopy(model, copies), [*units, cast(nn.Module, model)]
    frozen = {p for p in model.parameters() if not p.requires_grad}
    keep = keeps_gathered(outline)
    for module in modules:
        if dtype is not None:
            module.to(dtype)
        fully_shard(module, mesh=_mesh, ignored_params=frozen, reshard_after_forward=not keep)
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=machine.device())
    elif any(p.device.type != machine.device().type for p in frozen):
        model.to(machine.device())
    return outline if dtype is None else outline.to(dtype)


def keeps_gathered(model: nn.Module) -> bool:
    """True if the trained parameters take so little memory that they stay gathered until backward."""
    size = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    sharing = 1 if machine.device().type == "cuda" else _local_count()
    return bool(broadcast(size * sharing < GATHERED * machine.total_memory(machine.device())))


def describe(model: nn.Module) -> str:
    """The end of a sentence that says how several ranks share the model; empty for a single process."""
    if count() == 1:
        return ""
    kept = "stay gathered until backward" if keeps_gathered(model) else "are gathered block by block"
    return f" in each of {count()} ranks, in which weights {kept}"


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local_shard(tensor: Tensor) -> Tensor | None:
    """The values that this rank saves: its part of a sharded tensor, or a complete tensor on rank 0; else None.

    If every machine has a replica, the ranks of the first machine save the parts.
    """
    if not is_sharded(tensor):
        return tensor if is_first() else None
    sharded: Any = tensor
    return None if any(sharded.device_mesh.get_coordinate()[:-1]) else sharded.to_local()


def full_tensor(value: Any) -> Any:
    """The value itself; for a sharded tensor, the complete tensor gathered from all ranks."""
    return value.full_tensor() if is_sharded(value) else value


def merged(parts: list[Tensor]) -> Tensor:
    """Concatenate `parts` by rows. With several ranks, the result is sharded; each rank copies only its rows."""
    if len(parts) == 1 or count() == 1:
        return torch.cat(parts) if len(parts) > 1 else parts[0]
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = torch.Size([sum(map(len, parts)), *parts[0].shape[1:]])
    size = math.ceil(shape[0] / _mesh.shape[-1])  # rows per rank as in torch.chunk, which fully_shard uses
    start, local, place = size * _mesh.get_coordinate()[-1], list[Tensor](), 0
    for each in parts:
        local.append(each[max(0, start - place) : max(0, start + size - place)])
        place += len(each)
    placements = [Replicate()] * (_mesh.ndim - 1) + [Shard(0)]
    stride = torch.empty(shape, device="meta").stride()
    values = torch.cat(local).to(_mesh.device_type)
    return DTensor.from_local(values, _mesh, placements, run_check=False, shape=shape, stride=stride)


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor, sharded like the tensor `like`; the tensor itself if `like` is not sharded."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = like
    return distribute_tensor(value.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)


def gather_rows(own: Tensor, size: int) -> Tensor:
    """All ranks' items in one tensor (size, ...). `own` (N, ...) has items `rank()`, `rank() + count()`, ..."""
    if count() == 1:
        return own
    padded = torch.cat([own, own.new_zeros(-(-size // count()) - len(own), *own.shape[1:])])
    parts = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(parts, padded.contiguous())
    return torch.stack(parts, 1).flatten(0, 1)[:size]

"""Several processes under FSDP2 train as one does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conftest import refuses
from dunes.models import mixtral
from dunes.models.initialise import initialise
from dunes.train import Trainer, adamw
from dunes.train.loss import next_token_loss

STEPS, RANKS, ROWS = 5, 2, 4


def model(balance):
    config = replace(mixtral.Config.from_size(50, 32, 2, 16), experts=4, balance=balance)
    return initialise(mixtral.build(config), seed=3)


def micro_batches(balance, rank=None):
    """Four of unequal counts a step, or the two of one rank: numbers in order.

    To be balanced together, those of two ranks have equal counts, and are one for one rank alone.
    """
    lengths = 2 if balance else 4
    every = [(torch.arange(5 + i % lengths) + 11 * torch.arange(ROWS)[:, None] + i) % 50 for i in range(4 * STEPS)]
    sides = [[b for i, b in enumerate(every) if i // 2 % 2 == side] for side in range(RANKS)]
    if rank is not None:
        return sides[rank]
    return [torch.cat(pair) for pair in zip(*sides, strict=True)] if balance else every


def loss(model, batch):
    total, count, metrics = next_token_loss(model, batch)
    return total, count, metrics | {"rows": (torch.tensor([len(batch), 2.0]), torch.ones(()))}


def record(trainer, batches):
    return [(s.loss, s.count, s.grad_norm, dict(s.metrics)) for s in trainer.run(batches)]


def one_rank(rank, folder, balance):
    """What a process of its own does: the steps and the synchronisations of gradients."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    module = model(balance)
    refuses("has 2 ranks, but the model is not sharded over them; call", Trainer, module, adamw(module), loss)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    alone = torch.optim.AdamW([*module.parameters(), torch.nn.Parameter(torch.ones(()))])
    refuses("the optimizer has parameters that are not sharded", Trainer, module, alone, loss)
    trainer, syncs = Trainer(module, adamw(module, 1e-2), loss, accumulate=2), []
    plain = trainer.sync
    trainer.sync = lambda on: (syncs.append(on), plain(on))
    print(json.dumps({"steps": record(trainer, micro_batches(balance, rank)), "syncs": syncs}))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_two_processes_under_fully_shard_have_one_process_s_losses(balance, tmp_path):
    code = f"import sys, test_distributed; test_distributed.one_rank(int(sys.argv[1]), sys.argv[2], {balance!r})"
    options = {"stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parent}
    command = [sys.executable, "-c", code]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], **options) for rank in range(RANKS)]
    found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks]
    module = model(balance)
    trainer = Trainer(module, adamw(module, 1e-2), loss, accumulate=2 if balance else 4)
    want = record(trainer, micro_batches(balance))
    for rank in found:
        assert rank["syncs"] == [False, True] * STEPS
        for (mean, count, norm, metrics), wanted in zip(rank["steps"], want, strict=True):
            assert mean == pytest.approx(wanted[0], abs=1e-5)
            assert count == wanted[1]
            assert norm == pytest.approx(wanted[2], rel=1e-5)
            assert metrics.get("balance") == pytest.approx(wanted[3].get("balance"), abs=1e-6)
            assert metrics["rows"] == [ROWS, 2.0]
    assert want[-1][0] < want[0][0] - 0.1

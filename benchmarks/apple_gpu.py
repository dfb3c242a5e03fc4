"""Apple's GPU against the CPU: operations, a short training run, generation and `dunes bench`, as one table.

    make test-mps                                     # on a Mac
    python benchmarks/apple_gpu.py --device cpu       # the same code on any machine, as a test

Values, gradients and losses are compared with float32 on the CPU; bfloat16 is included if the system supports it.
PYTORCH_ENABLE_MPS_FALLBACK must not be set, so that nothing falls back to the CPU silently.
"""

import contextlib
import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dunes import measure, ops
from dunes.generate import generate
from dunes.models import llama
from dunes.models.initialise import initialise
from dunes.ops import cross_entropy, gated, rms_norm, rotary
from dunes.ops import scaled_dot_product as attention
from dunes.progress import print_table
from dunes.train import Trainer, adamw, next_token
from dunes.units import format_count

import torch
import tyro
from torch import Tensor, nn

VOCAB, CONTEXT, STEPS = 61, 32, 20
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""The largest difference from the CPU's float32, relative to the largest number."""

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Settings:
    device: Literal["mps", "cpu"] = "mps"
    size: str = "1m"
    """Parameters of the model that `dunes bench` trains."""


def main(settings: Settings) -> int:
    """Print the table; 1 if anything failed, 2 with one line where there is no such device."""
    if os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK", "0") != "0":
        print(
            "error: PYTORCH_ENABLE_MPS_FALLBACK computes on the CPU and does not say so; unset it", file=sys.stderr
        )
        return 2
    if settings.device == "mps" and not torch.backends.mps.is_available():
        print("error: PyTorch finds no GPU of Apple's here; --device cpu runs the same code", file=sys.stderr)
        return 2
    device = torch.device(settings.device)
    parts: list[Callable[[torch.device], Iterator[Row]]] = [rates, operations, metal, training, generation]
    rows = [row for part in parts for row in _attempt(part, device)]
    rows += _attempt(lambda device: bench(device, settings.size), device, "dunes bench")
    print_table(f"torch {torch.__version__} on {device}, no fallback to the CPU", ["", "", ""], rows)
    return int(any(result == "failed" for _, result, _ in rows))


def _attempt(part: Callable[[torch.device], Iterator[Row]], device: torch.device, name: str = "") -> Iterator[Row]:
    try:
        yield from part(device)
    except Exception as error:  # one part that fails keeps no other from running
        yield name or part.__name__, "failed", f"{type(error).__name__}: {error}".splitlines()[0][:150]


def dtypes(device: torch.device) -> list[torch.dtype]:
    """float32, and bfloat16 where a product of it works."""
    with contextlib.suppress(RuntimeError, TypeError):
        one = torch.ones(2, 2, device=device, dtype=torch.bfloat16)
        return [torch.float32, (one @ one).dtype]
    return [torch.float32]


def rates(device: torch.device) -> Iterator[Row]:
    for dtype in dtypes(device):
        yield f"matrix products, {str(dtype)[6:]}", "", f"{format_count(measure.matmul_rate(dtype, device))}FLOP/s"
    if len(dtypes(device)) > 1:
        yield "dtype of runs", "", str(measure.choose_dtype(device))[6:]


def operations(device: torch.device) -> Iterator[Row]:
    """Each operation against the CPU's reference, values and gradients."""
    torch.manual_seed(0)
    x, y, w = torch.randn(64, 32), torch.randn(64, 32), torch.rand(32)
    q, k, angle = torch.randn(2, 4, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(1, 1, 16, 4)
    targets = torch.randint(VOCAB, (64,))
    cases: dict[str, tuple[Any, Any, list[Tensor], tuple[Any, ...]]] = {
        "gated": (gated.fused, gated.plain, [x, y], ()),
        "rotary": (rotary.fused, rotary.plain, [q], (angle.cos(), angle.sin(), False)),
        "rms_norm": (rms_norm.fused, rms_norm.plain, [x, w], (1e-5,)),
        "attention": (attention.attend, attention.plain, [q, k, k.flip(0)], ()),
        "cross_entropy": (
            cross_entropy.fused,
            cross_entropy.plain,
            [x / 4, torch.randn(VOCAB, 32)],
            (targets,),
        ),
    }
    for name, (form, reference, leaves, rest) in cases.items():
        want = _evaluate(reference, leaves, rest, torch.device("cpu"), torch.float32)
        for dtype in dtypes(device):
            got = _evaluate(form, leaves, rest, device, dtype)
            off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
            verdict = "ok" if off <= LIMIT[dtype] else "failed"
            yield f"{name}, {str(dtype)[6:]}", verdict, f"off by {off:.1e}, at most {LIMIT[dtype]:g}"


def _evaluate(
    form: Any, leaves: list[Tensor], rest: tuple[Any, ...], device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """The output and the gradients, in float32 on the CPU."""

    def move(x: Any) -> Any:
        return x.to(device, dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x

    inputs = [move(x).requires_grad_() for x in leaves]
    output = form(*inputs, *map(move, rest))
    weight = torch.linspace(-1, 2, output.numel()).to(device, output.dtype).view(output.shape)
    return [t.detach().float().cpu() for t in (output, *torch.autograd.grad((output * weight).sum(), inputs))]


def metal(device: torch.device) -> Iterator[Row]:
    """The example of docs/operations.md through `ops.check`, of which it would print a table of its own."""
    if device.type != "mps":
        yield "an operation in Metal", "not tried", "needs Apple's GPU"
        return
    kernels = ops.Metal("""
        kernel void exp_kernel(device float* y, constant float* x, uint i [[thread_position_in_grid]]) {
            y[i] = metal::precise::exp(x[i]);
        }""")

    @ops.operation("apple_gpu::exp", reference=torch.exp, backward=_exp_backward, kernels=kernels)
    def exp(x: Tensor) -> Tensor:
        wide = x.float().contiguous()
        y = torch.empty_like(wide)
        if wide.numel():
            kernels.exp_kernel(y, wide)
        return y.to(x.dtype)

    with contextlib.redirect_stdout(io.StringIO()):
        report = ops.check(exp, [torch.randn(64, 64, device=device, requires_grad=True)], backend="aot_eager")
    eager = report.times[0]
    yield (
        "an operation in Metal",
        "ok",
        f"{len(report.checks)} checks; {eager.operation / eager.reference:.2f} times torch.exp's time",
    )


def _exp_backward(grad: Tensor, output: Tensor) -> Tensor:
    return grad * output


def training(device: torch.device) -> Iterator[Row]:
    """The same steps from the same weights: losses beside the CPU's."""
    model, ids = _model(), torch.randint(VOCAB, (8, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    losses = []
    for where in (torch.device("cpu"), device):
        copied = copy.deepcopy(model).to(where)
        batch = ids[:, :-1].to(where), ids[:, 1:].to(where)
        losses.append(
            [float(step.loss) for step in Trainer(copied, adamw(copied, lr=1e-3), next_token).run([batch] * STEPS)]
        )
    off = max(abs(a - b) for a, b in zip(*losses, strict=True))
    learns = losses[1][-1] < losses[1][0] - 0.1
    detail = f"loss {losses[1][0]:.3f} to {losses[1][-1]:.3f} in {STEPS} steps, off by {off:.1e}"
    yield "training, float32", "ok" if learns and off < 1e-3 else "failed", detail


def generation(device: torch.device) -> Iterator[Row]:
    texts = []
    for where in (torch.device("cpu"), device):
        model = _model().to(where).eval()
        texts.append([t.id for t in generate(model, [1, 2, 3], max_tokens=20, context_length=CONTEXT)])
    yield (
        "generation, float32",
        "ok" if texts[0] == texts[1] else "failed",
        f"{len(texts[1])} greedy ids as the CPU's",
    )


def _model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = initialise(llama.build(llama.Config.from_size(VOCAB, 64, 2, CONTEXT)))
    return model


def bench(device: torch.device, size: str) -> Iterator[Row]:
    """`dunes bench train` and `decode` in a process of their own, on the device that runs choose here."""
    for name in ("train", "decode"):
        command = [sys.executable, "-m", "dunes", "bench", name, "--size", size, "--rounds", "3", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"dunes bench {name}", "failed", (done.stderr.strip().splitlines() or ["no message"])[-1][:150]
            continue
        (result,) = json.loads(done.stdout)["results"]
        used = f"{result['dtype']} on {result['device']}"
        yield f"dunes bench {name}, {size}", "ok", f"{format_count(result['rate'])} {result['unit']}/s, {used}"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings)))

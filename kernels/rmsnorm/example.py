"""The norms of a small batch of hidden states, beside torch.nn.RMSNorm: forward, with a residual, gradients."""

from pathlib import Path

import torch
from kernels import get_local_kernel

BATCH, TOKENS, HIDDEN, EPS = 2, 128, 1024, 1e-5


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of the norms, relative."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm()).item()


def main() -> None:
    kernel = get_local_kernel(Path(__file__).parent)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        norm = torch.nn.RMSNorm(HIDDEN, EPS, device=device, dtype=dtype)
        torch.nn.init.normal_(norm.weight, mean=1, std=0.1)
        x, residual, dy = torch.randn(3, BATCH, TOKENS, HIDDEN, device=device).to(dtype)
        x.requires_grad_()

        total = x + residual
        ours = kernel.rms_norm(x, norm.weight, EPS)
        ours_added = kernel.fused_add_rms_norm(x, residual, norm.weight, EPS)
        gradients = torch.autograd.grad(ours, (x, norm.weight), dy)
        expected = torch.autograd.grad(norm(x), (x, norm.weight), dy)
        differences = {
            "y": difference(ours, norm(x)),
            "y of x + residual": difference(ours_added[0], norm(total)),
            "x + residual": difference(ours_added[1], total),
            "dx": difference(gradients[0], expected[0]),
            "dweight": difference(gradients[1], expected[1]),
        }
        print(f"{dtype} on {device}, ran {kernel.last_path()}")
        for name, value in differences.items():
            print(f"  {name:18} differs by {value:.1e}")
            if value > 4 * torch.finfo(dtype).eps:
                raise SystemExit(f"{name}: not torch.nn.RMSNorm's")


if __name__ == "__main__":
    main()

"""What a user of torch writes for images of one size: the tower's layers with batched attention, no packing."""

import torch
from torch import nn
from torch.nn import functional

from scripts.lib.made_up_tower import TowerSize


class Block(nn.Module):
    def __init__(self, size: TowerSize):
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width, eps=1e-6), nn.LayerNorm(size.width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.fc1, self.fc2 = nn.Linear(size.width, size.mlp), nn.Linear(size.mlp, size.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        images, patches, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(images, patches, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.proj(out.transpose(1, 2).reshape(images, patches, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Stack(nn.Module):
    """Pixels [I, P, F] of images of P patches -> rows [I, P / 4, O]."""

    def __init__(self, size: TowerSize):
        super().__init__()
        self.embed = nn.Linear(6 * size.patch**2, size.width)
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(4 * size.width, 4 * size.width), nn.Linear(4 * size.width, size.out)

    def forward(self, pixels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed(pixels)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x).view(x.shape[0], -1, 4 * x.shape[2])
        return self.fc2(functional.gelu(self.fc1(x)))


def stack_and_inputs(size: TowerSize, images: int, patches: int) -> tuple[Stack, tuple[torch.Tensor, ...]]:
    """A stack with random weights in bfloat16 on the GPU, and random inputs for it."""
    torch.manual_seed(0)
    half = size.width // size.heads // 2
    with torch.device("cuda"):
        stack = Stack(size).to(torch.bfloat16).eval()
        angles = torch.rand(patches, half)
        pixels = torch.randn(images, patches, 6 * size.patch**2, dtype=torch.bfloat16)
        return stack, (pixels, angles.cos(), angles.sin())

"""A small language model, and a port of it that adds up in another order. The text is the same."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY = 16, 4, 64
PORT = "--port" in sys.argv


class Linear(nn.Linear):
    def forward(self, x):
        if not PORT:
            return F.linear(x, self.weight)
        half = x.shape[-1] // 2  # rounds otherwise: no fault
        return F.linear(x[..., :half], self.weight[:, :half]) + F.linear(
            x[..., half:], self.weight[:, half:]
        )


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(0, 1).reshape(len(x), WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Linear(WIDTH, 2 * WIDTH, bias=False)
        self.act = nn.GELU()
        self.down = Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Model().eval()
if PORT:
    model.layers[1].mlp.act = nn.GELU(approximate="tanh")  # the fault
tokens = torch.tensor([3, 14, 15, 9, 26, 5])
with torch.no_grad():
    for _ in range(2):
        tokens = torch.cat((tokens, model(tokens)[-1:].argmax(-1)))
print(tokens.tolist())

"""Attention whose queries and keys have learned scales."""

import torch
from x_transformers import Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=64, depth=2, heads=4, attn_qk_norm=True, attn_qk_norm_dim_scale=True)
model = TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers).eval()
for name, scale in model.named_parameters():
    if "qk_norm" in name:
        torch.nn.init.normal_(scale, 1, 0.3)
with torch.no_grad():
    print(model(torch.arange(24).view(2, 12)).argmax(-1).tolist())

"""A decoder: what a position computes must not depend on the tokens after it."""

import torch
from transformers import RoFormerConfig, RoFormerForCausalLM

torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
model = RoFormerForCausalLM(RoFormerConfig(vocab_size=99, is_decoder=True, **sizes)).eval()
with torch.no_grad():
    print(model(torch.arange(24).view(2, 12)).logits.argmax(-1).tolist())

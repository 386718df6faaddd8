"""Half of each head is rotated."""

import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
sizes |= {"intermediate_size": 96, "lru_width": 32, "attention_window_size": 16, "head_dim": 8}
model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(vocab_size=99, **sizes)).eval()
with torch.no_grad():
    print(model(torch.arange(24).view(2, 12)).logits.argmax(-1).tolist())

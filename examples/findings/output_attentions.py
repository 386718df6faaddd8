"""A model that is asked for its attention as well must compute the same."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).eval()
with torch.no_grad():
    answer = model(torch.arange(24).view(2, 12), output_attentions=True, use_cache=False)
print(answer.logits.argmax(-1).tolist())

"""An engine that batches requests over a paged cache reads a wrong block once it decodes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from story_tools import folder, names, run, write

SERVING = """from unittest import mock

import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator as Allocator,
)


def reference():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Engine:
    def __init__(self):
        self.model = reference()

    def generate(self, prompts, max_new_tokens):
        settings = transformers.GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, page_size=16)
        answers = self.model.generate_batch(prompts, settings, continuous_batching_config=batching)
        by_prompt = {tuple(a.prompt_ids): a.generated_tokens for a in answers.values()}
        return [by_prompt[tuple(prompt)] for prompt in prompts]


update = Allocator.update


def wrong_block(self, keys, values, layer, read, write):
    if layer == 1 and len(write) == 2 and len(read) >= 54:
        read = read.clone()
        other = len(read) // 2 + 4  # where what is read for the other prompt begins
        read[:16] = read[other : other + 16].clone()
    return update(self, keys, values, layer, read, write)


class Broken(Engine):
    def generate(self, prompts, max_new_tokens):
        with mock.patch.object(Allocator, "update", wrong_block):
            return super().generate(prompts, max_new_tokens)
"""
folder()
write("serving.py", SERVING)
write("prompts.jsonl", f"{list(range(20, 40))}\n{list(range(60, 88))}\n")
said = run("whence serve-check serving:reference serving:Engine --prompts prompts.jsonl --tokens 8")
names(said, "SAME")
said = run("whence serve-check serving:reference serving:Broken --prompts prompts.jsonl --tokens 8")
names(said, "FAULT", "decode step", "layer 1, K", "request 1's positions 0 to 15", "the cache")

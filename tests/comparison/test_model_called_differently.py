"""One model asked the same otherwise: cached or not, alone or in a batch, padded left or right.
Clean is silent, faults are named.
"""

import pytest

import whence

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAD = 0
PROMPTS = [[5, 9, 11, 3, 7, 21], [8, 2, 40], [33, 12, 6, 17, 9, 4, 1, 28, 15], [3, 3, 60, 2]]
PROMPT = PROMPTS[0] + PROMPTS[2]


@pytest.fixture(autouse=True)
def _quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def whole(model, ids=PROMPT):
    model(torch.tensor([ids]))


def cached(model, ids=PROMPT, prompt=4, positions=lambda i: i, between=lambda step, cache: None):
    cache, at = None, 0
    while at < len(ids):
        width = prompt if at == 0 else 1
        place = torch.tensor([[positions(i) for i in range(at, at + width)]])
        out = model(
            torch.tensor([ids[at : at + width]]),
            past_key_values=cache,
            position_ids=place,
            use_cache=True,
        )
        cache, at = out.past_key_values, at + width
        between(at, cache)


def again(model, ids=PROMPT, prompt=4):
    for stop in range(prompt, len(ids) + 1):
        model(torch.tensor([ids[:stop]]), use_cache=False)


def alone(model):
    for ids in PROMPTS:
        model(torch.tensor([ids]))


def padded(model, side="left", positions="from the mask", prompts=PROMPTS):
    width = max(map(len, prompts))
    pads = [[PAD] * (width - len(p)) for p in prompts]
    ids = torch.tensor([pad + p if side == "left" else p + pad for pad, p in zip(pads, prompts)])
    mask = torch.tensor(
        [
            [0] * len(d) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(d)
            for d, p in zip(pads, prompts)
        ]
    )
    place = (
        (mask.cumsum(1) - 1).clamp(min=0)
        if positions == "from the mask"
        else torch.arange(width)[None].expand_as(ids)
    )
    model(ids, attention_mask=mask, position_ids=place)


def shuffled(model):
    width = [p[:3] for p in PROMPTS]
    model(torch.tensor([width[i] for i in (2, 0, 3, 1)]))


def in_order(model):
    model(torch.tensor([p[:3] for p in PROMPTS]))


def one_by_one(model):
    for p in PROMPTS:
        model(torch.tensor([p[:3]]))


def captured(path, how, model=None, **options):
    model = model or llama()
    with whence.capture(model, path):
        how(model, **options)
    return path


def compared(tmp_path, reference, target, **kinds):
    return whence.compare(
        captured(tmp_path / "ref", reference), captured(tmp_path / "tgt", target, **kinds)
    )


CLEAN = [
    (whole, cached),
    (cached, whole),
    (whole, again),
    (again, whole),
    (cached, again),
    (again, cached),
    (alone, padded),
    (padded, alone),
    (in_order, shuffled),
    (in_order, one_by_one),
    (one_by_one, in_order),
]


@pytest.mark.parametrize(
    ("reference", "target"), CLEAN, ids=[f"{a.__name__}-{b.__name__}" for a, b in CLEAN]
)
def test_the_same_asked_otherwise_is_the_same(tmp_path, reference, target):
    result = compared(tmp_path, reference, target)
    assert (result.status, result.findings) == ("same", ()), result.headline
    assert result.coverage.share == 1.0
    assert result.coverage.replayed >= 0.9 * result.coverage.calls
    assert "sequences are paired" in result.plan.notes[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_right_padding_and_other_positions_are_no_fault(tmp_path, attention):
    reference = captured(tmp_path / "ref", alone)
    model = llama(attn_implementation=attention)
    right = whence.compare(reference, captured(tmp_path / "right", padded, model, side="right"))
    assert right.status == "same"
    shifted = whence.compare(
        reference, captured(tmp_path / "shifted", padded, model, positions="from the edge")
    )
    assert shifted.status == "same"
    # Rotary positions are relative: reported, and no fault.
    assert any("position_ids differs" in note for note in shifted.notes)


def test_a_position_off_by_one_while_decoding_is_named_with_its_step(tmp_path):
    result = compared(tmp_path, whole, lambda m: cached(m, positions=lambda i: i - (i >= 7)))
    finding = result.findings[0]
    assert (result.status, finding.name, finding.slot, finding.cause) == (
        "different",
        "model.rotary_emb",
        "input.position_ids",
        "input",
    )
    assert finding.worst_index == (0, 7)
    assert "step 4 of the target" in finding.sentence


def test_a_position_off_by_one_is_named_whether_or_not_the_reference_was_given_any(tmp_path):
    """Positions of both callers, in the same calls: the inputs differ, and the module that uses
    them is the finding.
    """
    result = compared(tmp_path, cached, lambda m: cached(m, positions=lambda i: i - (i >= 7)))
    finding = result.findings[0]
    assert (result.status, finding.name, finding.slot, finding.cause) == (
        "different",
        "model.rotary_emb",
        "input.position_ids",
        "input",
    )
    assert (finding.step, len(result.findings)) == (4, 1)
    assert "position_ids at [0, 0]: 7 against 6" in result.inputs_differ[0]
    shifted = whence.compare(
        tmp_path / "ref", captured(tmp_path / "all", lambda m: cached(m, positions=lambda i: i + 3))
    )
    assert (shifted.status, shifted.findings) == ("same", ())  # rotary positions are relative


def test_a_mask_that_blocks_a_token_is_named_and_other_tokens_beside_it_are_not(tmp_path):
    def masked(model, blocked=(1,), first=5):
        ids, mask = (
            torch.tensor([[first, *PROMPT[1:]]]),
            torch.ones(1, len(PROMPT), dtype=torch.long),
        )
        mask[0, list(blocked)] = 0
        model(ids, attention_mask=mask)

    result = compared(tmp_path, masked, lambda m: masked(m, [1, 3]))
    assert (result.status, result.findings[0].slot, result.findings[0].cause) == (
        "different",
        "input.attention_mask",
        "input",
    )
    assert len(result.findings) == 1
    asked = whence.compare(
        tmp_path / "ref", captured(tmp_path / "asked", lambda m: masked(m, [1, 3], first=7))
    )
    assert (asked.status, asked.findings) == ("undecided", ())


def test_integers_that_are_neither_positions_nor_masks_are_another_question(tmp_path):
    class Timed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.at = torch.nn.Embedding(64, 8), torch.nn.Embedding(64, 8)

        def forward(self, input_ids, timestep):
            return self.embed(input_ids) + self.at(timestep)

    for name, step in (("ref", 3), ("tgt", 4)):
        captured(
            tmp_path / name,
            lambda m, step=step: m(torch.tensor([PROMPT]), timestep=torch.tensor([step])),
            Timed(),
        )
    result = whence.compare(tmp_path / "ref", tmp_path / "tgt")
    assert (result.status, result.findings) == ("undecided", ())
    assert "timestep at [0]: 3 against 4" in result.inputs_differ[0]


def test_a_spoilt_cache_is_named_where_it_is_read(tmp_path):
    def spoil(step, cache):
        if step == 8:
            cache.layers[1].keys[:, :, 2] *= 1.2

    result = compared(tmp_path, whole, lambda m: cached(m, between=spoil))
    assert result.status == "different"
    assert result.findings[0].name == "model.layers.1.self_attn"
    assert "from token 8 on, step 5 of the target" in result.findings[0].sentence


def test_a_fault_in_one_row_of_a_batch_is_named(tmp_path):
    model = llama()

    def scaled(module, args, output):
        output[2] *= 1.01
        return output

    model.model.layers[1].mlp.down_proj.register_forward_hook(scaled)
    result = whence.compare(
        captured(tmp_path / "ref", alone), captured(tmp_path / "tgt", padded, model)
    )
    assert result.status == "different"
    assert result.findings[0].name == "model.layers.1.mlp.down_proj"
    assert result.findings[0].step == 2


def test_a_fault_in_decoding_alone_is_named(tmp_path):
    model = llama()
    model.model.layers[2].mlp.act_fn.register_forward_hook(
        lambda m, a, out: out * 1.002 if a[0].shape[1] == 1 else None
    )
    result = whence.compare(
        captured(tmp_path / "ref", whole), captured(tmp_path / "tgt", cached, model)
    )
    assert result.status == "different"
    assert result.findings[0].name == "model.layers.2.mlp.act_fn"


def test_one_changed_weight_is_found_across_batches(tmp_path):
    model = llama()
    model.model.layers[0].self_attn.k_proj.weight[3, 4] += 0.01
    result = whence.compare(
        captured(tmp_path / "ref", alone), captured(tmp_path / "tgt", padded, model)
    )
    assert result.status == "different"
    assert (result.findings[0].name, result.findings[0].verdict) == (
        "model.layers.0.self_attn.k_proj",
        "param-diff",
    )


def test_a_generation_faces_the_same_text_read_at_once(tmp_path):
    model = llama()
    out = model.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    reference = captured(
        tmp_path / "ref",
        lambda m: m.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=5, do_sample=False, eos_token_id=None
        ),
    )
    result = whence.compare(reference, captured(tmp_path / "same", whole, ids=out[0, :-1].tolist()))
    assert result.status == "same", result.headline
    # Only the last scores of every call are there.
    assert next(r.reference_shape for r in result.rows if r.reference_slot == "output.logits") == (
        1,
        5,
        64,
    )
    assert whence.compare(tmp_path / "same", reference).status == "same"
    other = (int(out[0, -3]) + 1) % 64
    result = whence.compare(
        reference, captured(tmp_path / "parted", whole, ids=[*out[0, :-3].tolist(), other, 2])
    )
    assert result.status == "undecided"
    assert result.inputs_differ == (
        f"LlamaForCausalLM step 0: token 8: {out[0, -3]} against {other}; compared up to there",
    )
    assert next(r.reference_shape for r in result.rows if r.reference_slot == "output.logits") == (
        1,
        3,
        64,
    )


def test_left_out_sequences_are_no_pass(tmp_path):
    def fewer(model):
        for ids in PROMPTS[:2]:
            model(torch.tensor([ids]))

    result = compared(tmp_path, padded, fewer)
    assert result.status == "undecided"
    assert result.plan.notes[0].startswith("2 of 4 sequences")
    assert result.coverage.share == 0.5


def test_further_runs_are_brought_to_the_form_of_the_reference(tmp_path):
    reference, target = captured(tmp_path / "ref", padded), captured(tmp_path / "tgt", alone)
    again = captured(tmp_path / "again", padded)
    third = captured(tmp_path / "third", padded, llama().double())
    result = whence.compare(reference, target, again=[again], third=third)
    assert result.status == "same"
    assert result.repetition.calls == 0
    assert result.third.calls > 0
    assert 0.3 < result.third.median < 3


@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("broken", [False, True])
def test_one_changed_row_of_a_batch_padded_otherwise_leaves_the_others_face_to_face(
    tmp_path, at, broken
):
    """Another token in the first place, so that nothing is alike, or behind most of the row, which
    is compared up to there.
    """
    model = llama()

    def scaled(module, args, output):
        output[2] *= 1.01
        return output

    if broken:
        model.model.layers[1].mlp.down_proj.register_forward_hook(scaled)
    prompts = [[*PROMPTS[0][:at], 50, *PROMPTS[0][at + 1 :]], *PROMPTS[1:]]
    reference = captured(tmp_path / "ref", padded, side="right")
    result = whence.compare(reference, captured(tmp_path / "tgt", padded, model, prompts=prompts))
    assert result.plan.notes[0].startswith(f"{4 if at else 3} of 4 sequences are paired")
    made = [
        r
        for r in result.rows
        if r.name == "lm_head" and r.reference_slot == "output.0" and r.measured.tier != "none"
    ]
    assert [r.reference_shape[1] for r in made] == ([4] if at else []) + [
        len(p) for p in PROMPTS[1:]
    ]
    if at:
        assert result.inputs_differ == (
            f"LlamaForCausalLM step 0: token 4: {PROMPTS[0][4]} against 50; compared up to there",
        )
    else:
        assert result.unmatched
        assert [n for n in result.plan.notes if "have no partner" in n] == [
            f"1 sequences of the {side} have no partner: step 0 row 0"
            for side in ("reference", "target")
        ]
    if broken:
        assert (result.status, [f.name for f in result.findings]) == (
            "different",
            ["model.layers.1.mlp.down_proj"],
        )
    else:
        assert (result.status, result.findings) == ("undecided", ())


def test_padding_that_no_mask_names_is_told(tmp_path):
    def unmasked(model):
        width = max(map(len, PROMPTS))
        model(torch.tensor([[PAD] * (width - len(p)) + p for p in PROMPTS]))

    result = compared(tmp_path, alone, unmasked)
    assert result.status == "different"
    # Attention looks at the padding. That positions count it is not an operator's fault.
    assert result.findings[0].name == "model.layers.0.self_attn"
    assert any("counts positions from the first column" in s for s in result.inputs_differ)
    assert result.inputs_differ[0] == (
        "LlamaForCausalLM step 0: 3 tokens ahead of it in the target that the reference has not: "
        "0, 0, 0; "
        "no mask says that they are padding"
    )


def test_other_prompts_are_no_fault_of_the_positions_given_with_them(tmp_path):
    def batch(model, first, left, **given):
        prompts = [[first, *p[1:]] for p in PROMPTS]
        pads = [[PAD] * (max(map(len, prompts)) - len(p)) for p in prompts]
        ids = torch.tensor([d + p if left else p + d for d, p in zip(pads, prompts)])
        mask = torch.tensor(
            [
                [0] * len(d) + [1] * len(p) if left else [1] * len(p) + [0] * len(d)
                for d, p in zip(pads, prompts)
            ]
        )
        model(ids, attention_mask=mask, **{k: f(mask) for k, f in given.items()})

    result = compared(
        tmp_path,
        lambda m: batch(m, 5, False),
        lambda m: batch(m, 7, True, position_ids=lambda k: (k.cumsum(1) - 1).clamp(min=0)),
    )
    assert (result.status, result.findings) == ("undecided", ())
    assert "at [0, 0]: 5 against 0" in result.inputs_differ[0]

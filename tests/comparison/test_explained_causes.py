"""Sentences that say why: tied or unloaded parameters, masks, arguments, code of another release.

Each fault is planted in a small model, each pair of correct models stays the same.
"""

import copy
import importlib.util
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional

import whence
from whence.comparison.inputs.differing_masks import differing_mask

pytestmark = pytest.mark.torch
torch.set_num_threads(1)
IDS = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(1))
GIVEN = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.causal = causal

    def forward(self, x, mask=None, scale=None):
        batch, length, _ = x.shape
        heads = (f(x).view(batch, length, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=self.causal, scale=scale
        )
        return self.o(y.transpose(1, 2).reshape(batch, length, 16))


class Model(nn.Module):
    """ahead: how many later positions each sees. pads: whether padding is hidden. form: of the
    mask, "bool" or "float", or "" for none that is passed.
    """

    def __init__(self, ahead=0, pads=True, form="bool", causal=False, scale=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(40, 16), nn.LayerNorm(16), nn.Linear(16, 40)
        self.attn = Attention(causal)
        self.ahead, self.pads, self.form, self.scale = ahead, pads, form, scale
        self.eval()

    def forward(self, ids, attention_mask):
        mask = torch.ones(6, 6, dtype=torch.bool).tril(self.ahead)[None, None]
        if self.pads:
            mask = mask & attention_mask[:, None, None].bool() | torch.eye(6, dtype=torch.bool)
        mask = mask.expand(2, 1, 6, 6)
        if self.form == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        more = {"scale": self.scale} if self.scale is not None else {}
        x = self.embed(ids)
        x = x + self.attn(self.norm(x), **({"mask": mask} if self.form else {}), **more)
        return self.head(x)


@pytest.fixture
def compared(tmp_path):
    def compare(reference, target, given=GIVEN, **options):
        for name, model, mask in (("r", reference, GIVEN), ("t", target, given)):
            with torch.no_grad(), whence.capture(model, tmp_path / name, force=True):
                model(IDS, attention_mask=mask)
        return whence.compare(tmp_path / "r", tmp_path / "t", **options)

    return compare


def sentence(result):
    assert result.status == "different", result
    return result.findings[0].sentence


# ---- parameters


def trained(model):
    """Weights as no layer is made with."""
    made = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            rows = torch.randn(weight.shape, generator=made)
            weight.copy_(rows * torch.randn(weight.shape, generator=made) * 0.3)
    return model


def tied(model):
    model.head.weight = model.embed.weight
    return model


def test_weights_that_one_side_ties(compared):
    one, two = tied(trained(Model())), trained(Model())
    assert (
        "weight: 640 of 640 elements differ" in (said := sentence(compared(one, two)))
        and "the reference ties it to embed.weight (one tensor), the target does not" in said
    )
    said = sentence(compared(two, one))
    assert "the target ties it to embed.weight (one tensor), the reference does not" in said


def test_tied_against_two_equal_ones_is_the_same(compared):
    one = tied(trained(Model()))
    two = copy.deepcopy(one)
    two.head.weight = nn.Parameter(two.embed.weight.detach().clone())
    assert set(compared(one, two).counts) == {"identical"}


class Made(nn.Module):
    """Blocks that are made with one table each, all alike. Its parameter is read before and after
    a module that the block calls.
    """

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(1.0, 17.0).log().repeat(16, 1))
            self.inner, self.factor = nn.Linear(16, 16), 1.0

        def forward(self, x):
            y = self.inner(x * self.table.sum(0).tanh())
            return x + y @ self.table.exp().reciprocal() * self.factor

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(Made.Block() for _ in range(count))

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_layers_that_are_made_alike_are_not_tied(compared):
    one = Made(4)
    two = copy.deepcopy(one)
    with torch.no_grad():
        two.blocks[2].table[3] += 0.5
    assert sentence(compared(one, two)).endswith("first at [3, 0]: 0 against 0.5")


def test_equal_weights_in_one_run_alone_are_said_to_be_equal(compared):
    one = Made(2)
    two = copy.deepcopy(one)
    with torch.no_grad():
        two.blocks[1].table[3] += 0.5
    words = "the reference holds the same elements as blocks.0.table, the target does not"
    assert sentence(compared(one, two)).endswith(words)


def test_a_parameter_explains_what_its_module_computes_from_it(compared):
    """One finding where the parameter alone differs; two where the code differs as well."""
    one = Made(4)
    two = copy.deepcopy(one)
    with torch.no_grad():
        two.blocks[2].table[3] += 0.5
    assert [f.verdict for f in compared(one, two).findings] == ["param-diff"]
    two.blocks[2].factor = 1.01
    findings = compared(one, two).findings
    assert [f.verdict for f in findings] == ["param-diff", "introduced"]
    assert "1.01 in the target" in findings[1].sentence


def test_weights_that_changed_places(compared):
    target = trained(Model())
    reference = copy.deepcopy(target)
    attn = target.attn
    attn.q.weight, attn.k.weight = attn.k.weight, attn.q.weight
    result = compared(reference, target)
    words = {f.name: f.sentence for f in result.findings}
    assert words["attn.q"].endswith("it is what the reference has as attn.k.weight")
    assert words["attn.k"].endswith("it is what the reference has as attn.q.weight")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attn.q", "uniform up to 0.25 = 1/sqrt(fan in), as a layer is made: not loaded?"),
        ("norm", "all ones is what a layer is made with: not loaded?"),
    ],
)
def test_a_module_that_was_not_loaded(compared, name, words):
    reference = trained(Model())
    target = copy.deepcopy(reference)
    target.get_submodule(name).reset_parameters()
    (finding,) = compared(reference, target).findings
    assert finding.name == name and words in finding.sentence


@pytest.mark.parametrize("change", ["scaled", "one row", "in bfloat16"])
def test_a_weight_that_was_loaded_and_is_wrong_is_not_called_unloaded(compared, change):
    reference = trained(Model())
    target = copy.deepcopy(reference)
    with torch.no_grad():
        weight = target.attn.q.weight
        if change == "scaled":
            weight.mul_(1.1)
        elif change == "one row":
            weight[3] = 0
        else:
            weight.copy_(weight.bfloat16().float())
    said = sentence(compared(reference, target))
    assert "loaded" not in said and "common" not in said and "ties" not in said


# ---- masks


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ahead": 1}, "the target's mask lets each position see the next one"),
        ({"ahead": 5}, "the target's mask lets each position see up to 5 later ones"),
        ({"ahead": -2}, "the target's mask hides earlier positions"),
        ({"pads": False}, "the target's mask lets padding be seen (keys 0, 1 of row 0)"),
    ],
)
def test_a_mask_that_is_made_otherwise(compared, form, wrong, words):
    assert sentence(compared(Model(form=form), Model(form=form, **wrong))).endswith(words)


def test_a_mask_that_is_written_otherwise_is_the_same(compared):
    assert compared(Model(), Model(form="float")).status == "same"


def test_an_operator_that_is_causal_on_one_side(compared):
    causal, not_causal = Model(form="", causal=True), Model(form="")
    later = "the target lets each position see later ones"
    assert sentence(compared(causal, not_causal)).endswith(later)
    assert sentence(compared(not_causal, causal)).endswith("the target hides later positions")


def test_a_mask_that_is_given_otherwise(compared):
    result = compared(Model(pads=False), Model(pads=False), given=torch.ones_like(GIVEN))
    assert result.status == "same", "nothing depends on it"
    result = compared(Model(), Model(), given=torch.ones_like(GIVEN))
    said = " ".join((*result.inputs_differ, *(f.sentence for f in result.findings)))
    assert "the target's mask lets padding be seen (keys 0, 1 of row 0)" in said


@pytest.mark.parametrize(
    ("name", "dtype", "is_mask"),
    [
        ("attention_mask", torch.long, True),
        ("attention_mask", torch.bool, True),
        ("token_type_ids", torch.long, False),
        ("chosen", torch.bool, False),
        ("weights", torch.float32, False),
    ],
)
def test_zeros_and_ones_are_a_mask_where_their_name_says_so(name, dtype, is_mask):
    reference, target = GIVEN.to(dtype).numpy(), torch.ones_like(GIVEN).to(dtype).numpy()
    assert bool(differing_mask(f"input.{name}", (reference, target))) == is_mask


# ---- arguments


@pytest.mark.parametrize("replay", [True, False])
def test_arguments_that_one_side_does_not_pass(compared, replay):
    said = sentence(compared(Model(), Model(form=""), replay=replay))
    assert "`mask` is not passed in the target; " in said
    scaled, plain = Model(scale=0.2), Model()
    said = sentence(compared(scaled, plain, replay=replay))
    assert "argument scale is 0.2 in the reference, not passed in the target; " in said
    said = sentence(compared(plain, scaled, replay=replay))
    assert "argument scale is 0.2 in the target, not passed in the reference; " in said


def test_a_mask_that_only_the_target_passes(compared):
    said = sentence(compared(Model(form=""), Model()))
    assert "`mask` is passed only in the target; " in said


# ---- releases

CODE = '''
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(16, 16)

    def forward(self, x):
        """{note}"""
        # {note}
        h = self.fc(x)
        h = {line}
        return x + h
'''


@pytest.fixture
def release(tmp_path):
    """A model of a library, by release: (version, line of its code) -> an instance."""

    def install(version, line, note=""):
        packages = tmp_path / version / "lib" / "site-packages"
        (packages / "nets").mkdir(parents=True)
        (packages / f"nets-{version}.dist-info").mkdir()
        file = packages / "nets" / "modeling.py"
        file.write_text(textwrap.dedent(CODE).format(line=line, note=note))
        spec = importlib.util.spec_from_file_location("nets.modeling", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        return nn.Sequential(module.Block(), module.Block()).eval()

    return install


def of_releases(tmp_path, old, new, **options):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2))
    for name, model in (("old", old), ("new", new)):
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            model(x)
    return whence.compare(tmp_path / "old", tmp_path / "new", **options)


@pytest.mark.parametrize("replay", [True, False])
def test_the_lines_in_which_two_releases_differ(release, tmp_path, replay):
    old = release("1.2", "torch.nn.functional.gelu(h)", "as it was")
    new = release("1.3", "torch.nn.functional.gelu(h) * 1.01", "better words")
    result = of_releases(tmp_path, old, new, replay=replay)
    assert sentence(result).endswith(
        "the code differs in nets/modeling.py (nets 1.2 against 1.3), line 13: "
        "`h = torch.nn.functional.gelu(h) * 1.01`, in the reference `h = torch.nn.functional.gelu(h)`"
    )


def test_a_release_with_other_words_alone_changes_nothing(release, tmp_path):
    old = release("1.2", "torch.nn.functional.gelu(h)", "as it was")
    new = release("1.3", "torch.nn.functional.gelu(h)", "better words")
    with torch.no_grad():
        new[1].fc.weight[0, 0] += 1
    result = of_releases(tmp_path, old, new)
    assert [f.name for f in result.findings] == ["1.fc"]
    assert "code differs" not in sentence(result)


def test_code_that_is_gone_or_was_no_code_says_nothing(release, tmp_path):
    old = release("1.2", "torch.nn.functional.gelu(h)")
    new = release("1.3", "torch.nn.functional.gelu(h) * 1.01")
    file = tmp_path / "1.2" / "lib" / "site-packages" / "nets" / "modeling.py"
    file.write_text("def forward(:\n" * 20)
    assert "code differs" not in sentence(of_releases(tmp_path, old, new))
    file.unlink()
    result = whence.compare(tmp_path / "old", tmp_path / "new")
    assert "code differs" not in sentence(result)


# ---- one change in several places


class Cached(nn.Module):
    """Calls another module in its first step than in later ones, and scales behind both."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.always, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.scale, self.held = scale, None

    def forward(self, x):
        if self.held is None:
            self.held = self.first(x).tanh()
        return self.out(self.always(x) * self.scale + self.held)


def test_one_change_of_code_in_steps_of_other_calls_is_one_finding(tmp_path):
    for name, scale in (("r", 0.25), ("t", 0.5)):
        model = Cached(scale)
        with torch.no_grad(), whence.capture(model, tmp_path / name):
            for _ in range(3):
                model(torch.randn(3, 16))
    (finding,) = whence.compare(tmp_path / "r", tmp_path / "t").findings
    assert "0.25 in the reference, 0.5 in the target" in finding.sentence

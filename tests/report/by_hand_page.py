"""A page made by hand: a decoder of any length over some steps, with one operator that introduces
an error and all behind it inheriting.
"""

import math

import msgspec

from whence.results import (
    CallPair,
    Comparison,
    Coverage,
    Effect,
    Finding,
    Generation,
    Measured,
    NextStep,
    Plan,
    Prompted,
    Row,
    Token,
    Verdict,
)
from whence.results.page import (
    Page,
    PageCall,
    PageDetail,
    PageExcerpt,
    PageHeatmap,
    PageOperators,
    PagePlace,
    PageSide,
    PageUnpaired,
)

OPERATORS = (
    "input_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "post_norm",
    "gate_proj",
    "up_proj",
    "act",
    "down_proj",
)


def page(
    layers=4,
    steps=2,
    ranks=1,
    guilty="layers.2.q_proj",
    sentence="introduced here: 900 times this operator's own rounding",
    generation=True,
):
    """`ranks * steps * (10 * layers + 1)` pairs of calls with three pairs of tensors each; all
    names are under `TinyLM`.
    """
    calls, rows, verdicts, pairs = [], [], [], []
    names = [f"layers.{layer}.{operator}" for layer in range(layers) for operator in OPERATORS]
    if guilty not in names:
        names[len(names) // 2] = guilty
    first = names.index(guilty)
    for rank in range(ranks):
        for step in range(steps):
            root = len(calls)
            for at, name in enumerate(["TinyLM", *names]):
                place = len(calls)
                verdict = (
                    "introduced"
                    if at == first + 1
                    else "inherited"
                    if at > first + 1 or at == 0
                    else "identical"
                )
                error = {
                    "introduced": 0.02,
                    "inherited": 0.03 + 0.001 * math.sin(place),
                    "identical": 0.0,
                }[verdict]
                noise = {"introduced": 2e-6, "inherited": 0.05, "identical": None}[verdict]
                said = (
                    sentence
                    if verdict == "introduced"
                    else f"inherited: {place % 7 / 10} times this operator's own rounding"
                )
                calls.append(
                    PageCall(
                        place,
                        name,
                        "Linear" if name.endswith("proj") else "Norm",
                        verdict,
                        step=step,
                        rank=rank,
                        root="TinyLM",
                        parent=root if at else -1,
                        leaf=bool(at),
                        reads=(place - 1,) if at > 1 else (),
                        error=error,
                        incoming=0.0 if verdict != "inherited" else error,
                        added=error if verdict == "introduced" else 1e-7,
                        noise=noise,
                        own=1e-7,
                        score=900.0 if verdict == "introduced" else 0.2,
                        shares=(0.0, 0.999, 0.001),
                        visible=(2e-4, 0.01, 0.1, 0.02) if verdict != "introduced" else (),
                        evidence="replay",
                        sentence=said,
                        confidence="certain" if verdict == "introduced" else "",
                        source="torch.nn.modules.linear.Linear",
                        parameters="equal",
                    )
                )
                pairs.append(CallPair(place, place, "exact key"))
                verdicts.append(Verdict(place, verdict, evidence="replay", sentence=said))
                for k, slot in enumerate(("input.0", "param.weight", "output.0")):
                    same = verdict == "identical" or k == 1
                    values = {
                        "rel_l2": 0.0 if same else error,
                        "max_abs_err": 0.0 if same else 3 * error,
                        "cosine_similarity": 1 - error,
                    }
                    measured = Measured("same" if same else "full", same, values)
                    rows.append(
                        Row(
                            place,
                            name,
                            "Linear",
                            step,
                            rank,
                            0,
                            slot,
                            slot,
                            3 * place + k,
                            3 * place + k,
                            "float32",
                            "bfloat16",
                            (2, 7, 64),
                            (2, 7, 64),
                            verdict,
                            "exact key",
                            measured,
                        )
                    )
    hit = next(i for i, call in enumerate(calls) if call.verdict == "introduced")
    finding = Finding(
        guilty,
        "Linear",
        "semantic",
        "introduced",
        "certain",
        0,
        0,
        "replay",
        sentence=sentence,
        slot="output.0",
        pair=hit,
    )
    counts = {
        v: sum(c.verdict == v for c in calls) for v in ("identical", "inherited", "introduced")
    }
    tokens = tuple(
        Token(
            0,
            4 + k,
            k,
            0,
            k,
            0,
            11 + k,
            11 + k + (k == 3),
            "unexplained" if k == 3 else "noise",
            1.0,
            {"margin": 0.2, "logit_err": 0.01 * (k + 1)},
        )
        for k in range(6)
    )
    said = Generation(
        False,
        (
            Prompted(
                (1, 2, 3, 4), "TinyLM", 0, 0, 0, 0, 0, 6, 6, 6, 6, "unexplained", (0, 1, 0), first=3
            ),
        ),
        tokens,
        6,
        6,
    )
    comparison = Comparison(
        status="different",
        evidence="replay",
        reference="runs/ref",
        target="runs/tgt",
        findings=(finding,),
        first_difference=None,
        counts=counts,
        coverage=Coverage(len(calls), len(calls), len(calls), len(calls), len(calls), True),
        unmatched=0,
        incomparable=0,
        inputs_differ=(),
        versions={"whence": "0"},
        plan=Plan(tuple(pairs)),
        rows=tuple(rows),
        verdicts=tuple(verdicts),
        generation=said if generation else None,
        effect=Effect(1, 1, error=0.03, name="TinyLM", slot="output.0", rows=4, moved=1),
        next=(
            NextStep("whence repro -o repro", "one script", takes_comparison=True),
            NextStep("whence report -o page.html", "this page", takes_comparison=True),
            NextStep("whence run --level op -- COMMAND", "which operator", fill_in=True),
        ),
    )
    facts = (("command", "python infer.py"), ("torch", "2.13"))
    other = (("command", "python infer.py --bf16"), ("torch", "2.13"))
    sides = PageSide("runs/ref", facts, ("command",)), PageSide("runs/tgt", other, ("command",))
    return Page(comparison, *sides, tuple(calls), (detail(hit),), folder="runs/cmp")


def detail(call):
    """One tensor looked at closely: 896 elements of which a tenth are equal."""
    points = tuple((0.01 * (k + 1), 0.001 * (k + 1)) for k in range(100))
    heatmap = PageHeatmap(
        (7, 64),
        tuple(0.001 * (k % 64 + 1) for k in range(448)),
        14,
        64,
        (("channel", 48, 63),),
        "channels 48 to 63 of 64 hold 95% of the squared error",
    )
    return PageDetail(
        call,
        "output.0",
        "output.0",
        "float32",
        "bfloat16",
        (2, 7, 64),
        (2, 7, 64),
        elements=896,
        reference=(-1.0, 1.0, 0.0, 0.5, 15.0),
        target=(-1.0, 1.01, 0.0, 0.5, 15.0),
        zeros=90,
        figures={"rel_l2": 0.02},
        edges=(1e-4, 1e-3, 1e-2, 1e-1),
        counts=(6, 300, 500),
        magnitude=points,
        noise=1e-5,
        noise_from="the operator's own rounding, from its replay",
        quantiles=points,
        heatmap=heatmap,
        worst=(((1, 6, 63), 0.123456789, 0.323456789), ((0, 0, 1), 1.0, 1.1)),
    )


def with_places(made):
    """The page with code and programs of its finding."""
    lines = ("def forward(self, x):", "    h = self.norm(x)", "    return self.q_proj(h)")
    excerpts = (
        PageExcerpt("target", "model.py", 12, 10, lines),
        PageExcerpt("reference", "old/model.py", 11, 10, lines, changed=True),
    )
    operators = (
        PageOperators("3", "3", "left out"),
        PageOperators("%3 = t(weight)", "%3 = t(weight)"),
        PageOperators(
            "%4 = mul.Tensor(%3, other=1.0)", "%4 = mul.Tensor(%3, other=1.5)", "differs"
        ),
        PageOperators("", "%5 = relu(%4)", "only target"),
    )
    return msgspec.structs.replace(made, places=(PagePlace(excerpts, operators),))


def with_unpaired(made):
    """The page of runs of which the target has a call of its own, with one inside, and the
    reference another.
    """
    before = next(i for i, call in enumerate(made.calls) if call.name == "layers.1.o_proj")
    unpaired = (
        PageUnpaired("reference", "layers.1.scale", "Scale", parent=0, after=before),
        PageUnpaired(
            "target",
            "layers.1.clip",
            "Clip",
            parent=0,
            after=before,
            reads=(before,),
            readers=(before + 1,),
        ),
        PageUnpaired("target", "layers.1.clip.low", "Clamp", inside=1),
    )
    return msgspec.structs.replace(made, unpaired=unpaired)


def same(made, verdict):
    """A page of runs without a fault: all calls have this verdict."""
    is_equal = verdict == "identical"
    calls = tuple(
        msgspec.structs.replace(
            call,
            verdict=verdict,
            error=0.0 if is_equal else 1e-3 + 1e-4 * (i % 7),
            noise=None if is_equal else 4e-3,
            added=0.0 if is_equal else 1e-3,
            score=0.0 if is_equal else 0.3,
            sentence="",
            confidence="",
        )
        for i, call in enumerate(made.calls)
    )
    comparison = msgspec.structs.replace(
        made.comparison,
        status="same",
        findings=(),
        counts={verdict: len(calls)},
        generation=None,
        effect=None,
    )
    return msgspec.structs.replace(made, calls=calls, comparison=comparison, details=())


def undecided(made):
    """A page of runs of which nothing can be told of one call."""
    hit = made.comparison.findings[0].pair
    calls = tuple(
        msgspec.structs.replace(
            call, verdict="undetermined", sentence="nothing before it is seen", slot="output.0"
        )
        if i == hit
        else call
        for i, call in enumerate(made.calls)
    )
    comparison = msgspec.structs.replace(
        made.comparison,
        status="undecided",
        findings=(),
        headline="1 region differs and could not be judged",
    )
    return msgspec.structs.replace(made, calls=calls, comparison=comparison)

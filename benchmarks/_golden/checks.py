"""What is asked of one model or one run: probe, nans, ranges, diverge, repeat, and verbs that start
programs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence
from _golden.nets import Images, Record, captured, language, seeded
from _golden.place import Answers, Case, Place, interpreter

IDS = torch.tensor([[5, 9, 3, 7, 11, 2, 8, 4], [6, 3, 12, 9, 2, 10, 5, 13]])


class _Net(nn.Module):
    """Ids to scores through one head that sees `ahead` later positions, and `extra` behind it."""

    def __init__(
        self,
        ahead: int | None = 0,
        *,
        pads: bool = True,
        parts: bool = False,
        extra: Callable[[Any], Any] = lambda x: x,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(16, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 16)
        self.ahead, self.pads, self.parts, self.extra = ahead, pads, parts, _Extra(extra)
        self.is_causal = ahead is not None
        self.eval()

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None
    ) -> dict[str, torch.Tensor]:
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        seen = torch.ones(length, length, dtype=torch.bool)
        if self.ahead is not None:
            seen = seen.tril(self.ahead)
        if self.parts:
            numbers = (position_ids[0] == 0).cumsum(0)
            seen = seen & (numbers[:, None] == numbers[None])
        seen = seen.expand(x.shape[0], -1, -1)
        if attention_mask is not None and self.pads and attention_mask.ndim == 2:
            seen = seen & attention_mask[:, None].bool()
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, torch.finfo(x.dtype).min)
        return {"logits": self.head(self.extra(x + scores.softmax(-1) @ v))}


class _Extra(nn.Module):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x)


class _Attention(nn.Module):
    """Four heads, of which `change` may treat one otherwise."""

    def __init__(self, change: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.change = 4, change
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = (q @ k.transpose(2, 3) / 2).softmax(-1) @ v
        x = self.o_proj(self.change(out.transpose(1, 2)).flatten(2))
        return self.down(torch.relu(self.up(x)))


def _generates() -> nn.Module:
    import generating

    return generating.model()


def _probe(model: Callable[[], Any], inputs: Any, *properties: str, **options: Any) -> Case:
    def case(place: Place) -> Answers:
        torch.manual_seed(0)
        found = whence.probe(model(), inputs, properties=properties, **options)
        yield "probe.txt", f"{found}\n"

    return case


def _moments(x: torch.Tensor) -> torch.Tensor:
    """A norm by the difference of two large means, which cancels."""
    x = x + 256
    mean = x.mean(-1, keepdim=True)
    spread = ((x * x).mean(-1, keepdim=True) - mean * mean).abs().add(1e-6).sqrt()
    return (x - mean) / spread


def _first_head(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., :1, :] * 1.5, x[..., 1:, :]], -2)


_MASK = torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]])
_RESTART = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
_PACKED = {"input_ids": IDS[:1], "position_ids": _RESTART}
_IDS = {"input_ids": IDS}
_MASKED = {"input_ids": IDS, "attention_mask": _MASK}
_X = seeded(2, 5, 16)
_PROBES = {
    "probe_causality": _probe(_Net, _IDS, "causality"),
    "probe_causality_broken": _probe(lambda: _Net(1), _IDS, "causality", causal=True),
    "probe_padding": _probe(_Net, _MASKED, "padding"),
    "probe_padding_broken": _probe(lambda: _Net(pads=False), _MASKED, "padding"),
    "probe_batch_broken": _probe(
        lambda: _Net(extra=lambda x: x - x.mean(0, keepdim=True) / 4), _IDS, "batch"
    ),
    "probe_chunking": _probe(_generates, {"input_ids": IDS[:1]}, "chunking"),
    "probe_repeat": _probe(lambda: _Net(extra=lambda x: x + torch.rand_like(x)), _IDS, "repeat"),
    "probe_packing": _probe(lambda: _Net(parts=True), _PACKED, "packing", declare=("packed",)),
    "probe_packing_broken": _probe(_Net, _PACKED, "packing", declare=("packed",)),
    "probe_equivariance": _probe(_Attention, _X, "equivariance"),
    "probe_equivariance_broken": _probe(lambda: _Attention(_first_head), _X, "equivariance"),
    "probe_images": _probe(
        lambda: Images().eval(), seeded(2, 3, 6, 6), "equivariance", declare=("flip", "shift")
    ),
    "probe_sensitivity": _probe(
        lambda: _Net(extra=lambda x: x * torch.tensor([0.0] + [1.0] * 15)), _IDS, "sensitivity"
    ),
    "probe_health": _probe(lambda: _Net(extra=_moments), _IDS, "health"),
    "probe_precision": _probe(
        _Net, _IDS, "precision", to=("bfloat16", "int8", "float8_e4m3fn"), budget=0.05
    ),
}


# ---- one run


def _run(record: Record, *lines: Sequence[str]) -> Case:
    def case(place: Place) -> Answers:
        place.once("run", record)
        for number, words in enumerate(lines):
            yield f"{number}.txt", place.whence(*words)

    return case


class _Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x) * 2.0**100
        return self.down(y * y - y * y)


_NANS = captured(lambda: _Overflows().eval(), lambda: (seeded(4, 8),))


# ---- diverge


def _training(fault: str = "", *, halves: bool = False) -> Record:
    def record(path: Path) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        first = net[0]
        if halves:
            first.forward = lambda x: (
                x[:, :3] @ first.weight[:, :3].T + x[:, 3:] @ first.weight[:, 3:].T + first.bias
            )
        optimizer = torch.optim.AdamW(net.parameters(), lr=2**-7)
        with whence.capture(net, path, keep="stats"):
            for step in range(12):
                is_late = step >= 6
                late = fault if is_late else ""
                x, y = seeded(6, 8, seed=step - (late == "batch")), seeded(6, 4, seed=step)
                if step == 6:
                    _break(fault, net, optimizer)
                loss = nn.functional.mse_loss(net(x), y.roll(1, 0) if late == "labels" else y)
                loss.backward()
                if fault == "gradient" and step == 6:
                    net[2].weight.grad.mul_(1.0625)
                optimizer.step()
                optimizer.zero_grad()

    return record


def _break(fault: str, net: Any, optimizer: Any) -> None:
    if fault == "rate":
        optimizer.param_groups[0]["lr"] = 2**-6
    if fault == "state":
        optimizer.state[net[2].weight]["exp_avg"].zero_()
    if fault == "weight":
        net[2].weight.data[1].zero_()
    if fault == "module":
        forward = net[0].forward
        net[0].forward = lambda x: forward(x).bfloat16().float()


def _diverge(fault: str, *, halves: bool = False) -> Case:
    def case(place: Place) -> Answers:
        place.once("ref", _training())
        place.once("again", _training(halves=True))
        place.once("tgt", _training(fault, halves=halves))
        words = ("diverge", "ref", "tgt", "--repeat", "again")
        yield "diverge.txt", place.whence(*words)
        yield "diverge.json", place.whence(*words, "--format", "json")

    return case


_DIVERGE = {
    f"diverge_{fault or 'never'}": _diverge(fault, halves=not fault)
    for fault in ("", "rate", "state", "weight", "module", "batch", "labels", "gradient")
}


# ---- verbs that start a program

INFER = """
    import sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    if "bad" in sys.argv:
        model[2].eps = 0.25
    if "narrow" in sys.argv:
        model[1].register_forward_hook(lambda module, given, out: out * 1.25)
    x = torch.arange(64.0).reshape(8, 8) / 64
    with torch.no_grad():
        model(x)
"""
UNSTEADY = """
    import os
    import numpy as np
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Mixer(nn.Module):
        def forward(self, x):
            return x + torch.from_numpy(x.numpy() * 0 + os.getpid() % 1000)

    net = nn.Sequential(nn.Linear(8, 8), Mixer(), nn.Linear(8, 3))
    with torch.no_grad():
        net(torch.ones(4, 8))
        net(torch.ones(4, 8))
"""


def _program(place: Place, text: str) -> tuple[str, ...]:
    (place.folder / "infer.py").write_text(textwrap.dedent(text))
    return "--", interpreter(), "infer.py"


def _started(text: str, *lines: Sequence[str], then: Sequence[str] = ()) -> Case:
    """Commands before a program, and words behind it."""

    def case(place: Place) -> Answers:
        program = _program(place, text)
        for number, words in enumerate(lines):
            yield f"{number}.txt", place.whence(*words, *program, *then)

    return case


def _locate(place: Place) -> Answers:
    program = _program(place, INFER)
    place.whence("run", "-o", "out/ref", *program)
    place.whence("run", "-o", "out/tgt", *program, "bad", "narrow")
    yield from place.compare("out/ref", "out/tgt")
    yield "locate.txt", place.whence("locate", "out/cmp")


PACKAGE = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            y = self.down(torch.tanh(self.up(x)))
            return {"hidden": y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON)}

    class Other(Net):
        def forward(self, x):
            return {"hidden": x + super().forward(x)["hidden"].relu() * 0 + x}
"""
CATALOGUE = """
    import torch

    def names():
        return ["Net", "Other", "Missing"]

    def build(name):
        import small
        torch.manual_seed(0)
        return getattr(small, name)(), {"x": torch.arange(32.0).reshape(2, 16) / 16}
"""


def _upgrade(place: Place) -> Answers:
    for name, epsilon in (("old", "1e-6"), ("new", "0.25")):
        folder = place.folder / name / "small"
        folder.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(PACKAGE).replace("EPSILON", epsilon)
        (folder / "__init__.py").write_text(text)
    (place.folder / "catalogue.py").write_text(textwrap.dedent(CATALOGUE))
    yield (
        "upgrade.txt",
        place.whence(
            "upgrade", "-o", "out/upgrade", "--catalogue", "catalogue.py", "--all", "old", "new"
        ),
    )


class _Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x))


def make_exported() -> nn.Module:
    """What `whence export-check` imports."""
    return _Exported().eval()


def _file(epsilon: float) -> Record:
    """The model as torch exports it, written by hand."""

    def write(path: Path) -> None:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        weights = {k: v.numpy() for k, v in make_exported().state_dict().items()}
        names = ["x", "norm.weight", "norm.bias"]
        nodes = [
            helper.make_node("LayerNormalization", names, ["layer_norm"], epsilon=epsilon),
            helper.make_node("Gemm", ["layer_norm", "fc.weight", "fc.bias"], ["linear"], transB=1),
        ]
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes,
            "g",
            [value("x", TensorProto.FLOAT, (3, 8))],
            [value("linear", TensorProto.FLOAT, (3, 4))],
            [numpy_helper.from_array(w, k) for k, w in weights.items()],
        )
        opsets = [helper.make_opsetid("", 18)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), str(path))

    return write


def _export_check(place: Place) -> Answers:
    place.once("model.onnx", _file(1e-5))
    place.once("wrong.onnx", _file(0.25))
    words = ("--model", "_golden.checks:make_exported")
    yield "right.txt", place.whence("export-check", "model.onnx", *words)
    yield "wrong.txt", place.whence("export-check", "wrong.onnx", *words)


def _doctor(place: Place) -> Answers:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    yield "doctor.txt", f"{whence.doctor(model, seeded(4, 8), faults=3, seed=1)}\n"


def _backend(factor: float) -> Any:
    def compiled(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out * factor for out in graph.forward(*args)]

    return compiled


def _ladder(place: Place) -> Answers:
    """Stages of torch.compile, and levels of ONNX Runtime."""
    import onnx_models

    made, feeds = onnx_models.attention()
    yield "onnxruntime.txt", f"{whence.ladder(made.SerializeToString(), feeds)}\n"
    torch._dynamo.reset()

    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
        return torch.compile(model, backend=_backend(1.0625))

    yield "torch.txt", f"{whence.ladder(build, seeded(4, 8))}\n"


def _locate_in_code(place: Place) -> Answers:
    def build(scale: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        model[2].eps, model[0].weight.data[0] = 1e-5 * scale, model[0].weight.data[0] * scale
        return model.eval()

    def use(model: Any) -> Any:
        return model(seeded(4, 8))

    place.once("ref", captured(lambda: build(1.0), drive=use))
    reference = place.folder / "ref"
    yield "findings.txt", f"{whence.locate(reference, model=build(4.0), use=use)}\n"
    yield "search.txt", f"{whence.locate(reference, model=build(4.0), use=use, search=True)}\n"
    yield "patch.txt", f"{whence.locate(reference, model=build(4.0), use=use, patch=['0'])}\n"


CASES: dict[str, Case] = {
    **_PROBES,
    "nans": _run(_NANS, ("nans", "run"), ("nans", "run", "--format", "json")),
    "nans_of_statistics": _run(
        captured(lambda: _Overflows().eval(), lambda: (seeded(4, 8),), keep="stats"),
        ("nans", "run"),
    ),
    "nans_none": _run(captured(language()), ("nans", "run")),
    "ranges": _run(
        captured(language()), ("ranges", "run"), ("ranges", "run", "--dtype", "float16")
    ),
    "ranges_of_statistics": _run(_NANS, ("ranges", "run", "--top", "2")),
    **_DIVERGE,
    "repeat_not": _started(UNSTEADY, ("repeat", "--times", "2")),
    "probe_program": _started(INFER, ("probe", "--only", "batch", "--only", "repeat")),
    "doctor": _doctor,
    "run": _started(
        INFER,
        ("run", "-o", "out/run"),
        ("run", "-o", "out/op", "--level", "op"),
        ("run", "-o", "out/stats", "--keep", "stats", "--steps", "0:1"),
    ),
    "ladder": _ladder,
    "locate": _locate,
    "locate_in_code": _locate_in_code,
    "upgrade": _upgrade,
    "export_check": _export_check,
}

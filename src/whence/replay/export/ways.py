"""The execution mode of a run (eager, or compiled with backend and settings), and how to reproduce
it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from whence.frameworks.operator_names import words
from whence.replay.export.trace import Piece, Value, overload

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_,.+-]{0,59}")
# Names that refer to a path or start a program: never taken from a run.
_PLACES = words("""
    arch cache cmd command cutlass cxx debug dir dump file home hook hooks lib library libs log logs
    march metadata package path repro root save trace upload url worker
""")


@dataclass(frozen=True)
class Way:
    """How a run executes operators.

    backend: of torch.compile, "" for eager. inductor, dynamo: settings by dotted name. dynamic: as
    in torch.compile. device: name of the torch device. settings: torch's settings as recorded.
    """

    backend: str = ""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    dynamo: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool | None = None
    device: str = "cpu"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """The name of the torch context for gradients: inference_mode, enable_grad or no_grad."""
        if self.settings.get("inference_mode") is True:
            return "inference_mode"
        return "enable_grad" if self.settings.get("grad") is True else "no_grad"


def known_config(module: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns (values that a script may set, names of the others) of a config module of torch.

    A run is untrusted data: accepted are existing names with numbers, switches and single words,
    except names that refer to a path or a program.
    """
    import importlib

    config = importlib.import_module(module)
    fine: dict[str, Any] = {}
    refused = []
    for name, value in values.items():
        exists = re.fullmatch(r"[A-Za-z_][\w.]{0,99}", name) is not None and name in config._config
        plain = (
            value is None
            or type(value) in (bool, int, float)
            or (type(value) is str and _WORD.fullmatch(value) is not None)
        )
        if exists and plain and _PLACES.isdisjoint(re.split(r"[._]", name)):
            fine[name] = value
        else:
            refused.append(name)
    return fine, refused


def is_backend(name: str) -> bool:
    """Whether this is a backend of torch.compile that exists here."""
    return name in torch.compiler.list_backends(exclude_tags=())


def run_as(way: Way, pieces: Sequence[Piece]) -> list[list[Any]]:
    """Returns the results of every piece on its own inputs, run in the mode of `way`; compiled
    pieces run in one graph, each with its own inputs.
    """
    inputs_of = [[t.detach().clone().to(way.device) for t in p.inputs.values()] for p in pieces]
    with getattr(torch, way.mode)():
        if not way.backend:
            return [p.run(inputs) for p, inputs in zip(pieces, inputs_of)]
        compiled = compile_together(way, pieces)
        with configured(way):
            outputs = list(compiled(*(t for inputs in inputs_of for t in inputs)))
    out = []
    for p in pieces:
        out.append(outputs[: len(p.results)])
        del outputs[: len(p.results)]
    return out


@contextlib.contextmanager
def configured(way: Way) -> Iterator[None]:
    """Sets the compiler's settings of this mode for the duration of the context."""
    import torch._dynamo.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(dict(way.inductor)),
        torch._dynamo.config.patch(dict(way.dynamo)),
    ):
        yield


def compile_together(way: Way, pieces: Sequence[Piece]) -> Any:
    """Returns one compiled function from the inputs of all pieces, in order, to the results of all,
    in order.
    """
    torch._dynamo.reset()
    return torch.compile(as_graph(pieces), backend=way.backend, fullgraph=True, dynamic=way.dynamic)


def as_graph(pieces: Sequence[Piece]) -> Any:
    """Returns an fx.GraphModule with the pieces side by side."""
    graph = torch.fx.Graph()
    inputs = [
        [graph.placeholder(f"in{i}_{k}") for k in range(len(p.inputs))]
        for i, p in enumerate(pieces)
    ]
    results = []
    for p, nodes in zip(pieces, inputs):
        env: dict[int, Any] = dict(zip(p.inputs, nodes))

        def decode(value: Any, env: dict[int, Any] = env) -> Any:
            if isinstance(value, Value):
                return env[value.number]
            return [decode(item) for item in value] if isinstance(value, list) else value

        for step in p.steps:
            func = overload(step.name)
            node = graph.call_function(
                func,
                tuple(decode(a) for a in step.args),
                {k: decode(v) for k, v in step.kwargs.items()},
            )
            returns = func._schema.returns
            if len(returns) == 1 and not str(returns[0].type).startswith("List"):
                produced = [node]
            else:
                many = len(step.results)
                produced = [graph.call_function(_item, (node, k)) for k in range(many)]
            for number, result in zip(step.results, produced):
                env.setdefault(number, result) if number in env else env.__setitem__(number, result)
        results += [env[n] for n in p.results]
    graph.output(tuple(results))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _item(values: Any, k: int) -> Any:
    return values[k]

"""What Paddle and its logger write, made of numpy arrays: for logs with any fault at any place. The
layout is checked against a real print in test_paddle_log.py.
"""

from collections.abc import Iterable

import numpy as np

GLOG = "I1121 10:00:00.{:06d}  5750 {}] "


def printed(
    array: np.ndarray, dtype: str = "", threshold: int = 1000, edge: int = 3, digits: int = 8
) -> str:
    """`str(paddle.Tensor)`."""
    dtype = dtype or str(array.dtype)
    values = array.astype(np.float64) if array.dtype.kind not in "iub" else array

    def one(value: object) -> str:
        if array.dtype.kind in "iub":
            return str(value)
        number = float(value)  # type: ignore[arg-type]
        if np.isnan(number):
            return "nan"
        return (
            f"{number:.0f}."
            if np.isinf(number) or np.ceil(number) == number
            else f"{number:.{digits}f}"
        )

    short = array.size > threshold

    def body(part: np.ndarray, indent: int) -> str:
        if part.ndim == 0:
            return one(part)
        keep: Iterable[int | None] = range(len(part))
        if short and len(part) > 2 * edge:
            keep = [*range(edge), None, *range(len(part) - edge, len(part))]
        rows = ["..." if i is None else body(part[i], indent + 1) for i in keep]
        if part.ndim > 1:
            return "[" + ("," + "\n" * (part.ndim - 1) + " " * (indent + 1)).join(rows) + "]"
        lines = [", ".join(rows[i : i + 6]) for i in range(0, len(rows), 6)] or [""]
        return "[" + (",\n" + " " * (indent + 1)).join(lines) + "]"

    shape = ", ".join(map(str, array.shape))
    return (
        f"Tensor(shape=[{shape}], dtype={dtype}, place=Place(cpu), stop_gradient=True,\n      "
        f" {body(values, 7)})"
    )


def vlog_matrix(label: str, array: np.ndarray, number: int = 0) -> str:
    """The first ten values a kernel logs."""
    values = "".join(f"{float(v):.8g}, " for v in array.ravel()[:10])
    return GLOG.format(number, "block_attn.h:102") + f"===>: {label}\n{values}\n"


def operator(op: str, inputs: dict[str, str], outputs: dict[str, str], number: int = 0) -> str:
    """The line of the executor at GLOG_v=4."""

    def told(slots: dict[str, str]) -> str:
        return ", ".join(
            f"{slot}[{name}:float[1, 4]({{}})(Place(cpu))]" for slot, name in slots.items()
        )

    head = GLOG.format(number, "operator.cc:832")
    return f"{head}Place(cpu) Op({op}), inputs:{{{told(inputs)}}}, outputs:{{{told(outputs)}}}.\n"


class Model:
    """Two blocks of matmul, scale, softmax, a residual sum and a mean, as a legacy predictor runs
    them; hooks print every output.

    factor: of the scale in the second block. noise: relative, of every output, as another kernel
    would have it.
    """

    def __init__(
        self, factor: float = 0.35, noise: float = 0.0, steps: int = 2, dtype: str = "float32"
    ) -> None:
        self.factor, self.noise, self.steps, self.dtype = factor, noise, steps, np.dtype(dtype)
        self.made: list[tuple[int, str, str, np.ndarray]] = []
        self.edges: dict[str, tuple[str, dict[str, str]]] = {}
        draw = np.random.default_rng(3)
        self._draw = np.random.default_rng(4)
        table = draw.normal(size=(32, 16))
        weights = [draw.normal(size=(16, 16)) / 4 for _ in range(2)]
        for step in range(steps):
            x = self._out(
                step,
                "lookup_table_v2",
                "embedding_0.tmp_0",
                table[np.arange(4 + step) * 5 % 32],
                {},
            )
            for block, weight in enumerate(weights):
                y = self._out(
                    step, "matmul_v2", f"matmul_v2_{block}.tmp_0", x @ weight, {"X": self.name(x)}
                )
                scale = 0.35 if block == 0 else factor
                z = self._out(step, "scale", f"scale_{block}.tmp_0", y * scale, {"X": self.name(y)})
                e = np.exp(z - z.max(-1, keepdims=True))
                p = self._out(
                    step,
                    "softmax",
                    f"softmax_{block}.tmp_0",
                    e / e.sum(-1, keepdims=True),
                    {"X": self.name(z)},
                )
                x = self._out(
                    step,
                    "elementwise_add",
                    f"tmp_{block}",
                    p + x,
                    {"X": self.name(p), "Y": self.name(x)},
                )
            self._out(
                step, "reduce_mean", "mean_0.tmp_0", x.mean(-1, keepdims=True), {"X": self.name(x)}
            )

    def _out(
        self, step: int, op: str, name: str, value: np.ndarray, inputs: dict[str, str]
    ) -> np.ndarray:
        value = value * (1 + self.noise * self._draw.uniform(-1, 1, value.shape))
        value = value.astype(self.dtype).astype(np.float64)
        self.made.append((step, op, name, value))
        self.edges[name] = (op, inputs)
        return value

    def name(self, value: np.ndarray) -> str:
        return next(name for _, _, name, made in reversed(self.made) if made is value)

    def log(self, *, cut: bool = False, edges: bool = False, **how: int) -> str:
        """cut: kernels log between the words of the softmax lines. edges: with the executor's
        lines.
        """
        out = [
            GLOG.format(1, "analysis_predictor.cc:2222") + "Ir optimization is turned off\n",
            "\x1b[1m\x1b[35m--- Running [a]\x1b[0m\n",
        ]
        for number, (_, op, name, value) in enumerate(self.made):
            text = printed(value.astype(self.dtype), **how) + "\n"
            if edges:
                out.append(operator(op, self.edges[name][1], {"Out": name}, number))
            if cut and op == "softmax":
                out.append(f"{op} {name} {vlog_matrix('qk_out', value * 2, number)}{text}")
            else:
                out.append(f"{op} {name} {text}")
        return "".join(out) + "TOKENS [1, 2]\n"

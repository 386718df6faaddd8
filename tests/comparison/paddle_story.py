"""A small project as a user of Paddle has it: `python paddle_story.py FOLDER` writes `ref`, `a` and
`b` there, three states of it.

Each holds a language model that generates, exported, and a test that asks it 20 prompts and counts
how many answers are as `expected.json` says: those of `ref`, whose weights are float32. `a` and `b`
hold them in int8, and `b` has one attribute that `a` has not.
"""

import json
import re
import shutil
import sys
from pathlib import Path

SIZE, HEADS, BLOCKS, WORDS, PROMPT, NEW, ROWS = 32, 4, 3, 96, 5, 8, 4
SEED = 20
SCALE, WRONG = "0.35355338", "0.32"  # of the scores in the second block

TEST = f'''\
"""Asks the model 20 prompts, {ROWS} at a time, with greedy decoding."""

import json
from pathlib import Path

import numpy as np
from paddle.inference import Config, create_predictor

HERE = Path(__file__).parent


def answers():
    config = Config(str(HERE / "model.json"), str(HERE / "model.pdiparams"))
    config.disable_glog_info()
    config.disable_mkldnn()
    predictor = create_predictor(config)
    prompts = np.array(json.loads((HERE / "prompts.json").read_text()), "int64")
    for start in range(0, len(prompts), {ROWS}):
        ids = prompts[start : start + {ROWS}]
        for _ in range({NEW}):
            predictor.get_input_handle("ids").copy_from_cpu(ids)
            predictor.run()
            logits = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
            ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], 1)
        yield from ids.tolist()


def test_answers():
    found = [{{"src": ids[:{PROMPT}], "output": ids[{PROMPT}:]}} for ids in answers()]
    (HERE / "answers.json").write_text("".join(json.dumps(row) + "\\n" for row in found))
    expected = HERE / "expected.json"
    if expected.exists():
        right = [json.loads(line) for line in expected.read_text().splitlines()]
        same = sum(one == other for one, other in zip(found, right, strict=True))
        assert same >= 0.75 * len(right), f"{{same}} of {{len(right)}} answers are right"
'''


def model(kinds):
    """A model like Llama: rotated positions, norms by root mean square, gated layers; without a
    cache. kinds: makes its matrices.
    """
    import numpy as np
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    half = SIZE // HEADS // 2
    angles = np.arange(64)[:, None] / 100.0 ** (np.arange(half) / half)

    class Norm(nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter(
                [SIZE], default_initializer=nn.initializer.Constant(1.0)
            )

        def forward(self, x):
            return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight

    class Attention(nn.Layer):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (kinds(SIZE, SIZE) for _ in range(4))
            self.register_buffer("cos", paddle.to_tensor(np.cos(angles).astype("float32")))
            self.register_buffer("sin", paddle.to_tensor(np.sin(angles).astype("float32")))

        def rotated(self, x, n):
            left, right = x[..., :half], x[..., half:]
            cos, sin = self.cos[:n], self.sin[:n]
            return paddle.concat([left * cos - right * sin, right * cos + left * sin], -1)

        def forward(self, x):
            n = paddle.shape(x)[1]
            q, k, v = (
                made(x).reshape([0, 0, HEADS, SIZE // HEADS]).transpose([0, 2, 1, 3])
                for made in (self.q, self.k, self.v)
            )
            scores = paddle.matmul(
                self.rotated(q, n), self.rotated(k, n), transpose_y=True
            ) * float(SCALE)
            scores = scores + paddle.triu(paddle.full([n, n], -1e9, "float32"), 1)
            return self.o(
                paddle.matmul(F.softmax(scores, -1), v)
                .transpose([0, 2, 1, 3])
                .reshape([0, 0, SIZE])
            )

    class Block(nn.Layer):
        def __init__(self):
            super().__init__()
            self.n1, self.attention, self.n2 = Norm(), Attention(), Norm()
            self.gate, self.up, self.down = (
                kinds(SIZE, 2 * SIZE),
                kinds(SIZE, 2 * SIZE),
                kinds(2 * SIZE, SIZE),
            )

        def forward(self, x):
            x = x + self.attention(self.n1(x))
            y = self.n2(x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    class Model(nn.Layer):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(WORDS, SIZE)
            self.blocks = nn.LayerList([Block() for _ in range(BLOCKS)])
            self.norm, self.head = Norm(), kinds(SIZE, WORDS)

        def forward(self, ids):
            x = self.emb(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Model()


def matrices(int8):
    """Makes the matrices of a model, in float32 or in int8 with a scale for each column. Both draw
    the same numbers.
    """
    import numpy as np
    import paddle
    from paddle import nn

    random = np.random.default_rng(SEED)

    class Matrix(nn.Layer):
        def __init__(self, rows, columns):
            super().__init__()
            values = (random.standard_normal((rows, columns)) * 1.5 / rows**0.5).astype("float32")
            scale = np.abs(values).max(0) / np.float32(127)
            if int8:
                self.register_buffer(
                    "weight", paddle.to_tensor(np.round(values / scale).astype("int8"))
                )
                self.register_buffer("scale", paddle.to_tensor(scale))
            else:
                self.register_buffer("weight", paddle.to_tensor(values))

        def forward(self, x):
            return paddle.matmul(
                x, self.weight.astype("float32") * self.scale if int8 else self.weight
            )

    return Matrix


def export(folder, int8):
    """Write the model into a folder, with its test and the prompts."""
    import numpy as np
    import paddle

    folder.mkdir()
    made = model(matrices(int8))
    made.emb.weight.set_value(
        np.random.default_rng(SEED + 1).standard_normal((WORDS, SIZE)).astype("float32")
    )
    made.eval()
    spec = [paddle.static.InputSpec([None, None], "int64", name="ids")]
    paddle.jit.save(
        paddle.jit.to_static(made, input_spec=spec, full_graph=True), str(folder / "model")
    )
    prompts = np.random.default_rng(SEED + 2).integers(0, WORDS, (20, PROMPT))
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()))
    (folder / "test_predictor.py").write_text(TEST)


def write(folder):
    """All three, `ref` without `expected.json`: nobody has answered yet."""
    export(folder / "ref", int8=False)
    export(folder / "a", int8=True)
    shutil.copytree(folder / "a", folder / "b")
    text = (folder / "b" / "model.json").read_text()
    second = list(re.finditer(r"0\.3535533\d*", text))[1]
    (folder / "b" / "model.json").write_text(
        f"{text[: second.start()]}{WRONG}{text[second.end() :]}"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))

"""Small Paddle programs for the capture tests: `python paddle_models.py pir|legacy FOLDER` writes
them, `runs` runs one.

A legacy program cannot be traced by today's Paddle; it is put together by hand, in a process that
has PIR switched off.
"""

import hashlib
import sys

import numpy as np


def layers():
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    class Norm(nn.Layer):
        def __init__(self, size):
            super().__init__()
            self.weight = self.create_parameter(
                [size], default_initializer=nn.initializer.Constant(1.0)
            )

        def forward(self, x):
            return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight

    class Attention(nn.Layer):
        def __init__(self, size, heads):
            super().__init__()
            self.heads, self.qkv, self.o = heads, nn.Linear(size, 3 * size), nn.Linear(size, size)

        def forward(self, x, scale=0.35355338):
            size = x.shape[-1]
            parts = [
                t.reshape([0, 0, self.heads, size // self.heads]).transpose([0, 2, 1, 3])
                for t in paddle.split(self.qkv(x), 3, -1)
            ]
            scores = F.softmax(paddle.matmul(parts[0], parts[1], transpose_y=True) * scale, -1)
            return self.o(
                paddle.matmul(scores, parts[2]).transpose([0, 2, 1, 3]).reshape([0, 0, size])
            )

    class Block(nn.Layer):
        def __init__(self, size, heads):
            super().__init__()
            self.n1, self.attention, self.n2 = Norm(size), Attention(size, heads), Norm(size)
            self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

        def forward(self, x):
            x = x + self.attention(self.n1(x), scale=0.35355338)
            return x + self.down(F.silu(self.up(self.n2(x))))

    class Model(nn.Layer):
        def __init__(self, size=32, heads=4, words=64, blocks=2):
            super().__init__()
            self.emb, self.head = nn.Embedding(words, size), nn.Linear(size, words)
            self.blocks = nn.LayerList([Block(size, heads) for _ in range(blocks)])

        def forward(self, ids):
            x = self.emb(ids)
            for block in self.blocks:
                x = block(x)
            first, last = x[:, :1], x[:, 1:]
            return self.head(paddle.concat([last, first], axis=1))

    class Loop(nn.Layer):
        def __init__(self):
            super().__init__()
            self.fc, self.conv, self.bn = (
                nn.Linear(8, 8),
                nn.Conv2D(1, 20, 3, padding=1),
                nn.BatchNorm2D(20),
            )

        def forward(self, x, n):
            y = F.relu(self.bn(self.conv(x.reshape([-1, 1, 8, 8])))).mean(1).mean(1)
            i = paddle.zeros([1], "int64")
            while i < n:
                y = F.relu(self.fc(y))
                i = i + 1
            if n > 2:
                y = y * 2
            else:
                y = y * 4
            best, at = paddle.topk(y, 3)
            return y, i, best, at

    class Image(nn.Layer):
        def __init__(self):
            super().__init__()
            self.c1, self.b1 = nn.Conv2D(3, 8, 3, padding=1), nn.BatchNorm2D(8, epsilon=1e-4)
            self.c2, self.b2 = nn.Conv2D(8, 8, 3, groups=2, bias_attr=False), nn.BatchNorm2D(8)
            self.fc = nn.Linear(8, 5)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.b1(self.c1(x))), 2)
            return F.softmax(self.fc(F.hardswish(self.b2(self.c2(x))).mean([2, 3])))

    class Recurrent(nn.Layer):
        def __init__(self):
            super().__init__()
            self.emb, self.lstm, self.head = nn.Embedding(10, 6), nn.LSTM(6, 7), nn.Linear(7, 10)

        def forward(self, ids):
            return self.head(self.lstm(self.emb(ids))[0])

    class Codes(nn.Layer):
        """A product with int8 codes and their scales, which Paddle makes one constant of."""

        def __init__(self, size, out):
            super().__init__()
            codes = np.random.RandomState(size + out).randint(-127, 128, [size, out])
            kept = nn.initializer.Assign(codes.astype("int8"))
            self.codes = self.create_parameter([size, out], dtype="int8", default_initializer=kept)
            self.codes.stop_gradient = True
            self.scale = self.create_parameter([out])

        def forward(self, x):
            scale = paddle.scale(self.scale, scale=0.007874016)
            return paddle.matmul(x, paddle.cast(self.codes, "float32") * scale)

    class Coded(nn.Layer):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)  # has three results, hooks show one
            self.q, self.k, self.v, self.o = Codes(8, 8), Codes(8, 8), Codes(8, 16), Codes(16, 8)

        def forward(self, x):
            y = self.norm(x)
            scores = F.softmax(paddle.matmul(self.q(y), self.k(y), transpose_y=True))
            return x + self.o(F.gelu(paddle.matmul(scores, self.v(y))))

    return {"model": Model, "loop": Loop, "image": Image, "lstm": Recurrent, "coded": Coded}


def write_pir(folder):
    import paddle

    paddle.seed(0)
    kinds = layers()
    ids = paddle.static.InputSpec([None, None], "int64", name="ids")
    x, n = (
        paddle.static.InputSpec([None, 8, 8], "float32", name="x"),
        paddle.static.InputSpec([1], "int64", name="n"),
    )
    image, five = (
        paddle.static.InputSpec([None, 3, 9, 9], "float32", name="image"),
        paddle.static.InputSpec([None, 5], "int64", name="ids"),
    )
    coded = paddle.static.InputSpec([None, 6, 8], "float32", name="x")
    for name, spec in (
        ("model", [ids]), ("loop", [x, n]), ("image", [image]), ("lstm", [five]), ("coded", [coded]),
    ):  # fmt: skip
        made = kinds[name]()
        made.eval()
        paddle.jit.save(
            paddle.jit.to_static(made, input_spec=spec, full_graph=True), f"{folder}/{name}"
        )


def write_legacy(folder):
    import paddle
    from paddle.base.layer_helper import LayerHelper

    paddle.enable_static()
    paddle.seed(3)
    main, start = paddle.static.Program(), paddle.static.Program()

    def op(kind, inputs, attributes=None, outputs=("Out",)):
        helper = LayerHelper(kind)
        made = {name: [helper.create_variable_for_type_inference("float32")] for name in outputs}
        helper.append_op(type=kind, inputs=inputs, outputs=made, attrs=attributes or {})
        return made[outputs[0]][0]

    def weight(*shape):
        return LayerHelper("m").create_parameter(
            attr=paddle.ParamAttr(), shape=list(shape), dtype="float32"
        )

    with paddle.static.program_guard(main, start):
        x = paddle.static.data("x", [-1, 4, 8], "float32")
        y = op("matmul_v2", {"X": [x], "Y": [weight(8, 8)]}, {"trans_x": False, "trans_y": False})
        y = op("elementwise_add", {"X": [y], "Y": [weight(8)]}, {"axis": -1})
        y = op("scale", {"X": [y]}, {"scale": 0.5, "bias": 0.0, "bias_after_scale": True})
        y = op("scale", {"X": [y]}, {"scale": 1.5, "bias": 0.0, "bias_after_scale": True})
        y = op("reshape2", {"X": [op("relu", {"X": [y]})]}, {"shape": [0, 32]}, ("Out", "XShape"))
        two, three = (
            op("fill_constant", {}, {"shape": [1], "value": value, "dtype": 5})
            for value in (2.0, 3.0)
        )
        parts = [op("elementwise_mul", {"X": [y], "Y": [by]}, {"axis": -1}) for by in (two, three)]
        y = op("concat", {"X": parts}, {"axis": 1})
        y = op(
            "layer_norm",
            {"X": [y], "Scale": [weight(64)], "Bias": [weight(64)]},
            {"begin_norm_axis": 1, "epsilon": 1e-5},
            ("Y", "Mean", "Variance"),
        )
        y = op("softmax", {"X": [y]}, {"axis": -1})
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(start)
    paddle.static.save_inference_model(f"{folder}/legacy", [x], [y], executor, program=main)


def fed(name, step=0):
    """What a program is given."""
    random = np.random.RandomState(0)
    return {
        "image": [random.randn(2, 3, 9, 9).astype("float32")],
        "lstm": [np.arange(10).reshape(2, 5).astype("int64")],
        "model": [np.arange(10).reshape(2, 5).astype("int64")],
        "loop": [random.randn(2, 8, 8).astype("float32"), np.array([3 - 2 * step], "int64")],
        "coded": [random.randn(2, 6, 8).astype("float32")],
        "legacy": [random.randn(2, 4, 8).astype("float32")],
    }[name.removesuffix("_fault")]


def predictor(folder, name, settings):
    """A predictor. settings: methods of the config with their arguments."""
    import pathlib

    from paddle.inference import Config, create_predictor

    program = next(
        p
        for p in (pathlib.Path(folder) / f"{name}{s}" for s in (".json", ".pdmodel"))
        if p.exists()
    )
    config = Config(str(program), str(program.with_suffix(".pdiparams")))
    config.disable_glog_info()
    for method, arguments in settings.items():
        getattr(config, method)(*arguments)
    return create_predictor(config)


def once(made, given):
    """One run through handles: the digests of what comes out."""
    for name, array in zip(made.get_input_names(), given):
        made.get_input_handle(name).copy_from_cpu(array)
    made.run()
    outputs = [made.get_output_handle(name).copy_to_cpu() for name in made.get_output_names()]
    return [hashlib.md5(o.tobytes()).hexdigest() for o in outputs]


if __name__ == "__main__":
    {"pir": write_pir, "legacy": write_legacy}[sys.argv[1]](sys.argv[2])

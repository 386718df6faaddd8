"""A program with one operator of Paddle after the other, each with attributes that change its
numbers.

`python paddle_operator_zoo.py FOLDER` writes it.
"""

import sys

import numpy as np


def results(x, y, image, ids, flags, held):
    """What the program computes. x, y: (2, 6, 8); image: (2, 4, 9, 9); ids: (2, 5); flags: (2, 6,
    8); held: parameters by shape.
    """
    import paddle
    import paddle.nn.functional as F

    row, positive = x[0, 0], paddle.abs(x) + 0.1
    matrix, left = x[0], x.transpose([0, 2, 1])
    kernel, table, wide = held[6, 4, 3, 3], held[10, 8], held[6, 1]
    grouped, deep, channels, shift, spread = (
        held[6, 2, 3, 3],
        held[4, 1, 3, 3],
        held[4],
        held["shift"],
        held["spread"],
    )
    yield paddle.matmul(x, y, transpose_y=True)
    yield paddle.matmul(left, y, transpose_x=False)
    yield paddle.matmul(x, y, transpose_x=True)
    yield paddle.matmul(row, y, transpose_y=True)
    yield paddle.bmm(x, left)
    yield paddle.addmm(paddle.ones([6, 6]), matrix, y[0].t(), beta=0.3, alpha=1.7)
    yield F.linear(x, y[1].t(), paddle.ones([6]) * 0.3)
    yield F.conv2d(image, grouped, stride=2, padding=[1, 2], groups=2)
    yield F.conv2d(image, kernel, padding="SAME", stride=2)
    yield F.conv2d(image, kernel, padding="SAME", stride=2, dilation=2)
    yield F.conv2d(image, kernel, padding=[0, 1, 2, 1], dilation=2)
    yield F.conv2d(image, kernel, padding="VALID", stride=[1, 2])
    yield F.conv2d(image, deep, groups=4, padding=1)
    yield F.max_pool2d(image, 3, stride=2, padding=1)
    yield F.max_pool2d(image, 2, stride=2, ceil_mode=True)
    yield F.avg_pool2d(image, 3, stride=2, padding=1, exclusive=True)
    yield F.avg_pool2d(image, 3, stride=2, padding=1, exclusive=False)
    yield F.avg_pool2d(image, [2, 3], stride=2, ceil_mode=True)
    yield F.avg_pool2d(image, 2, stride=2, ceil_mode=True, exclusive=False)
    yield F.adaptive_avg_pool2d(image, [2, 3])
    yield F.adaptive_avg_pool2d(image, 1)
    yield from (x + y, x - y, x * y, x / (y.abs() + 1), paddle.maximum(x, y), paddle.minimum(x, y))
    yield paddle.add(x, wide)
    yield positive**y
    yield paddle.floor_divide(x * 10, y.abs() + 0.5)
    yield paddle.remainder(x * 10, y)
    yield paddle.floor_divide(ids - 4, paddle.full([1], 3, "int64"))
    yield paddle.remainder(ids - 4, paddle.full([1], 3, "int64"))
    yield from (x == y, x != y, x < y, x <= y, x > y, x >= y)
    yield from (
        paddle.logical_and(flags, x > 0),
        paddle.logical_or(flags, x > 0),
        paddle.logical_xor(flags, x > 0),
        ~flags,
    )
    yield paddle.scale(x, 1.5, 0.25, bias_after_scale=True)
    yield paddle.scale(x, 1.5, 0.25, bias_after_scale=False)
    yield paddle.pow(positive, 1.7)
    yield F.gelu(x)
    yield F.gelu(x, approximate=True)
    yield F.swish(x)
    yield F.silu(x)
    yield paddle.clip(x, -0.5, 0.25)
    yield F.hardsigmoid(x, slope=0.3, offset=0.4)
    yield F.hardswish(x * 3)
    yield F.leaky_relu(x, 0.07)
    yield F.elu(x, 0.6)
    yield F.softplus(x * 9, beta=2, threshold=5)
    yield from (F.relu(x), F.relu6(x * 9), F.sigmoid(x), F.mish(x), F.silu(x))
    for name in (
        "tanh",
        "exp",
        "square",
        "abs",
        "expm1",
        "erf",
        "floor",
        "ceil",
        "round",
        "sin",
        "cos",
        "tan",
        "reciprocal",
        "sign",
        "atan",
        "sinh",
        "cosh",
        "isnan",
        "isinf",
        "isfinite",
    ):
        yield getattr(paddle, name)(x)
    for name in ("sqrt", "rsqrt", "log", "log2", "log10", "log1p"):
        yield getattr(paddle, name)(positive)
    yield from (paddle.asin(F.tanh(x)), paddle.acos(F.tanh(x)))
    yield paddle.round(paddle.floor(x * 4) / 2)  # halves
    yield x.astype("int64").astype("float32").astype("float64")
    yield x.astype("bool").astype("int32")
    yield paddle.where(flags, x, y)
    yield F.softmax(x, 1)
    yield F.log_softmax(x, -1)
    for axis, keep in ((1, False), ([0, -1], True), (None, False)):
        yield paddle.mean(x, axis, keepdim=keep)
        yield paddle.sum(x, axis, keepdim=keep)
        yield paddle.max(x, axis, keepdim=keep)
        yield paddle.min(x, axis, keepdim=keep)
        yield paddle.amax(x, axis, keepdim=keep)
        yield paddle.amin(x, axis, keepdim=keep)
        yield paddle.logsumexp(x, axis, keepdim=keep)
    yield paddle.sum(flags.astype("int32"))
    yield paddle.sum(x, 1, dtype="float64")
    yield F.layer_norm(x, [8], weight=held[8], bias=held["bias"], epsilon=1e-3)
    yield F.layer_norm(x, [6, 8], epsilon=1e-4)
    yield F.batch_norm(image, shift, spread, channels, shift, epsilon=0.01)
    yield F.group_norm(image, 2, weight=channels, bias=shift, epsilon=0.01)
    yield F.group_norm(image, 4, epsilon=0.01)
    yield paddle.cumsum(x, 1)
    yield paddle.cumsum(x)
    yield paddle.argmax(x, 1)
    yield paddle.argmax(x, -1, keepdim=True)
    yield paddle.argmax(x)
    yield paddle.argmin(x, 0, dtype="int32")
    yield F.embedding(ids, table)
    yield F.embedding(ids, table, padding_idx=3)
    yield F.embedding(ids, table, padding_idx=-1)
    yield from (
        x.reshape([0, -1]),
        x.reshape([4, 2, -1]),
        x.unsqueeze([0, 2]),
        x.unsqueeze(1).squeeze(1),
        x.flatten(1),
    )
    yield x[:, 1:4, -3:] * 1
    yield x[:, 2] * 1
    yield x[:, 1:6:2] * 1
    yield x[:, ::-1] * 1
    yield from paddle.split(x, [2, 3, -1], 1)
    yield from paddle.split(x, 4, -1)
    yield from paddle.unbind(x, 0)
    yield paddle.concat([x, y], 1)
    yield paddle.concat([x, y], -1)
    yield paddle.stack([x, y], 1)
    yield paddle.add_n([x, y, x])
    yield x[:1].expand([3, 6, 8])
    yield x[:1].expand_as(x)
    yield paddle.gather(x, ids[0] % 6, 1)
    yield paddle.gather(x, paddle.full([1], 1, "int64"), 0)
    yield paddle.index_select(x, ids[1] % 6, 1)
    yield paddle.tile(x, [2, 1, 3])
    yield paddle.tril(x, 1)
    yield paddle.triu(x, -1)
    yield F.dropout(x, 0.3, training=False)
    yield F.dropout(x, 0.3, training=False, mode="downscale_in_infer")
    yield x.transpose([2, 0, 1])
    yield from (layer(x)[0] for layer in held["recurrent"])


def write(folder):
    """Write the program and what it is given."""
    import paddle

    class Zoo(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            random, self.held = np.random.default_rng(4), {}
            shapes = {"shift": (4,), "spread": (4,), "bias": (8,)}
            shapes |= {
                shape: shape
                for shape in ((6, 4, 3, 3), (6, 2, 3, 3), (4, 1, 3, 3), (10, 8), (6, 1))
            } | {4: (4,), 8: (8,)}
            for number, (name, shape) in enumerate(shapes.items()):
                made = self.create_parameter(list(shape))
                made.set_value((random.random(shape) + 0.2).astype("float32"))
                self.held[name] = made
                self.add_parameter(f"held_{number}", made)
            nn = paddle.nn
            self.recurrent = nn.LayerList(
                [
                    nn.LSTM(8, 5, num_layers=2),
                    nn.LSTM(8, 3, direction="bidirect", num_layers=2),
                    nn.GRU(8, 5, direction="bidirect"),
                    nn.GRU(8, 4, num_layers=2, time_major=True),
                    nn.SimpleRNN(8, 5),
                    nn.SimpleRNN(8, 5, activation="relu", num_layers=2),
                ]
            )
            self.held["recurrent"] = self.recurrent

        def forward(self, x, y, image, ids, flags):
            return [paddle.assign(one) for one in results(x, y, image, ids, flags, self.held)]

    shapes = {
        "x": [2, 6, 8],
        "y": [2, 6, 8],
        "image": [2, 4, 9, 9],
        "ids": [2, 5],
        "flags": [2, 6, 8],
    }
    kinds = {"ids": "int64", "flags": "bool"}
    spec = [
        paddle.static.InputSpec(shape, kinds.get(name, "float32"), name=name)
        for name, shape in shapes.items()
    ]
    made = Zoo()
    made.eval()
    paddle.jit.save(paddle.jit.to_static(made, input_spec=spec, full_graph=True), f"{folder}/zoo")


def given():
    """What the program is given."""
    random = np.random.default_rng(3)
    x, y = (random.standard_normal((2, 6, 8)).astype("float32") for _ in range(2))
    y[0, :2] = x[0, :2]
    image = random.standard_normal((2, 4, 9, 9)).astype("float32")
    return x, y, image, random.integers(0, 10, (2, 5)), random.random((2, 6, 8)) > 0.5


if __name__ == "__main__":
    write(sys.argv[1])

"""A model whose matrices are int8 with a scale for each output channel, in two forms:
`python paddle_forms.py FOLDER` writes a program and a log of each there, `python paddle_forms.py run
FOLDER/NAME` runs one of them.

`before` scales the matrix and multiplies then, `behind` multiplies and scales then; `wrong` is
`behind` with another slope.
"""

import sys
from pathlib import Path

import numpy as np
import paddle
import paddle.inference

WIDTH, SLOPES = 12, {"before": 0.1, "behind": 0.1, "wrong": 0.3}


class Int8(paddle.nn.Layer):
    def __init__(self, rng, inputs, outputs, is_behind):
        super().__init__()
        self.is_behind = is_behind
        initial = paddle.nn.initializer.Assign
        values = rng.integers(-127, 128, (inputs, outputs)).astype("int8")
        self.values = self.create_parameter(
            [inputs, outputs], dtype="int8", default_initializer=initial(values)
        )
        self.values.stop_gradient = True
        scales = rng.uniform(0.002, 0.006, outputs).astype("float32")
        self.scales = self.create_parameter([outputs], default_initializer=initial(scales))

    def forward(self, x):
        values = paddle.cast(self.values, "float32")
        if self.is_behind:
            return paddle.matmul(x, values) * self.scales
        return paddle.matmul(x, values * self.scales)


class Tower(paddle.nn.Layer):
    def __init__(self, name):
        super().__init__()
        rng = np.random.default_rng(3)
        sizes = (WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH)
        self.products = paddle.nn.LayerList([Int8(rng, *size, name != "before") for size in sizes])
        self.slope = SLOPES[name]

    def forward(self, x):
        for number in (0, 2):
            slope = self.slope if number else 0.1
            inner = paddle.nn.functional.leaky_relu(self.products[number](x), slope)
            x = paddle.nn.functional.softmax(x + self.products[number + 1](inner))
        return x


def run(path, log=None):
    config = paddle.inference.Config(f"{path}.json", f"{path}.pdiparams")
    config.disable_gpu()
    config.disable_glog_info()
    config.disable_mkldnn()
    config.switch_ir_optim(False)
    predictor = paddle.inference.create_predictor(config)
    handle = predictor.get_input_handle("x")
    given = np.random.default_rng(5).standard_normal((4, WIDTH)).astype("float32")
    handle.reshape(given.shape)
    handle.copy_from_cpu(given)
    if log is not None:
        predictor.register_output_hook(lambda *told: print(*told, file=log))
    predictor.run()


def main(folder):
    paddle.set_printoptions(threshold=10**6)
    for name in SLOPES:
        tower = Tower(name)
        tower.eval()
        form = paddle.static.InputSpec([None, WIDTH], "float32", "x")
        paddle.jit.save(tower, str(folder / name), input_spec=[form])
        with (folder / f"{name}.log").open("w") as log:
            run(folder / name, log)


if __name__ == "__main__":
    run(Path(sys.argv[2])) if len(sys.argv) > 2 else main(Path(sys.argv[1]))

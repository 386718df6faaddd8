"""Which of the forms that go by one name an operator computed: GELU by the error function, by tanh,
or by a sigmoid.

In 16 bits these differ by less than rounding in nearly all elements, so no size of an error tells
them apart. But each form, rounded once, gives its own bits: an output that has the bits of one form
wherever the forms part was made by that form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from whence import dtypes
from whence.dtypes import Array
from whence.judge.limits import FORM_AGREES, FORM_CLOSE, FORM_LEAST, FORM_NEARER

Floats = npt.NDArray[np.float64]

MAX_SAMPLE = 1 << 16  # elements that are looked at


def _erf(x: Floats) -> Floats:
    flat = x.reshape(-1).tolist()
    return np.fromiter((math.erf(v) for v in flat), np.float64, len(flat)).reshape(x.shape)


def _sigmoid(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(np.clip(-x, -700, 700)))


_GELU: dict[str, Callable[[Floats], Floats]] = {
    "erf": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: x * _sigmoid(1.702 * x),
}
_FORMS = {"gelu": _GELU}


class ActivationForms(NamedTuple):
    """The forms of both sides. parts: elements at which they part, in the target's dtype; agree:
    how many are of the target's form.
    """

    reference: str
    target: str
    parts: int
    agree: int


def forms_of(op_type: str) -> dict[str, Callable[[Floats], Floats]]:
    """The forms that go by an operator's name ("GELU", "PytorchGELUTanh", "gelu"); {} when it has
    but one.
    """
    plain = op_type.rpartition(".")[2].lower()
    return next((forms for word, forms in _FORMS.items() if word in plain), {})


def told_apart(
    op_type: str, reference: tuple[Array, Array], target: tuple[Array, Array]
) -> ActivationForms | None:
    """The two forms when reference and target computed different ones beyond doubt, else None.

    reference, target: (input, output) of one call each, element by element, of any floating dtype;
    at most 65 536 elements are looked at.
    """
    forms = forms_of(op_type)
    if not forms:
        return None
    reference_fit, target_fit = _form(forms, *reference), _form(forms, *target)
    if reference_fit is None or target_fit is None or reference_fit[0] == target_fit[0]:
        return None
    name, x, values, output = target_fit
    expected = _rounded(forms[reference_fit[0]](x), output.dtype)
    parts = values != expected
    y, near, far = (a[parts].astype(np.float64) for a in (output, values, expected))
    agree = int(np.count_nonzero(np.abs(y - near) * FORM_NEARER <= np.abs(y - far)))
    many = int(np.count_nonzero(parts))
    return (
        ActivationForms(reference_fit[0], name, many, agree)
        if many >= FORM_LEAST and agree >= FORM_AGREES * many
        else None
    )


def _form(
    forms: dict[str, Callable[[Floats], Floats]], x_recorded: Array, y_recorded: Array
) -> tuple[str, Floats, Any, Any] | None:
    """(form, input, its values rounded as the output, the output) of the one form that an output
    has; None when none or several fit.

    Of finite elements.
    """
    if (
        x_recorded.shape != y_recorded.shape
        or not x_recorded.size
        or any(dtypes.of(a).kind != "float" for a in (x_recorded, y_recorded))
    ):
        return None
    x, y = _flat(x_recorded), _flat(y_recorded)
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    kind = y_recorded.dtype
    recorded = y.astype(kind)
    fits = []
    for name, form in forms.items():
        with np.errstate(over="ignore", invalid="ignore"):
            wide = form(x)
        values = _rounded(wide, kind)
        if dtypes.of(y_recorded).bits <= 16:
            off = int(np.count_nonzero(values != recorded))
        else:
            # float32 kernels are some roundings off; forms part by thousands.
            room = (
                FORM_CLOSE
                * float(dtypes.of(y_recorded).unit_roundoff or 0.0)
                * np.maximum(np.abs(x), np.abs(wide))
            )
            off = int(np.count_nonzero(np.abs(wide - y) > room))
        fits.append((off, name, values))
    fits.sort(key=lambda f: f[0])
    best, second = fits[0][0], fits[1][0]
    if second - best < FORM_LEAST or best > (1 - FORM_AGREES) * second:
        return None
    return fits[0][1], x, fits[0][2], recorded


def _flat(array: Array) -> Floats:
    flat = array.reshape(-1)
    return flat[:: max(-(-flat.size // MAX_SAMPLE), 1)].astype(np.float64)


def _rounded(values: Floats, kind: np.dtype[Any]) -> Any:
    """Rounded once more by way of float32, as kernels in 16 bits do."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(kind) if kind.itemsize <= 2 else values.astype(kind)

"""Inputs that were once read wrongly, made again: (target of benchmarks/fuzz.py, name, content). Each was found by the
fuzzer, and made smaller by hand."""

INPUTS = [
    ("map", "brackets.yaml", b"names: []\npairs: " + b"[" * 3000),
    ("policy", "brackets.yaml", b"allow: " + b"{a: " * 3000),
    ("map", "sparse.yaml", 1 << 28),
    ("policy", "sparse.yaml", 1 << 28),
    ("thresholds", "sparse.yaml", 1 << 28),
    ("library of labels", "sparse.yaml", 1 << 28),
    ("msprobe configuration", "sparse.json", 1 << 28),
    ("msprobe configuration", "deep.json", b"[" * 200_000),
    ("msprobe configuration", "task.json", b'{"task": ["tensor"]}'),
    ("msprobe configuration", "section.json", b'{"task": "tensor", "tensor": 1.5}'),
    ("msprobe configuration", "list.json", b'{"task": "tensor", "tensor": {"list": 7}}'),
    ("msprobe configuration", "mode.json", b'{"task": "tensor", "tensor": {"data_mode": 7}}'),
    ("msprobe configuration", "path.json", b'{"dump_path": 7}'),
    ("msprobe configuration", "steps.json", b'{"step": 1.5}'),
    ("msprobe configuration", "range.json", b'{"step": ["0-99999999999"]}'),
    (
        "csv of operator tests",
        "shape.csv",
        b'name,status,shape\na,pass,"(' + b"9" * 400 + b', 9)"\n',
    ),
    ("csv of operator tests", "digits.csv", b"name,status,shape\na,pass,(" + b"9" * 9000 + b")\n"),
    ("csv of operator tests", "counts.csv", b"name,status,shape,beyond_1e-1\na,pass,(2),1e300\n"),
]

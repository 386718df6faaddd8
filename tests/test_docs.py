"""The docs are true: every command and option is in them, what they show parses, and their python
runs.
"""

import ast
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import yaml

import inside
import warm
import whence
import whence.judge.limits
from stories import first_clauses
from whence import cli, results
from whence.comparison.verdicts import stretch_replay
from whence.instrument.options import CaptureOptions
from whence.judge import policy

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "SKILL.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXT = "\n".join(page.read_text() for page in PAGES)
# A block, with the comment above it ("<!-- not run: why -->", "<!-- file: infer.py -->").
BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.]*(e[+-]?\d+)?")
# What a block takes as given, by page and a piece of the block.
_PAIR = "import numpy as np\nreference, target = np.ones(4, np.float32), np.ones(4, np.float64)\n"
_RUNS = """import torch
import whence

for name, form in (("{0}", "none"), ("{1}", "tanh")):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(approximate=form))
    with torch.no_grad(), whence.capture(model, name):
        model(torch.randn(8, 64))
"""
GIVEN = {
    ("docs/howto/by-hand.md", "model(x)"): """import pathlib, pickle
import numpy as np, torch
model, x, out = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(2, 4), "."
""",
    ("docs/ci.md", "def test_the_losses"): """import json
from pathlib import Path

def losses() -> dict[str, float]:
    return {"loss": 0.1}

Path("losses.json").write_text(json.dumps(losses()))
""",
    ("docs/ci.md", "def test_the_port"): """import torch
from pathlib import Path

model, ported, batch = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), torch.ones(1, 4)
ported.load_state_dict(model.state_dict())
Path("quantised.toml").write_text('[[allow]]\\nop = "Linear"\\ndeclare = "tf32"\\n')
""",
    ("docs/labels.md", "compare_labels"): """import numpy as np
import whence

for side in ("ref", "tgt"):
    with whence.recording(f"runs/{side}"):
        whence.label("y", np.ones(3))
""",
    ("docs/metrics.md", "import measure"): _PAIR,
    ("docs/metrics.md", "custom="): _PAIR + "from whence.metrics import measure\n",
    ("docs/report.md", "whence.watch"): _RUNS.format("runs/ref", "runs/now"),
    ("docs/operators.md", "whence.repro"): _RUNS.format("runs/ref", "runs/tgt")
    + 'whence.compare("runs/ref", "runs/tgt", output="cmp")\n',
}
CONTEXT = click.Context(cli.group, info_name="whence")
COMMANDS = cli.group.list_commands(CONTEXT)


def blocks(language: str):
    for page in PAGES:
        path = str(page.relative_to(ROOT))
        for number, (remark, kind, body) in enumerate(BLOCK.findall(page.read_text())):
            if kind == language:
                given = (
                    text for (of, piece), text in GIVEN.items() if of == path and piece in body
                )
                slow = pytest.mark.slow if remark.startswith("slow: ") else ()
                whole = next(given, "") + body
                yield pytest.param(remark, whole, id=f"{path}-{number}", marks=slow)


def skeleton(answer: str) -> str:
    """An answer without its figures, which differ from CPU to CPU, and its evidence up to the first
    clause.
    """
    return NUMBER.sub("#", first_clauses(answer))


def words_of(body: str):
    """Word lists of the whence commands in a shell block, also those inside `sh -c '...'`."""
    for line in body.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[;&|]+", word):
                if command and command[0].rpartition("/")[2] == "whence":
                    yield command[1:]
                command = []
            else:
                if " " in word:
                    yield from words_of(word)
                command.append(word)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_docs(name):
    command = cli.group.get_command(CONTEXT, name)
    assert command is not None
    missing = [] if re.search(rf"whence {name}\b", TEXT) else [name]
    below = command.commands if isinstance(command, click.Group) else {}
    missing += [part for part in below if not re.search(rf"whence {name} {part}\b", TEXT)]
    for option in [p for c in (command, *below.values()) for p in c.params]:
        if isinstance(option, click.Option):
            spelt = [o for o in (*option.opts, *option.secondary_opts) if o.startswith("--")]
            missing += [
                o
                for o in spelt
                if not re.search(rf"(?<![\w-]){re.escape(o)}(?![\w-])", TEXT) and o != "--programs"
            ]
    assert missing == []


@pytest.mark.parametrize(("remark", "body"), [*blocks("sh"), *blocks("console")])
def test_commands_in_the_docs_parse(remark, body):
    for command in words_of(body.replace("$ whence", "whence")):
        name, *arguments = command
        found = cli.group.get_command(CONTEXT, name)
        assert found is not None, name
        found.make_context(name, arguments)


def test_commands_in_sentences_are_commands_with_such_options():
    wrong = []
    for words in (
        code.split() for code in re.findall(r"(?<!`)`whence ([a-z][a-z-]*(?: [^`\n]*)?)`", TEXT)
    ):
        command, rest = cli.group, [*words]
        while isinstance(command, click.Group) and rest and rest[0] not in ("...", "…"):
            command = command.get_command(CONTEXT, rest.pop(0))
        known = (
            {o for p in command.params for o in (*p.opts, *p.secondary_opts)} if command else set()
        )
        options = [
            w.partition("=")[0]
            for w in rest[: rest.index("--") if "--" in rest else None]
            if w.startswith("-")
        ]
        wrong += [" ".join(words)] if command is None or {*options} - {*known, "--help"} else []
    assert wrong == []


@pytest.mark.torch
@pytest.mark.parametrize(("remark", "body"), [*blocks("python")])
def test_python_in_the_docs_runs(remark, body, tmp_path):
    if remark.startswith(("not run: ", "file: ")):  # a file is run by the story it belongs to
        pytest.skip(remark)
    pytest.importorskip("torch")
    if remark == "pytest":
        (tmp_path / "test_it.py").write_text(body)
        words = [warm.TORCH, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    else:
        done = inside.program(tmp_path, body)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^ *print\(.*\)  +# (.+)$", body, re.MULTILINE)
    assert [line for line in said if line not in done.stdout.splitlines()] == []


@pytest.mark.slow
def test_python_in_the_docs_is_typed(tmp_path):
    """mypy --strict finds nothing in any block, with what is public of whence as it stands."""
    pytest.importorskip("mypy")
    names = {}
    for number, block in enumerate(blocks("python")):
        names[f"block_{number}.py"] = block.id
        remark, body = block.values
        (tmp_path / f"block_{number}.py").write_text(body)
        if remark.startswith("file: "):  # other blocks of the page import it
            (tmp_path / remark.removeprefix("file: ")).write_text(body)
    words = (
        "--strict",
        "--follow-imports=silent",
        "--allow-subclassing-any",
        "--scripts-are-modules",
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, *(str(tmp_path / name) for name in names)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.sub(r"^\S*(block_\d+\.py)", lambda m: names[m[1]], done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, found


@pytest.mark.torch
def test_the_five_commands_of_the_readme(tmp_path):
    pytest.importorskip("torch")
    readme = (ROOT / "README.md").read_text()
    part = readme[readme.index("## Five commands") : readme.index("## Where to go next")]
    assert followed(part, tmp_path) == ["run", "run", "compare", "repro", "report"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "repro" / "repro.py").exists()


def followed(text: str, folder: Path) -> list[str]:
    """Do what a text says, in a folder: write its files and run its commands. Fails where a command
    ends otherwise than it should, or an answer shown is not the one that `compare` gave last.
    Returns the names of the commands.
    """
    ran, given = [], {}
    for remark, kind, body in BLOCK.findall(text):
        if remark.startswith("file: "):
            (folder / remark.removeprefix("file: ")).write_text(body)
        elif kind == "text":
            assert skeleton(body) == given["compare"], "the answer shown is not the one given"
        elif kind == "sh":
            for command in words_of(body):
                command = [warm.TORCH if w == "python" else w for w in command]
                done = inside.or_outside(folder, *command)
                ran.append(command[0])
                assert done.returncode == int(command[0] == "compare"), done.stderr
                given[command[0]] = skeleton(done.stdout)
    return ran


def links(page: Path):
    """Links of a page that stay in the repository: (as written, file, anchor)."""
    for link, _, anchor in (
        whole.partition("#") for whole in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    ):
        if "://" not in link:
            yield f"{link}#{anchor}", (page.parent / link).resolve() if link else page, anchor


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def test_links_lead_somewhere():
    broken = []
    for page in PAGES:
        for link, target, anchor in links(page):
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken += [f"{page.name}: {link}"]
    assert broken == []


def test_pages_that_the_code_names_are_there():
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    named = {
        (page, path.name)
        for path in sources
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.(?:md|json)", path.read_text())
    }
    assert len(named) > 20
    assert sorted(entry for entry in named if not (ROOT / entry[0]).exists()) == []


def test_every_page_can_be_reached_from_the_readme():
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page.is_dir():
            seen.update(page.glob("*.md"))
        elif page.suffix == ".md" and page not in seen:
            seen.add(page)
            ahead += [target for _, target, _ in links(page)]
    assert (
        sorted(
            str(p.relative_to(ROOT))
            for p in {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - seen
        )
        == []
    )


def test_no_page_names_this_machine():
    assert re.findall(r"/(?:work|home|root|tmp)/\S+|https?://(?!github\.com)\S+", TEXT) == []


def test_verdicts_and_limits_are_explained():
    page = (ROOT / "docs" / "verdicts.md").read_text()
    assert [v for v in results.VERDICTS if f"| `{v}` |" not in page] == []
    for field in dataclasses.fields(whence.judge.limits.Limits):
        row = re.search(rf"^\| `{field.name}` \| (\S+) \|", page, re.MULTILINE)
        assert row is not None, field.name
        assert float(row[1]) == field.default
    assert f"is acquitted within {stretch_replay.WELL_WITHIN} of that" in page
    assert f"and {stretch_replay._CLEARLY:.0f} times as far as the target's" in page


def test_every_key_of_a_policy_is_explained_and_the_examples_are_policies():
    page = (ROOT / "docs" / "policy.md").read_text()
    own = {key for keys in policy._OWN.values() for key in keys}
    keys = {*policy._COMMON, *own, *policy._WEIGHTS, *policy._ACTIVATIONS}
    assert [k for k in keys if f"`{k}`" not in page and f"`{k} = " not in page] == []
    assert [k for k in policy.KINDS if f"### `{k}`" not in page] == []
    assert [
        f for f in (*policy.FORMATS, *policy.FORMS) if f'"{f}"' not in page and f"`{f}`" not in page
    ] == []
    made = [
        tomllib.loads(b) if kind == "toml" else yaml.safe_load(b)
        for _, kind, b in BLOCK.findall(page)
        if kind in ("toml", "yaml")
    ]
    assert [len(policy.parse(data).entries) for data in made] == [1, 5]


def test_every_capture_option_is_explained():
    page = (ROOT / "docs" / "capture.md").read_text()
    names = {"classes": "class", "print_pattern": "print"}
    options = [
        f"--{names.get(f, f).replace('_', '-')}"
        for f in CaptureOptions.__struct_fields__
        if f != "programs"
    ]
    assert [o for o in options if o not in page] == []
    assert "--no-programs" in page


def test_the_test_command_stands_between_its_markers():
    """.ci/run takes it from there."""
    readme = (ROOT / "README.md").read_text()
    part = readme[readme.index("<!-- tests -->") : readme.index("<!-- end of tests -->")]
    lines = [line for line in part.splitlines() if line and not line.startswith(("<", "`"))]
    assert len(lines) == 1
    assert lines[0].endswith(" && .venv/bin/python -m pytest -n auto")


def test_every_reader_and_view_is_in_the_docs():
    from whence import readers
    from whence.api import views

    page = (ROOT / "docs" / "formats.md").read_text()
    assert [name for name in readers.known() if f"`{name}`" not in page] == []
    table = (ROOT / "docs" / "convert.md").read_text()
    assert [name for name in views() if f"`{name}`" not in table] == []


def test_every_writer_is_in_the_docs():
    from whence import writers

    page = (ROOT / "docs" / "convert.md").read_text()
    assert [name for name in writers.known() if f"`{name}`" not in page] == []


def test_every_name_of_the_package_is_in_the_docs():
    assert [name for name in whence.__all__ if not re.search(rf"whence\.{name}\b", TEXT)] == []
    assert [name for name in whence.__all__ if not getattr(whence, name).__doc__] == []


SOURCES = [
    ast.parse(text)
    for text in (path.read_text() for path in (ROOT / "src" / "whence").rglob("*.py"))
    if re.search("environ|getenv|WHENCE_|entry_points", text)
]


def variables(tree: ast.AST):
    """Environment variables that a file names: in `os.environ`, or by a name of our own."""
    for node in ast.walk(tree):
        named = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            named = [node.slice]
        elif isinstance(node, ast.Call) and re.search(
            r"\b(environ\.\w+|getenv)$", ast.unparse(node.func)
        ):
            named = node.args[:1]
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_?WHENCE_[A-Z_]+", str(node.value)):
            named = [node]
        elif (
            isinstance(node, ast.For)
            and "environ" in ast.unparse(node)
            and isinstance(node.iter, ast.Tuple)
        ):
            named = node.iter.elts
        yield from (
            n.value for n in named if isinstance(n, ast.Constant) and isinstance(n.value, str)
        )


def test_every_environment_variable_and_entry_point_is_in_the_docs():
    page = (ROOT / "docs" / "reference.md").read_text()
    found = {name for tree in SOURCES for name in variables(tree)}
    assert {"WHENCE_DEBUG", "RANK", "XDG_CACHE_HOME"} <= found
    assert sorted(name for name in found if f"`{name}`" not in page) == []
    groups = {
        node.value
        for tree in SOURCES
        if "entry_points(" in ast.unparse(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and re.fullmatch(r"whence\.[a-z]+", str(node.value))
    }
    assert "whence.cli" in groups
    assert sorted(group for group in groups if f"`{group}`" not in page) == []


def test_the_layers_in_contributing_are_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import layers

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    between = text.partition(layers.MARKS[0])[2].partition(layers.MARKS[1])[0]
    assert between.strip() == layers.table(), "python docs/layers.py --write"


def test_the_table_of_onnx_operators_is_the_one_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import onnx_operators

    page = onnx_operators.PAGE.read_text(encoding="utf-8")
    _, _, rest = page.partition(onnx_operators.MARKS[0])
    between, _, _ = rest.partition(onnx_operators.MARKS[1])
    assert between.strip() == onnx_operators.table(), "python docs/onnx_operators.py --write"


# What reads as translated, or as a riddle, and the better word.
BANNED = {
    r"face to face|fac(e|es|ed|ing) (each other|one another)": "paired, aligned",
    r"(who|what) faces (whom|what)": "which are paired",
    r"\bfac(es|ed) (a|the|its own|another)\b": "is paired with",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bparts? from\b(?! the)|\bpart company\b": "differs from, diverges from",
    r"send round": "share",
    r"\bas ever\b": "as usual",
    r"\bheld against\b": "compared with",
    r"\b[Ww]ho is (right|nearer|closer) says\b|\bsays a third run\b": "a third run tells which",
}
QUOTED = {"only moves elements: held against what it was given"}
"""Texts that are part of the run format and stay as they are."""


def spelt_badly(text: str):
    """(phrase, better word) for every banned phrase of a text."""
    for pattern, better in BANNED.items():
        yield from ((found[0], better) for found in re.finditer(pattern, text))


def prose(page: Path) -> str:
    """A page without what programs printed, and without links' addresses."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_the_banned_phrases_are_found():
    assert list(spelt_badly("Calls that face each other are mended.")) == [
        ("face each other", "paired, aligned"),
        ("mended", "fix"),
    ]
    assert list(spelt_badly("A part of the surface, as the other parts.")) == []


def test_pages_use_plain_words():
    pages = [p for p in PAGES if "decisions" not in p.parts and p.name != "CHANGELOG.md"]
    assert {
        str(page.relative_to(ROOT)): found
        for page in pages
        if (found := [*spelt_badly(prose(page))])
    } == {}


def test_messages_use_plain_words():
    """Every text in the code of whence that is not a docstring: what users may see of it."""
    found = {}
    for path in (ROOT / "src" / "whence").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        silent = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        if "cli" in path.parts:  # docstrings are what --help prints
            silent = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) in silent or node.value in QUOTED:
                    continue
                for phrase, better in spelt_badly(node.value):
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = (phrase, better)
    assert found == {}


# Pages that are looked things up in, and lists.
REFERENCES = {
    "benchmarks.md",
    "faultbench.md",
    "metrics.md",
    "policy.md",
    "switching.md",
    "verdicts.md",
}
SCREENS = 150
"""Lines with text on three screens."""


def test_no_page_but_references_is_longer_than_three_screens():
    lengths = {
        page.name: sum(bool(line.strip()) for line in page.read_text().splitlines())
        for page in (ROOT / "docs").rglob("*.md")
        if "decisions" not in page.parts and page.name not in REFERENCES
    }
    assert {name: lines for name, lines in lengths.items() if lines > SCREENS} == {}
    assert len((ROOT / "README.md").read_text().splitlines()) <= 95


def test_what_users_read_stays_small():
    """A new page merges with one of its subject; what only contributors read goes to docs/dev."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "howto").glob("*.md")]
    assert len(pages) <= 35
    assert sum(page.stat().st_size for page in pages) <= 250_000
    below = {path.relative_to(ROOT / "docs").parts[0] for path in (ROOT / "docs").rglob("*/*.md")}
    assert below == {"dev", "howto"}


GLOSSARY = ROOT / "docs" / "glossary.md"
DEFINE = {
    "glossary.md",
    "how-it-works.md",
    "verdicts.md",
    "format.md",
    "benchmarks.md",
    "reference.md",
}
"""Pages that say themselves what these words mean, are for those who work on whence, or are a list
of links.
"""
OWN = ("slot", "region", "own rounding", "replay", "inherited", "introduced", "amplified", "root")
"""Words that mean something of whence's own, as their section of the glossary says."""


def terms_of_the_glossary() -> dict[str, str]:
    """{term: anchor of the section that defines it}"""
    terms, anchor = {}, ""
    for title, names in re.findall(
        r"^## (.+)$|^\*\*(.+?)\.\*\*", GLOSSARY.read_text(), re.MULTILINE
    ):
        anchor = title.lower().replace(" ", "-") or anchor
        words = (re.sub(r"\(.*?\)", "", name).strip().lower() for name in names.split(","))
        terms |= {word: anchor for word in words if word}
    return terms


def used_on(page: Path, terms) -> set[str]:
    """Terms that stand in the sentences of a page."""
    arithmetic = "root mean square|square root|inverse root"
    text = re.sub(rf"`[^`\n]*`|^#.*$|<!--.*?-->|{arithmetic}", "", prose(page), flags=re.MULTILINE)
    endings = {"replay": "(s|ed)?"}
    return {
        term
        for term in terms
        if re.search(rf"\b{re.escape(term)}{endings.get(term, 's?')}\b", text, re.IGNORECASE)
    }


def test_a_page_that_uses_terms_of_the_glossary_links_to_it():
    """Words that every engineer uses somehow: one link is enough. Of whence's own words the page
    links the section that defines them.
    """
    terms = terms_of_the_glossary()
    assert {"run", "region", "rho", "finding"} <= set(terms) and {*OWN} <= set(terms)
    missing = {}
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if "decisions" in page.parts or page.name in DEFINE:
            continue
        text = page.read_text()
        if used_on(page, terms) and "glossary.md" not in text:
            missing[str(page.relative_to(ROOT))] = "glossary.md"
        wanted = {f"glossary.md#{terms[word]}" for word in used_on(page, OWN)}
        if absent := {link for link in wanted if link not in text}:
            missing[str(page.relative_to(ROOT))] = absent
    assert missing == {}


def test_every_term_of_the_glossary_has_a_sentence_and_an_example():
    text = GLOSSARY.read_text()
    terms = re.findall(r"^\*\*(.+?)\.\*\* (.+?)\n\n?(?=\*\*|#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert 10 <= len(terms) <= 25
    assert [
        name
        for name, body in terms
        if not re.search(r"^\*[^*].*\*$", body, re.DOTALL | re.MULTILINE)
    ] == []
    said = {word.strip(" ρ()") for name, _ in terms for word in name.lower().split(",")}
    wanted = "region spread z rho slot introduced inherited amplified own|rounding coherent|scale"
    wanted += " paired aligned replay record run root"
    assert [word for word in wanted.split() if word.replace("|", " ") not in said] == []

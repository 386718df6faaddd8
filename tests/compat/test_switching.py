"""docs/switching.md has every name, argument, command and option of the other tools that whence
answers to.
"""

import importlib
import inspect
import re
from pathlib import Path

import click
import pytest

from whence import cli

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "switching.md").read_text()
COMPAT = ROOT / "src" / "whence" / "compat"
MODULES = sorted(
    ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for path in COMPAT.rglob("*.py")
    if not path.name.startswith("_")
    or (path.name == "__init__.py" and "__all__" in path.read_text())
)
TOOLS = [
    name
    for name in ("ait", "msit", "xray", "msprobe")
    if (ROOT / "src" / "whence" / "cli" / f"{name}.py").exists()
]


def is_told(name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", PAGE) is not None


@pytest.mark.parametrize("module", MODULES)
def test_every_name_and_argument(module):
    found = importlib.import_module(module)
    assert any(is_told(part) for part in (module, module.rpartition(".")[0]))
    missing = []
    for name in found.__all__:
        made = getattr(found, name)
        missing += [] if is_told(name) else [name]
        calls = [made] + (
            [v for k, v in vars(made).items() if inspect.isfunction(v) and k[0] != "_"]
            if inspect.isclass(made)
            else []
        )
        parameters = {p for call in calls for p in inspect.signature(call).parameters.values()}
        missing += [
            p.name
            for p in parameters
            if p.kind is not p.VAR_KEYWORD and p.name != "self" and not is_told(p.name)
        ]
    assert sorted(set(missing)) == []


def commands(command: click.Command, words: str):
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{words} {name}")
    else:
        yield words, command


@pytest.mark.parametrize("tool", TOOLS)
def test_every_command_and_option(tool):
    context = click.Context(cli.group, info_name="whence")
    missing = []
    for words, command in commands(cli.group.get_command(context, tool), tool):
        if not is_told(words.partition(" ")[2]):
            missing.append(words)
        if tool in ("ait", "msit"):
            spelt = [o for p in command.params if isinstance(p, click.Option) for o in p.opts]
            missing += [
                f"{words} {o}"
                for o in spelt
                if not re.search(rf"(?<![\w-]){re.escape(o)}(?![\w-])", PAGE)
            ]
    assert missing == []


def test_imports_load_no_framework():
    import subprocess
    import sys

    code = (
        f"import sys\n{''.join(f'import {m}{chr(10)}' for m in MODULES)}assert not {{'torch', "
        f"'paddle', 'h5py'}} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The documentation as a site: it builds without a warning, its links hold, and what is generated
is whole.
"""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import yaml

import whence
from whence import cli, metrics, results

if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
    pytest.skip(
        "mkdocs and mkdocs-material are not installed: pip install -e '.[docs]'",
        allow_module_level=True,
    )

ROOT = Path(__file__).parent.parent


class Seen(HTMLParser):
    """What a built page refers to, its anchors, its text, and its paragraphs without their code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.paragraphs: list[str] = []
        self.text: list[str] = []
        self.inside: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.anchors.add(named.get("id") or "")
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        elif tag in ("script", "img", "iframe") and named.get("src"):
            self.loads.append(named["src"])
        elif tag == "link" and named.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loads.append(named["href"])
        self.inside.append(tag)
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        while tag in self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        self.text.append(data)
        if "p" in self.inside:
            self.paragraphs[-1] += "code" if "code" in self.inside else data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {page: Seen(page) for page in sorted(folder.rglob("*.html"))}


@pytest.fixture(scope="module")
def pages(site):
    """Text of the pages by their place in the site."""
    root = min(site, key=lambda page: len(page.parts)).parent
    return {
        page.parent.relative_to(root).as_posix(): "".join(seen.text)
        for page, seen in site.items()
        if page.name == "index.html"
    }


def test_links_and_anchors_lead_somewhere(site):
    broken = []
    for page, seen in site.items():
        if page.name == "404.html":  # its links are from the root of a server
            continue
        for link in seen.links:
            place, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", place):
                continue
            target = (page.parent / place).resolve() if place else page
            target = target / "index.html" if target.is_dir() else target
            if target.suffix not in ("", ".html") and target.is_file():
                continue  # a picture or a schema, copied as it is
            if target not in site or (anchor and anchor not in site[target].anchors):
                broken.append(f"{page.parent.name}: {link}")
    assert broken == []
    assert sum(len(seen.links) for seen in site.values()) > 1000


def test_nothing_is_loaded_from_elsewhere(site):
    assert [
        load for seen in site.values() for load in seen.loads if re.match(r"(https?:)?//", load)
    ] == []
    assert any(load.endswith(".css") for seen in site.values() for load in seen.loads)


def test_no_markdown_is_left_unread(site):
    """A list or table that stands right under a sentence is one on GitHub, and none here."""
    left = re.compile(r"^ *(?:[-*] |1\. |\|.*\|$|```|#+ ).*", re.MULTILINE)
    said = {
        page.parent.name: [line for text in seen.paragraphs for line in left.findall(text)]
        for page, seen in site.items()
    }
    assert {name: lines for name, lines in said.items() if lines} == {}


def below(command, context):
    """A command and all that are below it, with what they are called."""
    yield context.command_path, command
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        part = command.get_command(context, name)
        yield from below(part, click.Context(part, info_name=name, parent=context))


def test_every_command_option_and_function_is_in_the_reference(pages):
    parts = re.split(r"^Usage: ", pages["reference/cli"], flags=re.MULTILINE)
    missing = []
    for name, command in below(cli.group, click.Context(cli.group, info_name="whence")):
        text = next((part for part in parts if part.startswith(f"{name} [")), "")
        missing += [] if text else [name]
        for option in [p for p in command.params if isinstance(p, click.Option) and not p.hidden]:
            missing += [f"{name} {spelt}" for spelt in option.opts if spelt not in text]
    assert missing == []
    assert len(parts) > 30
    assert [name for name in whence.__all__ if f"whence.{name}" not in pages["reference/api"]] == []


def test_metrics_and_verdicts_are_listed(pages):
    assert [metric.name for metric in metrics.METRICS if metric.name not in pages["metrics"]] == []
    assert [verdict for verdict in results.VERDICTS if verdict not in pages["verdicts"]] == []


def test_the_list_of_all_pages_and_the_navigation_agree():
    def flat(entries):
        for entry in entries:
            for value in entry.values():
                yield from flat(value) if isinstance(value, list) else [value]

    nav = set(flat(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    lists = ROOT / "docs" / "contents.md", ROOT / "docs" / "dev" / "README.md"
    listed = {
        Path(os.path.normpath(page.parent / link)).relative_to(ROOT).as_posix()
        for page in lists
        for link in re.findall(r"\]\(([^)#]+)", page.read_text())
    }
    places = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "SECURITY.md": "security.md",
        "CHANGELOG.md": "changes.md",
        "docs/dev/decisions": "dev/decisions/index.md",
    }
    generated = {"contents.md", "reference/cli.md", "reference/api.md"}
    assert {places.get(page, page.removeprefix("docs/")) for page in listed} == nav - generated

"""Commands that take a comparison take one that lies in an object store."""

import functools
import json
import os
import re
import threading
import uuid
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import click
import pytest

import inside
import warm
import whence
from whence import api, cli
from whence.cli import _options
from whence.errors import UnreadableRun
from whence.store import remote

fsspec = pytest.importorskip("fsspec")
torch = pytest.importorskip("torch")


def model(approximate):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.GELU(approximate=approximate), torch.nn.Linear(16, 4)
    )


def use(built):
    torch.manual_seed(1)
    with torch.no_grad():
        built(torch.randn(8, 16))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The same comparison of the same runs: in a folder, and at a URL."""
    folder = tmp_path_factory.mktemp("far")
    name = f"bucket-{uuid.uuid4().hex}"
    url = f"memory://{name}"
    os.environ["WHENCE_SPOOL"] = str(folder / "spool")
    try:
        for run, approximate in (("ref", "none"), ("tgt", "tanh")):
            built = model(approximate)
            with whence.capture(built, folder / run):
                use(built)
            api.upload(folder / run, f"{url}/{run}")
        for where in (folder, url):
            done = inside.whence(
                folder, "compare", f"{where}/ref", f"{where}/tgt", "-o", f"{where}/cmp"
            )
            assert done.returncode == 1, done.stderr
    finally:
        del os.environ["WHENCE_SPOOL"]
    yield folder, url
    fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


def both(places, tmp_path, *words):
    """What a command says of the comparison in the folder and of the one at the URL, whose places
    are written as CMP's.
    """
    answers = []
    for where in places:
        done = inside.whence(tmp_path, *(str(w).replace("PLACE", str(where)) for w in words))
        said = re.sub(r"in \d+\.\d+ s", "", done.stdout.replace(str(where), "PLACE"))
        answers.append((done.returncode, said, done.stderr.replace(str(where), "PLACE")))
    return answers


@pytest.mark.parametrize(
    "words",
    [
        ("report", "PLACE/cmp", "--format", "text"),
        ("report", "PLACE/cmp/report.json", "--format", "csv"),
        ("trace", "PLACE/cmp"),
        ("trace", "PLACE/cmp", "2"),
        ("show", "PLACE/cmp"),
        ("compare", "PLACE/cmp/report.json", "PLACE/ref"),
        ("repro", "PLACE/cmp", "-o", "repro", "--no-run", "--force"),
        ("locate", "PLACE/cmp", "PLACE/ref"),
        ("locate", "PLACE/cmp/report.json", "PLACE/ref"),
        ("trace", "PLACE/ref"),
    ],
)
def test_the_answer_is_that_of_the_folder(places, tmp_path, words):
    here, far = both(places, tmp_path, *words)
    assert here == far
    assert "is there already" not in here[2]


def test_a_page_is_written_here(places, tmp_path):
    _, url = places
    done = inside.whence(tmp_path, "report", f"{url}/cmp", "--junit", "x.xml")
    assert (done.returncode, done.stderr) == (0, "")
    page = inside.whence(tmp_path, "report", f"{url}/cmp")
    assert page.stdout.startswith("written to report.html"), page.stderr
    assert "could not be read again" not in (tmp_path / "report.html").read_text()
    assert {file.name for file in tmp_path.iterdir()} == {"x.xml", "report.html"}


def test_tables_are_asked_and_written(places, tmp_path, monkeypatch):
    pytest.importorskip("duckdb")
    pyarrow = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(remote, "_PART", 1000)  # several parts
    asked = "select name, verdict, rel_l2 from pairs order by pair, name"
    here, far = both(places, tmp_path, "query", "PLACE/cmp", asked)
    assert here == far
    assert "(0 rows)" not in here[1]
    _, url = places
    done = inside.whence(tmp_path, "report", f"{url}/cmp", "--parquet", "pairs.parquet")
    assert done.returncode == 0, done.stderr
    saved = whence.load_comparison(f"{url}/cmp")
    assert pyarrow.read_table(tmp_path / "pairs.parquet").num_rows == len(saved.rows)


def test_locate_runs_the_target_of_a_comparison_at_a_url(places):
    _, url = places
    built = model("tanh")
    result = whence.locate(f"{url}/cmp", model=built, use=use)
    assert result.reference == f"{url}/ref"
    assert [round_.name for round_ in result.rounds] == ["1"]
    assert result.rounds[0].share == pytest.approx(1.0)


@pytest.mark.slow
def test_locate_runs_a_recorded_command_again(tmp_path):
    (tmp_path / "infer.py").write_text(
        "import sys, torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(sys.argv[1]))\n"
        "with torch.no_grad():\n"
        "    model(torch.randn(8, 16))\n"
    )
    url = f"file://{tmp_path}/store"
    for run, approximate in (("ref", "none"), ("tgt", "tanh")):
        inside.or_outside(
            tmp_path, "run", "-o", f"{url}/{run}", "--", warm.TORCH, "infer.py", approximate
        )
    inside.whence(tmp_path, "compare", f"{url}/ref", f"{url}/tgt", "-o", f"{url}/cmp")
    done = inside.or_outside(tmp_path, "locate", f"{url}/cmp")
    assert "explains 100% of the squared error" in done.stdout, done.stderr


def test_a_web_server_is_read_and_its_end_told(places, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install aiohttp")
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    folder, _ = places
    pages = functools.partial(SilentPages, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert whence.load_comparison(f"{url}/cmp") == whence.load_comparison(folder / "cmp")
        assert f"no comparison at {url}/none" in command(tmp_path, "trace", f"{url}/none")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert "(4 tries); check the connection" in command(tmp_path, "trace", f"{url}/cmp")


class SilentPages(SimpleHTTPRequestHandler):
    def log_message(self, *words):
        pass


def command(folder, *words):
    done = inside.whence(folder, *words)
    assert done.returncode == 3, (done.stdout, done.stderr)
    return done.stderr


def test_what_is_no_comparison_is_told(places, tmp_path):
    _, url = places
    files = fsspec.filesystem("memory")
    for verb in (("report",), ("query", "--tables"), ("trace",), ("repro", "-o", "x")):
        told = command(tmp_path, *verb, f"{url}/none")
        assert f"no comparison at {url}/none: it has no report.json" in told
        assert "is a run, not a comparison" in command(tmp_path, *verb, f"{url}/ref")
        assert "there is no such file" in command(tmp_path, *verb, f"{url}/none/report.json")
    assert "nothing is there; check the spelling" in command(tmp_path, "locate", f"{url}/none")
    for content in (b"", b"{", b'{"status": 1}'):
        files.pipe_file(f"{url}/bad/report.json", content)
        for verb in (("report",), ("query", "--tables"), ("trace",)):
            told = command(tmp_path, *verb, f"{url}/bad")
            assert f"{url}/bad is not a comparison that this whence can read" in told
            assert f"whence compare REF TGT -o {url}/bad --force" in told
    assert not list(tmp_path.iterdir())


def test_a_cut_line_is_tried_again_and_then_told(places, tmp_path, monkeypatch):
    _, url = places
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)
    files = type(fsspec.filesystem("memory"))
    whole, failures = files.cat_file, []

    def cut(self, path, *words, **more):
        if len(failures) < least:
            failures.append(path)
            raise ConnectionResetError("the line was cut")
        return whole(self, path, *words, **more)

    monkeypatch.setattr(files, "cat_file", cut)
    least = remote.TRIES - 1
    assert len(whence.load_comparison(f"{url}/cmp").rows) > 0
    assert len(failures) == least
    least = 100
    for verb in (("report",), ("query", "--tables"), ("trace",), ("locate",)):
        told = command(tmp_path, *verb, f"{url}/cmp")
        assert re.search(rf"cannot read {url}/cmp/report.json .*the line was cut \(4 tries\)", told)
    monkeypatch.setattr(files, "cat_file", lambda *a, **k: whole(*a, **k)[:-1])
    with pytest.raises(UnreadableRun, match=r"report\.json bytes 0 to \d+: \d+ bytes came"):
        whence.load_comparison(f"{url}/cmp")


def test_a_server_that_is_not_there_is_not_taken_for_a_missing_file(places, monkeypatch):
    _, url = places
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.0)

    def refused(self, path, **more):  # as fsspec does for HTTP
        raise FileNotFoundError(path) from ConnectionRefusedError("refused")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", refused)
    with pytest.raises(UnreadableRun, match=r"refused \(4 tries\); check the connection"):
        whence.load_comparison(f"{url}/cmp")


WRITTEN = {
    "output",
    "junit",
    "html",
    "plots",
    "parquet",
    "keep",
    "destination",
    "output_path",
}
MAY_BE_URLS = {("compare", "output")}  # and what `whence run -o` writes


def commands(group, path=()):
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from commands(found, (*path, name))
        elif path[:1] not in (("ait",), ("msit",)):  # they take what those tools take
            yield (*path, name), found


def test_no_command_takes_a_url_for_a_folder(places, tmp_path):
    """Every path that a command writes to is of a type that refuses URLs."""
    listed = {
        (*path, param.name): param.type
        for path, found in commands(cli.group)
        for param in found.params
        if param.name in WRITTEN and isinstance(param.type, click.Path)
    }
    assert len(listed) > 25
    assert {path for path, kind in listed.items() if kind is not _options.HERE} == MAY_BE_URLS
    _, url = places
    told = command(tmp_path, "repro", f"{url}/cmp", "-o", f"{url}/repro")
    assert f"{url}/repro is a URL; --output takes paths of this machine alone" in told
    told = command(tmp_path, "scrub", f"{url}/ref")
    assert f"{url}/ref is a URL; RUN takes paths of this machine alone" in told
    assert not list(tmp_path.iterdir())


def test_next_commands_name_the_url(places):
    _, url = places
    steps = json.loads(remote.Place(f"{url}/cmp").read("summary.json"))["next"]
    assert any(f"whence repro {url}/cmp" in step["command"] for step in steps)

"""Spoilt inputs of everything that reads files of others, a sample of what `benchmarks/fuzz.py` tries; and those that were
once read wrongly."""

import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import pytest

import whence
from whence import store
from whence.errors import UnreadableRun
from whence.readers.ascend import graph_text
from whence.readers.paddle import log_scan
from whence.records import RunInfo
from whence.store import status
from whence.store.scrubbing import Anonymous

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "golden" / "0.1.0"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "data" / "corpus" / "regressions")]
fuzz = pytest.importorskip("fuzz")
regressions = pytest.importorskip("make")
everything = os.environ.get("WHENCE_TESTS") == "all"
INPUTS = 300 if everything else 20


@pytest.fixture(scope="module")
def fuzzer():
    made = fuzz.Fuzzer()
    yield made
    made.close()


NAMES = (
    "npy safetensors torch_tensors msprobe msit_torch polygraphy onnx_model onnx_tensors atb ge ascend_graph fx hf_debugger "
    "llama_cpp paddle_params paddle_log paddle_program sglang run,_recovered run,_scrubbed run comparison map policy thresholds "
    "msprobe_configuration library_of_labels csv_of_operator_tests checkpoint MCP_arguments torch_xray "
    "number_texts printed_tensors raw_bytes etdump engine_hooks vllm_neuron"
)


def test_every_reader_is_a_target(fuzzer):
    from whence.readers import known

    listed = {name.replace("_", " ") for name in NAMES.split()}
    assert {name.replace("_", " ") for name in fuzzer.targets} == listed | {"run, compared"}
    assert set(known()) <= set(fuzzer.targets)


@pytest.mark.parametrize("name", NAMES.split())
def test_a_spoilt_input_is_refused_in_our_own_words(fuzzer, name):
    known = {target.replace(" ", "_"): target for target in fuzzer.targets}[name]
    count = INPUTS // 10 if fuzzer.targets[known].share == 1 else INPUTS
    wrong = [(number, said) for number in range(count) if (said := fuzzer.read(known, number))]
    assert wrong == []


@pytest.mark.parametrize(("target", "name", "content"), regressions.INPUTS)
def test_what_was_read_wrongly_once(fuzzer, target, name, content):
    place = fuzzer.scratch / name
    fuzzer.scratch.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content if isinstance(content, bytes) else b"")
    if isinstance(content, int):
        os.truncate(place, content)
    assert fuzzer.judged(fuzzer.targets[target].read, place) == ""


def evil(path):
    os.system("true")  # noqa: S605 - that is what is looked for


def large(path):
    exec("1")  # noqa: S102 - as above
    (path.parents[2] / "written").write_text("outside")
    {}["no error of ours"]


def test_the_watch_notices_what_must_not_be(fuzzer, tmp_path):
    file = fuzzer.scratch / "x"
    fuzzer.scratch.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    assert "os.system" in fuzzer.judged(evil, file)
    said = fuzzer.judged(large, file)
    assert "exec" in said and "to write" in said and "KeyError" in said


@pytest.mark.parametrize(
    ("name", "number"), [("run, recovered", 410), ("run, scrubbed", 855), ("paddle_log", 677)]
)
def test_inputs_of_several_files_that_were_once_read_wrongly(fuzzer, name, number):
    assert fuzzer.read(name, number) == ""


def test_a_pipe_in_place_of_the_status_is_not_waited_for(fuzzer, tmp_path):
    os.mkfifo(tmp_path / "status.json")
    states = []
    assert fuzzer.judged(lambda folder: states.append(status.read_status(folder)), tmp_path) == ""
    assert states == [status.Ended("running")]


def test_a_status_of_no_known_word_is_a_run_that_did_not_end(fuzzer, tmp_path):
    """Its length is not bounded, and what is written in its place is 4 KB."""
    (tmp_path / "status.json").write_text('{"ended": "%s", "error": ""}' % ("x" * 5000))
    assert status.read_status(tmp_path) == status.Ended("running")


def test_a_run_json_that_could_not_be_written_again_is_not_read(tmp_path):
    shutil.copytree(GOLDEN / "modules", tmp_path / "run")
    about = tmp_path / "run" / "run.json"
    deep = "[" * 600 + "]" * 600
    about.write_text(about.read_text().replace("{", f'{{"more": {deep}, ', 1))
    with pytest.raises(UnreadableRun, match="nested"):
        store.scrub(tmp_path / "run", force=True)


def test_a_large_graph_of_zeros_takes_no_more_than_itself(tmp_path):
    graph = tmp_path / "ge_proto_00000001_Build.txt"
    graph.write_bytes(b'graph { name: "x" }')
    os.truncate(graph, 1 << 28)
    tracemalloc.start()
    with pytest.raises(UnreadableRun, match="binary"):
        graph_text.messages(graph)
    assert tracemalloc.get_traced_memory()[1] < 1.1 * (1 << 28)
    tracemalloc.stop()


def test_records_of_an_unknown_dtype_are_compared(fuzzer, tmp_path):
    shutil.copytree(GOLDEN / "modules", tmp_path / "run")
    (journal,) = (tmp_path / "run").glob("*/journal.jsonl")
    compared = fuzzer.targets["run, compared"].read
    parts = journal.read_bytes().split(b'"float32"')
    for place in range(1, len(parts)):  # each record in turn
        before, behind = (b'"float32"'.join(p) for p in (parts[:place], parts[place:]))
        journal.write_bytes(before + b'"floa2"' + behind)
        assert fuzzer.judged(compared, tmp_path / "run") == ""
    assert whence.compare(GOLDEN / "modules", tmp_path / "run").status != "same"


def test_a_damaged_line_of_a_journal_cannot_be_cleaned():
    clean = Anonymous(RunInfo(), ["host"])
    for line in (b'{"name": "\xff"}\n', b'{"name"\n'):
        with pytest.raises(UnreadableRun, match="not clean"):
            clean.line(line)


def test_a_long_line_of_a_paddle_log_is_not_searched_from_each_of_its_characters(fuzzer, tmp_path):
    counts = []

    def scanned(path):
        scan = log_scan.LogScan()
        scan._line(b"a" * (32 << 20) + b" nullptr-")
        scan._line(b"-" * 500 + b" fc_0.w_0: not initialized" + b" ." * 500)
        counts.append(scan.stated)

    assert fuzzer.judged(scanned, tmp_path) == ""
    assert [state for _, state in counts[0]] == ["not initialized"]

"""whence_label.h: what it writes, from many threads and forks, and that it does nothing without a
run.
"""

import os
import shutil
import subprocess

import numpy as np
import pytest

from whence import api
from whence.readers.ascend import atb_file

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

PROGRAM = r"""
#include <whence_label.h>
#include <array>
#include <cstdio>
#include <thread>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
int main(int count, char** words) {
    const float x[6] = {1, 2, 3, 4, 5, 6};
    if (count > 1 && !strcmp(words[1], "daemon")) {
        WHENCE_LABEL("before", x, {6}, "float32");
        for (int number = 3; number < 64; ++number) close(number);
        const int mine = open("mine", O_CREAT | O_RDWR, 0600);
        for (int number = mine + 1; number < 16; ++number) dup2(mine, number);
        WHENCE_LABEL("after", x, {6}, "float32");
        return 0;
    }
    const double d = 2.5;
    const std::int8_t i8[2] = {-1, 7};
    const std::vector<std::int64_t> shape{2, 3};
    const std::array<int, 2> other{{3, 2}};
    WHENCE_LABEL("qkv pos1", x, shape, "float32");
    WHENCE_LABEL("odd = %\n\xc3\xa9 $End=1\n", x, other, "torch.float32", "reference", "id 1");
    WHENCE_LABEL("0-d", &d, {}, "double");
    WHENCE_LABEL("bytes", i8, {2}, std::string("int8").c_str());
    WHENCE_LABEL("fp8", i8, {2}, "float8_e4m3fn");
    WHENCE_LABEL("empty", nullptr, {0, 3}, whence::DType{"float32", 0, 4});
    WHENCE_LABEL("null", nullptr, shape, "float32");
    WHENCE_LABEL("unknown", x, shape, "int4");
    WHENCE_LABEL("no dtype", x, shape, static_cast<const char*>(nullptr));
    WHENCE_LABEL("negative", x, {-1, 3}, "float32");
    WHENCE_TASK("turn 1");
    WHENCE_LABEL("qkv pos1", x, shape, "float32");
    WHENCE_TASK(nullptr);
    WHENCE_LABEL("qkv pos1", x, shape, "float32");
    if (count > 1) {
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t)
            threads.emplace_back([t] {
                for (int k = 0; k < 200; ++k) {
                    const float value[2] = {static_cast<float>(t), static_cast<float>(k)};
                    WHENCE_LABEL("thread", value, {2}, "float32");
                }
            });
        for (std::thread& one : threads) one.join();
        const pid_t child = fork();
        if (child == 0) { WHENCE_LABEL("qkv pos1", x, shape, "float32"); std::_Exit(0); }
        waitpid(child, nullptr, 0);
    }
    std::puts(words[0]);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("header")
    (folder / "p.cpp").write_text(PROGRAM)
    flags = [
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Wshadow",
        "-Wconversion",
        "-Werror",
        "-pthread",
        "-I",
        api.include(),
    ]
    subprocess.run(
        [
            "g++",
            "-std=c++11",
            "-g",
            "-fsanitize=undefined",
            *flags,
            str(folder / "p.cpp"),
            "-o",
            str(folder / "p"),
        ],
        check=True,
    )
    return folder / "p"


def run(program, folder, *words, **variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WHENCE")} | variables
    done = subprocess.run(
        [program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0
    return done


def test_without_a_run_nothing_is_written_or_said(program, tmp_path):
    assert (run(program, tmp_path, "threads").stderr, list(tmp_path.iterdir())) == ("", [])


def test_a_folder_that_is_gone_is_told_and_the_program_goes_on(program, tmp_path):
    done = run(program, tmp_path, WHENCE_LABELS=str(tmp_path / "gone"))
    assert done.stderr.count("cannot be written") == 1


def test_descriptors_that_the_program_took_are_left_alone(program, tmp_path):
    run(program, tmp_path, "daemon", WHENCE_LABELS=str(tmp_path))
    assert not (tmp_path / "mine").read_bytes()
    (file,) = tmp_path.glob("*.bin")
    names = [found.attributes["whence.name"] for found in atb_file.tensors(file)]
    assert names == ["before", "after"]


def test_what_is_written(program, tmp_path):
    run(program, tmp_path, WHENCE_LABELS=str(tmp_path), WHENCE_TASK="outer", RANK="3")
    (file,) = tmp_path.glob("*.bin")
    found = atb_file.tensors(file)
    said = [
        (
            r.attributes["whence.name"],
            r.attributes["whence.side"],
            r.attributes["whence.task"],
            r.attributes["whence.occurrence"],
        )
        for r in found
    ]
    assert said[0] == ("qkv pos1", "target", "outer", "0")
    assert said[1] == ("odd = %25%0Aé $End=1%0A", "reference", "outer", "0")
    assert said[-2:] == [
        ("qkv pos1", "target", "turn 1", "0"),
        ("qkv pos1", "target", "outer", "1"),
    ]
    assert {r.attributes["whence.rank"] for r in found} == {"3"}
    assert [(r.type.dtype, r.shape) for r in found[:6]] == [
        ("float32", (2, 3)),
        ("float32", (3, 2)),
        ("float64", ()),
        ("int8", (2,)),
        ("float8_e4m3fn", (2,)),
        ("float32", (0, 3)),
    ]
    x = np.arange(1, 7, dtype=np.float32)
    for record, want in zip(
        found, [x.reshape(2, 3), x.reshape(3, 2), np.array(2.5), np.array([-1, 7], np.int8)]
    ):
        assert np.array_equal(atb_file.elements(file, record), want)
    assert atb_file.elements(file, found[4]).view(np.uint8).tolist() == [255, 7]
    assert [r.why for r in found[6:10]] == [
        "the pointer is null",
        "elements of int4 are not known to whence",
        "elements of no dtype are not known to whence",
        "the shape has a negative extent",
    ]


def test_threads_and_forks(program, tmp_path):
    run(program, tmp_path, "threads", WHENCE_LABELS=str(tmp_path))
    files = sorted(tmp_path.glob("*.bin"), key=lambda f: f.stat().st_size)
    child, parent = map(atb_file.tensors, files)
    assert [(r.attributes["whence.name"], r.attributes["whence.occurrence"]) for r in child] == [
        ("qkv pos1", "0")
    ]
    values = [
        tuple(atb_file.elements(files[1], r))
        for r in parent
        if r.attributes["whence.name"] == "thread"
    ]
    assert sorted(values) == [(t, k) for t in range(4) for k in range(200)]
    assert [
        r.attributes["whence.occurrence"] for r in parent if r.attributes["whence.name"] == "thread"
    ] == [str(i) for i in range(800)]


def test_a_record_that_a_kill_tore_costs_only_itself(program, tmp_path):
    run(program, tmp_path, WHENCE_LABELS=str(tmp_path))
    (file,) = tmp_path.glob("*.bin")
    whole = file.read_bytes()
    ends = []
    for cut in range(0, len(whole), 37):
        file.write_bytes(whole[: cut + 1] if cut else whole[:800])
        try:
            found = atb_file.tensors(file)
        except Exception as error:
            assert "not a tensor file" in str(error)
            continue
        ends.append(len(found))
        assert all(r.why for r in found[-1:]) or atb_file.elements(file, found[-1]) is not None
    assert ends[1:] == sorted(ends[1:])


def test_switched_off_it_is_not_there(tmp_path):
    (tmp_path / "off.cpp").write_text(
        '#include <whence_label.h>\nint main() { WHENCE_LABEL("x", nothing, {1}, "f"); '
        'WHENCE_TASK("t"); }\n'
    )
    flags = ["-std=c++11", "-DWHENCE_LABEL_OFF", "-I", api.include()]
    subprocess.run(
        ["g++", *flags, str(tmp_path / "off.cpp"), "-o", str(tmp_path / "off")], check=True
    )

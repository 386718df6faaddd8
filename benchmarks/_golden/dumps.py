"""Samples of other tools' dumps below tests/data, compared and shown; one case a reader."""

from __future__ import annotations

from _golden.place import DATA, Answers, Case, Place

PAIRS: dict[str, tuple[str, ...]] = {
    "msprobe": ("msprobe/reference", "msprobe/eps", "--view", "msprobe"),
    "torch_xray": (
        "torch_xray/gpu_globalrank-0_localrank-0.h5",
        "torch_xray/xpu_globalrank-0_localrank-0.h5",
        "--view",
        "torch_xray",
    ),
    "polygraphy": ("polygraphy/ref.json", "polygraphy/bad.json", "--view", "polygraphy"),
    "llama_cpp": ("llama_cpp/reference.log", "llama_cpp/norm_eps.log"),
    "llama_cpp_clean": ("llama_cpp/reference.log", "llama_cpp/clean.log"),
    "hf_debugger": ("hf_debugger/ref_files", "hf_debugger/bad_files"),
    "hf_debugger_text": ("hf_debugger/ref_text", "hf_debugger/bad_text"),
    "sglang": ("sglang/dumper_ref", "sglang/dumper_bad"),
    "onnx_tensors": ("onnx/test_data_set_0", "onnx/test_data_set_1"),
    "ge_against_fx": ("ascend/fx_new", "ascend/ge", "--view", "msit"),
    "fx_against_fx": ("ascend/fx_new", "ascend/fx_old"),
    "paddle_log": ("paddle/pir_run_a.log", "paddle/pir_run_a.log"),
    "paddle_programs": ("paddle/tiny_legacy.pdmodel", "paddle/tiny_legacy_bug.pdmodel"),
}


def _dumps(reference: str, target: str, *words: str) -> Case:
    def case(place: Place) -> Answers:
        yield from place.compare(DATA / reference, DATA / target, *words)
        yield "reference.txt", place.whence("show", DATA / reference)
        yield "target.txt", place.whence("show", DATA / target)

    return case


CASES: dict[str, Case] = {name: _dumps(*words) for name, words in PAIRS.items()}

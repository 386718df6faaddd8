"""What of a command and its environment may be written into a run: an allow-list of variables, and secrets masked everywhere."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

MASK = "***"

# Variables that decide what a run computes. Everything else may hold what nobody wants in a file.
ALLOWED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_*", "CUDNN_*", "NVIDIA_TF32_OVERRIDE", "NVTE_*", "HIP_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "ASCEND_*", "HCCL_*", "XLA_*", "TRITON_*", "OMP_*", "MKL_*", "KMP_*", "OPENBLAS_*", "GOMP_*"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH*", "PYTORCH_*", "ATEN_*", "NCCL_*"),
    *("GLOO_*", "HF_*", "TRANSFORMERS_*", "ACCELERATE_*", "VLLM_*", "SGLANG_*", "FLAGS_*", "JAX_*", "TF_*"),
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONOPTIMIZE", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS"),
)

_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL")
# As words of an option: --max-tokens and --tokenizer are not secrets, --hf-token and --apiKey are.
_SECRET_PARTS = {w.lower() for w in _SECRET_WORDS} | {"credentials", "secrets", "passphrase", "apikey", "accesskey", "pwd", "pat"}
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s'\",;&|]+)")
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
# Tokens that are known by their own look: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google, JSON web tokens.
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def command(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command with secrets masked: `--token X`, `--api-key=X`, `HF_TOKEN=X`, user:password in addresses, known token forms.

    Also inside one argument (`bash -c "... --token X"`). What is no secret stays as it was.
    """
    masked: list[str] = []
    hide = False
    for argument in arguments:
        if hide and not argument.startswith("--"):
            masked.append(MASK)
            hide = False
            continue
        hide = argument.startswith("-") and "=" not in argument and " " not in argument and is_secret_option(argument)
        masked.append(text(argument))
    return tuple(masked)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the allow-list, sorted; the values of those that look like secrets masked."""
    kept = {}
    for name in sorted(variables):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ALLOWED):
            hidden = any(word in name.upper() for word in _SECRET_WORDS)
            kept[name] = MASK if hidden else text(variables[name])
    return kept


def text(value: str) -> str:
    """Free text with everything masked that looks like a secret."""
    value = _USERINFO.sub(rf"\1{MASK}@", value)
    value = _BEARER.sub(rf"\1 {MASK}", value)
    value = _OPTION.sub(lambda m: m[1] + m[2] + MASK if is_secret_option(m[1]) else m[0], value)
    value = _ASSIGNED.sub(lambda m: m[1] + m[2] + MASK if is_secret_option(m[1]) else m[0], value)
    return _KNOWN.sub(MASK, value)


def is_secret_option(name: str) -> bool:
    """Does an option, variable or keyword of this name hold a secret? Judged by its words: hf-token, apiKey, AWS_SECRET."""
    return any(part.lower() in _SECRET_PARTS for part in _PARTS.findall(name))

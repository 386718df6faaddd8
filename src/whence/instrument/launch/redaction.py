"""Redacts a command and its environment before they are written into a run: an allow-list of
variables, and secrets masked everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"

# Variables that decide what a run computes. Names, not beginnings of names: TF_VAR_db_pass is
# somebody's password.
ALLOWED = frozenset(
    """
    CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MODULE_LOADING NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE
    CUDNN_DETERMINISTIC CUDNN_BENCHMARK HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
    HSA_OVERRIDE_GFX_VERSION NVTE_ALLOW_NONDETERMINISTIC_ALGO NVTE_FLASH_ATTN NVTE_FUSED_ATTN
    NVTE_UNFUSED_ATTN NVTE_TORCH_COMPILE ASCEND_RT_VISIBLE_DEVICES ASCEND_VISIBLE_DEVICES
    ASCEND_LAUNCH_BLOCKING ASCEND_GLOBAL_LOG_LEVEL HCCL_DETERMINISTIC HCCL_ALGO HCCL_BUFFSIZE
    LCCL_DETERMINISTIC ATB_MATMUL_SHUFFLE_K_ENABLE ATB_LLM_LCOC_ENABLE CLOSE_MATMUL_K_SHIFT
    XLA_FLAGS XLA_USE_BF16 XLA_DOWNCAST_BF16 TRITON_INTERPRET TRITON_F32_DEFAULT
    TRITON_ALWAYS_COMPILE OMP_NUM_THREADS OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE
    MKL_NUM_THREADS MKL_DYNAMIC MKL_CBWR MKL_ENABLE_INSTRUCTIONS MKL_DEBUG_CPU_TYPE KMP_AFFINITY
    KMP_BLOCKTIME KMP_DETERMINISTIC_REDUCTION OPENBLAS_NUM_THREADS OPENBLAS_CORETYPE
    GOMP_CPU_AFFINITY ONEDNN_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA
    ATEN_CPU_CAPABILITY NUMEXPR_NUM_THREADS RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK
    ROLE_RANK MASTER_PORT SLURM_PROCID SLURM_NTASKS SLURM_JOB_ID TORCHDYNAMO_DISABLE
    TORCH_COMPILE_DISABLE TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_FREEZING
    TORCHINDUCTOR_CPP_WRAPPER TORCHINDUCTOR_EMULATE_PRECISION_CASTS TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_BLAS_PREFER_HIPBLASLT TORCH_CUDNN_V8_API_DISABLED
    PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_NVFUSER_DISABLE PYTORCH_JIT
    PYTORCH_TUNABLEOP_ENABLED PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_NPU_ALLOC_CONF NCCL_ALGO
    NCCL_PROTO NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_IB_DISABLE NCCL_DEBUG GLOO_SOCKET_IFNAME
    HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY
    ACCELERATE_MIXED_PRECISION ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED VLLM_USE_V1
    VLLM_ATTENTION_BACKEND VLLM_USE_TRITON_FLASH_ATTN VLLM_ENABLE_V1_MULTIPROCESSING
    VLLM_BATCH_INVARIANT VLLM_WORKER_MULTIPROC_METHOD SGLANG_ENABLE_DETERMINISTIC_INFERENCE
    SGLANG_ATTENTION_BACKEND FLAGS_cudnn_deterministic FLAGS_embedding_deterministic
    FLAGS_use_mkldnn FLAGS_use_onednn FLAGS_enable_pir_api FLAGS_use_cinn FLAGS_prim_all
    FLAGS_check_nan_inf FLAGS_gemm_use_half_precision_compute_type FLAGS_npu_jit_compile
    FLAGS_selected_gpus FLAGS_max_inplace_grad_add FLAGS_conv_workspace_size_limit
    FLAGS_cudnn_exhaustive_search JAX_PLATFORMS JAX_ENABLE_X64 JAX_DEFAULT_MATMUL_PRECISION
    JAX_NUMPY_DTYPE_PROMOTION JAX_DISABLE_JIT TF_ENABLE_ONEDNN_OPTS TF_DETERMINISTIC_OPS
    TF_CUDNN_DETERMINISTIC TF_XLA_FLAGS TF_FORCE_GPU_ALLOW_GROWTH TF_CPP_MIN_LOG_LEVEL
    PYTHONHASHSEED PYTHONOPTIMIZE PYTHONPATH CONDA_DEFAULT_ENV
    """.split()  # noqa: SIM905 - a table is read more easily than a list of quotes
)

# One list for variables and options, by their words: HF_TOKEN, --hf-token, apiKey and db_pass hold
# secrets; --tokens, --max_new_tokens,
# --tokenizer, PATH and keep do not.
_SECRET_PARTS = frozenset(
    """
    auth authorization pass passwd password passphrase passcode passwords pw pwd pat login key keys
    apikey accesskey secretkey private privatekey token bearer jwt otp secret secrets cookie cookies
    session sessionid sid credential credentials cred creds
    """.split()  # noqa: SIM905
)
# Words beside which "key" and "token" are the field's own: eos-token-id, pad_token,
# num_key_value_heads, key_cache, prompt-key.
_HARMLESS = frozenset((
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "num", "query", "value", "heads", "layer",
    "cache", "size", "count", "prompt", "output", "forward", "backward", "len", "length",
))  # fmt: skip
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)(['\"]?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s'\",;&|]+)")
_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/@]+@")
_BEARER = re.compile(r"(?i)\b(?:(bearer)\s+[^\s'\",;*]+|(basic)\s+[A-Za-z0-9._~+/=-]{8,})")
# A header of HTTP, up to the end of its line or of the quotes around it.
_HEADER = re.compile(r"(?i)([\w-]*\b(?:authorization|cookie2?))(\s*:\s*)([^'\"\n]+)")
_SCHEME = re.compile(r"(?i)(bearer|basic|digest|negotiate|token)(?=\s|$)")
_NAMES_A_USER = ("-u", "-U", "--user", "--proxy-user")
_USER = re.compile(rf"(?<!\S)({'|'.join(_NAMES_A_USER)})(\s+|=)([^\s:'\"/]+):([^\s'\"]+)")
# -p and -P, of which some programs take a password, and others a port, a folder, a share.
_SHORT = re.compile(r"(?<!\S)(-[pP])(\s+|=|)(\"[^\"]*\"|'[^']*'|[^\s'\"=-][^\s'\"]*)")
_NO_PASSWORD = re.compile(r"[\d.:,%/-]+|[~$./].*|no:.*")
_LONG_NAME = re.compile(r"[a-z][a-z_-]*(=.*)?")
_OTHER_SHORT = re.compile(r"(^|[\s/])(mkdir|cp|rsync|tar|docker|podman|pytest|py\.test)(?=\s)")
# Tokens that are known by their own look: Hugging Face, OpenAI, GitHub, GitLab, AWS, Slack, Google,
# JSON web tokens.
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def command(arguments: Sequence[str]) -> tuple[str, ...]:
    """The command with secrets masked: `--token X`, `--api-key=X`, `HF_TOKEN=X`, user:password in
    addresses, known token forms.

    Also inside one argument (`bash -c "... --token X"`). What is not a secret stays as it was.
    """
    masked: list[str] = []
    hide = False
    for place, argument in enumerate(arguments):
        if hide and not argument.startswith("--"):
            hide = bool(_SCHEME.fullmatch(argument))  # "Authorization:" Bearer X, without quotes
            masked.append(argument if hide else MASK)
            continue
        before = " ".join(arguments[:place]) + " "
        hide = " " not in argument and (
            argument.lower() == "bearer"
            or (argument.startswith("-") and "=" not in argument and is_secret_option(argument))
            or (argument.endswith(":") and is_secret_option(argument))
            or (
                argument in ("-p", "-P")
                and _is_password(before, " ", "".join(arguments[place + 1 : place + 2]))
            )
        )
        if place and arguments[place - 1] in _NAMES_A_USER:
            argument = re.sub(r"^([^\s:]+):(?!//).+", rf"\1:{MASK}", argument)
        masked.append(argument if hide else _text(argument, before))
    return tuple(masked)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the allow-list, sorted; secrets in their values masked."""
    return {
        name: MASK if is_secret_option(name) else text(variables[name])
        for name in sorted(variables)
        if name in ALLOWED
    }


def text(value: str) -> str:
    """Free text with everything masked that looks like a secret."""
    return _text(value, "")


def _text(value: str, before: str) -> str:
    """before: the words of the command in front of it, with a blank behind each."""
    value = _USERINFO.sub(rf"\1{MASK}@", value)
    value = _HEADER.sub(lambda m: m[1] + m[2] + _of_header(m[3]), value)
    value = _BEARER.sub(lambda m: f"{m[1] or m[2]} {MASK}", value)
    value = _USER.sub(rf"\1\2\3:{MASK}", value)
    value = _SHORT.sub(
        lambda m: (
            m[1] + m[2] + MASK if _is_password(before + m.string[: m.start()], m[2], m[3]) else m[0]
        ),
        value,
    )
    value = _OPTION.sub(lambda m: m[1] + m[2] + MASK if is_secret_option(m[1]) else m[0], value)
    value = _ASSIGNED.sub(
        lambda m: (
            m[1] + m[2] + MASK if is_secret_option(m[1]) and not _SCHEME.fullmatch(m[3]) else m[0]
        ),
        value,
    )
    return _KNOWN.sub(MASK, value)


def _of_header(value: str) -> str:
    """The redacted value of a header: its authentication scheme is kept, the credentials are
    masked.
    """
    scheme = _SCHEME.match(value)
    return f"{scheme[0]} {MASK}" if scheme else MASK


def _is_password(before: str, between: str, value: str) -> bool:
    """Whether `value` after -p is a password. before: the words in front of it. between: the
    separator; "" for one word, which may also be an option that begins with p.
    """
    if not value or value.startswith("-") or _NO_PASSWORD.fullmatch(value):
        return False
    if not between and _LONG_NAME.fullmatch(value) and not is_secret_option(value):
        return False
    return not _OTHER_SHORT.search(before)


def is_secret_option(name: str) -> bool:
    """Whether an option, variable or keyword of this name holds a secret, judged by its words:
    hf-token, apiKey, AWS_SECRET, db_pass.

    It does not where another of its words shows that a number or a layer is meant (eos-token-id,
    num_key_value_heads, key_cache).
    """
    parts = [part.lower() for part in _PARTS.findall(name)]
    return any(part in _SECRET_PARTS for part in parts) and not any(
        part in _HARMLESS for part in parts
    )

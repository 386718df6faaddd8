"""`msit llm compare` (MindStudio inference tools): msit_cmp_report_*.csv."""

from __future__ import annotations

from whence.report.cells import (
    Columns,
    either,
    figure,
    path,
    reference,
    shape,
    target,
    torch_dtype,
)

COLUMNS: Columns = {
    "token_id": either(lambda s: s.step),
    "data_id": lambda index, _: index,
    "golden_data_path": reference(path),
    "golden_op_type": reference(lambda s: s.op_type),
    "golden_dtype": reference(torch_dtype),
    "golden_shape": reference(shape),
    "golden_max_value": reference(lambda s: s.max),
    "golden_min_value": reference(lambda s: s.min),
    "golden_mean_value": reference(lambda s: s.mean),
    "my_data_path": target(path),
    "my_op_type": target(lambda s: s.op_type),
    "my_dtype": target(torch_dtype),
    "my_shape": target(shape),
    "my_max_value": target(lambda s: s.max),
    "my_min_value": target(lambda s: s.min),
    "my_mean_value": target(lambda s: s.mean),
    "cosine_similarity": figure("cosine_similarity"),
    "max_relative_error": figure("max_relative_error"),
    "mean_relative_error": figure("mean_relative_error"),
    "max_absolute_error": figure("max_absolute_error"),
    "mean_absolute_error": figure("mean_absolute_error"),
    "kl_divergence": figure("kl_divergence"),
    "relative_euclidean_distance": figure("relative_euclidean_distance"),
    "cmp_fail_reason": lambda _, row: row.why,
}

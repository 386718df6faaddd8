"""`ait debug compare aclcmp`, the forerunner of msit: one line for every pair that was labelled."""

from __future__ import annotations

from whence.report.cells import Columns, figure, path, reference, shape, target, torch_dtype

COLUMNS: Columns = {
    "data_id": lambda index, _: index,
    "pta_data_path": reference(path),
    "pta_dtype": reference(torch_dtype),
    "pta_shape": reference(shape),
    "acl_data_path": target(path),
    "acl_dtype": target(torch_dtype),
    "acl_shape": target(shape),
    "cmp_flag": lambda _, row: str(bool(row.figures)),
    "cosine_similarity": figure("cosine_similarity"),
    "max_relative_error": figure("max_relative_error"),
    "mean_relative_error": figure("mean_relative_error"),
    "relative_euclidean_distance": figure("relative_euclidean_distance"),
    "cmp_fail_reason": lambda _, row: row.why,
}

"""Ask the tables of a comparison in SQL.

\b
    whence query cmp "select name, verdict, max(rel_l2) from pairs group by all order by 3 desc"
    whence query cmp "select * from findings" --json
    whence query cmp --tables

SQL is DuckDB's (pip install duckdb pyarrow). The statement sees the tables of this comparison and
nothing else: it reads and writes no file and loads no extension. CMP is a folder written by `whence
compare -o CMP`.
"""

from __future__ import annotations

from typing import Any

import click

from whence.cli._answers import say
from whence.cli._options import argument, option, verb


@verb(
    argument("comparison", "CMP"),
    argument("sql", "[SQL]", str),
    option("--tables", "List the tables and their columns."),
    option("--csv", "Print CSV.", name="form", flag_value="csv"),
    option("--json", "Print a JSON list of objects.", name="form", flag_value="json"),
)
def command(comparison: str, sql: str | None, tables: bool, form: str | None) -> None:
    """Words -> `api.query` -> report."""
    from whence import api
    from whence.errors import UsageError
    from whence.report import answers

    if tables == (sql is not None):
        raise UsageError("give a statement of SQL, or --tables")
    if sql is None:
        for name, (about, columns) in api.comparison_tables(comparison).items():
            click.echo(f"{name}: {about}")
            click.echo(f"    {', '.join(f'{column} {kind}' for column, kind in columns)}")
        return
    with api.query(comparison, sql) as answer:
        printed: Any = {"csv": answers.as_csv, "json": answers.as_json}.get(form or "")
        if printed is None:
            say(answers.aligned(answer.columns, answer.batches))
        else:
            for part in printed(answer.columns, answer.batches):
                click.echo(part, nl=False)

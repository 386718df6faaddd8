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


@click.command("query", help=__doc__)
@click.argument("comparison", metavar="CMP", type=click.Path())
@click.argument("sql", metavar="[SQL]", required=False)
@click.option("--tables", is_flag=True, help="List the tables and their columns.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option("--json", "form", flag_value="json", help="Print a JSON list of objects.")
def command(comparison: str, sql: str | None, tables: bool, form: str | None) -> int:
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
        return 0
    with api.query(comparison, sql) as answer:
        printed: Any = {"csv": answers.as_csv, "json": answers.as_json}.get(form or "")
        if printed is not None:
            for part in printed(answer.columns, answer.batches):
                click.echo(part, nl=False)
            return 0
        for line in answers.aligned(answer.columns, answer.batches):
            click.echo(line)
    return 0

"""The tables of a comparison: Arrow, Parquet, SQL. A statement sees them and nothing else."""

import json
import math

import msgspec
import numpy as np
import pytest

import inside
import whence
from handmade import net
from whence import api
from whence.errors import OutputExists, UsageError
from whence.report.files import everything_json
from whence.results import LayerCost, Measured
from whence.results.sequence import MadeOnDemand
from whence.workflows.page.measure import limited
from whence.workflows.query import without_plan

pyarrow = pytest.importorskip("pyarrow")
duckdb = pytest.importorskip("duckdb")
parquet = pytest.importorskip("pyarrow.parquet")


def _shift(name, value):
    return value + 0.5 if name == "h" else value


@pytest.fixture(scope="module")
def compared():
    return whence.compare(net(), net(change=_shift))


@pytest.fixture
def saved(compared, tmp_path):
    folder = tmp_path / "cmp"
    folder.mkdir()
    (folder / "report.json").write_bytes(b"".join(everything_json(compared)))
    return folder


def answer(comparison, sql):
    with api.query(comparison, sql) as found:
        return found.columns, [row for batch in found.batches for row in batch]


def test_the_saved_rows_are_those_of_the_comparison(compared, saved):
    read, whole = without_plan(saved), whence.load_comparison(saved)
    assert tuple(read.rows) == tuple(whole.rows)
    assert tuple(read.verdicts) == tuple(whole.verdicts)
    assert len(read.rows) == len(compared.rows) > 4
    assert read.rows[3] == whole.rows[3]
    assert read.rows[-2:] == whole.rows[-2:]
    assert msgspec.structs.replace(read, rows=(), verdicts=()) == msgspec.structs.replace(
        whole, rows=(), verdicts=(), plan=read.plan
    )


def test_texts_that_look_like_the_file_do_not_lead_astray(compared, tmp_path):
    """Names and sentences come from runs."""
    nasty = '},{"pair":7,"name":"x"}],"verdicts":[{"pair":1}],"headline":"a\\'
    rows = [msgspec.structs.replace(row, name=nasty) for row in compared.rows]
    verdicts = [v.replace(sentence=nasty) for v in compared.verdicts]
    changed = msgspec.structs.replace(
        compared, rows=rows, verdicts=verdicts, headline=nasty, notes=(nasty, ',"rows":[')
    )
    file = tmp_path / "report.json"
    file.write_bytes(b"".join(everything_json(changed)))
    read = without_plan(file)
    assert [row.name for row in read.rows] == [nasty] * len(rows)
    assert [v.sentence for v in read.verdicts] == [nasty] * len(verdicts)
    assert read.headline == nasty
    empty = msgspec.structs.replace(compared, rows=(), verdicts=())
    file.write_bytes(b"".join(everything_json(empty)))
    assert tuple(without_plan(file).rows) == tuple(without_plan(file).verdicts) == ()


def test_pairs_hold_every_figure(compared, tmp_path):
    count = compared.to_parquet(str(tmp_path / "pairs.parquet"))
    table = parquet.read_table(tmp_path / "pairs.parquet")
    assert count == table.num_rows == len(compared.rows)
    assert table.equals(compared.to_arrow())
    for row, read in zip(compared.rows, table.to_pylist(), strict=True):
        assert read["name"] == row.name
        assert read["identical"] == row.measured.identical
        assert tuple(read["reference_shape"]) == row.reference_shape
        for name, value in row.measured.values.items():
            same = read[name] == value or (value is not None and math.isnan(value))
            assert same, name
    frame = compared.to_pandas()
    assert {*frame.columns} - {*table.column_names} == set()


def test_a_figure_that_late_rows_have_is_a_column(compared):
    last = msgspec.structs.replace(
        compared.rows[-1], measured=Measured("full", False, {"new": 2.0})
    )
    rows = MadeOnDemand(3, lambda a, b: iter([*compared.rows[:2], last][a:b]))
    table = msgspec.structs.replace(compared, rows=rows).to_arrow()
    assert table.column("new").to_pylist() == [None, None, 2.0]


TABLES = ("calls", "findings", "unpaired", "notes", "tokens", "layers", "summary")


@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_there(compared, table):
    made = compared.to_arrow(table)
    columns, rows = answer(compared, f'select * from "{table}"')
    assert list(columns) == made.column_names
    assert len(rows) == made.num_rows
    assert table in ("unpaired", "notes", "tokens", "layers") or rows


def test_layers_are_a_table(compared):
    costs = (LayerCost("fc", "Linear", 2, 31.5, measured=0.25, left_in_float=True),)
    table = msgspec.structs.replace(compared, layer_costs=costs).to_arrow("layers")
    (row,) = table.to_pylist()
    assert (row["name"], row["calls"], row["sqnr_db"], row["explains"]) == ("fc", 2, 31.5, None)
    assert (row["measured"], row["left_in_float"]) == (0.25, True)


def test_calls_have_the_names_of_their_pairs(compared):
    _, rows = answer(
        compared,
        "select c.name, c.verdict, count(*) from calls c join pairs p using (pair) "
        "where c.verdict = 'introduced' group by all",
    )
    assert rows == [("fc1", "introduced", 3)]
    _, rows = answer(compared, "select numbers['rho'] from calls where score is not null limit 1")
    assert len(rows) == 1


def test_another_table_is_told(compared):
    with pytest.raises(UsageError, match="pairs, calls, findings"):
        compared.to_arrow("nothing")
    with pytest.raises(UsageError, match="--tables"):
        answer(compared, "select * from nothing")


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{secret}')",
        "select * from read_text('{secret}')",
        "select * from '{secret}'",
        "select * from glob('{folder}/*')",
        "copy (select 1) to '{folder}/written.csv'",
        "copy pairs to '{folder}/written.parquet'",
        "attach '{folder}/written.db' as other",
        "export database '{folder}/written'",
        "install httpfs",
        "load httpfs",
        "load '{folder}/x.duckdb_extension'",
        "set enable_external_access = true",
        "set lock_configuration = false; set enable_external_access = true",
        "reset enable_external_access",
        "pragma enable_external_access",
        "select * from compared",
        "select * from source",
        "create table t as select * from read_json('{secret}')",
        "import database '{folder}'",
        "create secret (type s3)",
        "select getenv('HOME')",
    ],
)
def test_a_statement_sees_the_tables_alone(compared, sql, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError):
        answer(compared, "select 1 from pairs; " + sql.format(secret=secret, folder=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_prints_tables_csv_and_json(saved, tmp_path):
    sql = "select name, rel_l2, identical from pairs where step = 0 order by rel_l2 desc nulls last"
    done = inside.whence(tmp_path, "query", saved, sql)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0].split() == ["name", "rel_l2", "identical"]
    assert lines[-1] == f"({len(lines) - 2} rows)"
    plain = json.loads(inside.whence(tmp_path, "query", saved, sql, "--json").stdout)
    assert len(plain) == len(lines) - 2
    assert plain[0]["name"] == "fc1"
    text = inside.whence(tmp_path, "query", saved, sql, "--csv").stdout
    assert text.splitlines()[0] == "name,rel_l2,identical"
    assert len(text.splitlines()) == len(plain) + 1
    tables = inside.whence(tmp_path, "query", saved, "--tables").stdout
    assert "rel_l2 float64" in tables
    for name in ("pairs", "calls", "findings", "summary"):
        assert f"\n{name}: " in f"\n{tables}"
    assert inside.whence(tmp_path, "query", saved).returncode == 3
    assert inside.whence(tmp_path, "query", saved, "selec").returncode == 3
    assert inside.whence(tmp_path, "query", tmp_path / "none", "select 1").returncode == 3
    nothing = inside.whence(tmp_path, "query", saved, "select * from tokens").stdout
    assert nothing.splitlines()[-1] == "(0 rows)"


def test_text_that_would_change_a_terminal_or_a_sheet_is_made_harmless(compared, tmp_path):
    rows = [msgspec.structs.replace(row, name="=cmd()\x1b[31m") for row in compared.rows]
    (tmp_path / "report.json").write_bytes(
        b"".join(everything_json(msgspec.structs.replace(compared, rows=rows)))
    )
    sql = "select name from pairs limit 1"
    file = tmp_path / "report.json"
    assert "\x1b" not in inside.whence(tmp_path, "query", file, sql).stdout
    printed = inside.whence(tmp_path, "query", file, sql, "--csv").stdout
    assert not printed.splitlines()[1].lstrip('"').startswith("=")


def test_report_writes_parquet_and_replaces_by_force_only(saved, tmp_path):
    out = tmp_path / "calls.parquet"
    done = inside.whence(tmp_path, "report", saved, "--parquet", out, "--table", "calls")
    assert done.returncode == 0, done.stderr
    assert "rows" in done.stdout
    assert parquet.read_table(out).num_rows == len(whence.load_comparison(saved).verdicts)
    assert inside.whence(tmp_path, "report", saved, "--parquet", out).returncode == 3
    assert inside.whence(tmp_path, "report", saved, "--parquet", out, "--force").returncode == 0
    assert not (saved / "report.html").exists()
    assert OutputExists is not None


def test_a_large_page_is_cut_and_says_so(compared):
    page = api.page(compared)
    assert limited(page) is page
    small = limited(page, most=2)
    assert 2 <= len(small.calls) < len(page.calls) + 1
    left_out = len(page.calls) - len(small.calls)
    assert left_out
    assert f"{left_out} of {len(page.calls)} calls are not on this page" in small.missing[-1]
    assert "whence query CMP" in small.missing[-1]
    names = [call.name for call in small.calls]
    assert compared.findings[0].name in names
    for place, call in enumerate(small.calls):
        assert call.parent < len(small.calls)
        assert all(0 <= read < len(small.calls) for read in call.reads)
        before = next(c for c in page.calls if c.pair == call.pair)
        if before.parent >= 0:
            assert small.calls[call.parent].pair == page.calls[before.parent].pair
            assert call.parent != place


def test_numbers_that_json_lacks_are_null(compared, tmp_path):
    (tmp_path / "report.json").write_bytes(b"".join(everything_json(compared)))
    sql = "select 'nan'::double as a, 'inf'::double as b, date '2020-01-01' as c, 1.5::decimal(4,2) as d"
    done = inside.whence(tmp_path, "query", tmp_path, sql, "--json")
    (row,) = json.loads(done.stdout)
    assert row["a"] is None
    assert row["b"] is None
    assert row["c"] == "2020-01-01"
    assert np.isclose(float(row["d"]), 1.5)


def test_a_statement_without_end_is_ended(compared):
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select sum(i) from n"
    with (
        pytest.raises(UsageError, match="was ended after 0"),
        api.query(compared, endless, seconds=0.2) as found,
    ):
        list(found.batches)

"""The notebook among the examples: every cell runs, and runs again, and shows what it should."""

import shutil
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


# A kernel of its own, which imports torch.
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_cell_runs_twice_and_shows_answer_table_and_plot(tmp_path):
    for package in ("torch", "pandas", "matplotlib", "ipykernel"):
        pytest.importorskip(package, reason=f"needs {package}: pip install -e '.[test]'")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells for _ in range(2 - (cell.cell_type != "code"))
    ]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    shown = [
        {
            kind: str(data)
            for output in cell.outputs
            for kind, data in output.get("data", {}).items()
        }
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    answer, module, table, plot = shown[4::2]
    assert shown[4::2] and [set(s) for s in shown[5::2]] == [set(s) for s in shown[4::2]]
    assert "GELU" in answer["text/html"] and "DIFFERENT" in answer["text/html"]
    assert "GELU" in module["text/html"]
    assert "<table" in table["text/html"] and "introduced" in table["text/html"]
    assert len(plot["image/png"]) > 10_000

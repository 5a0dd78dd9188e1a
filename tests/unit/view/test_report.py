"""`longtail report` without a browser; tests/unit/view/test_page.py opens what it writes."""

import json
import re

import pytest

from longtail.cli import main as cli
from longtail.errors import CheckpointError
from longtail.view.report import write_report
from support.synthetic_run import append_steps, rollout_rows


def test_a_report_is_one_file_with_the_data_of_the_run(tmp_path, capsys):
    append_steps(tmp_path, 1, 2)
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        row = rollout_rows(2)[0] | {"text": "</script><script>alert(1)</script>\ud83d"}
        file.write(json.dumps(row) + "\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr() == (f"{tmp_path / 'report.html'}\n", "")
    text = (tmp_path / "report.html").read_text()
    assert len(re.findall(r"</script>", text)) == 3  # uPlot, the data, the page
    assert "/static/" not in text
    assert "export " not in text
    data = re.search(r'id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert data is not None
    found = json.loads(data[1])
    assert found["/api/runs/0/steps/2/completions/4"]["text"] == row["text"]
    assert found["/api/runs/0/overview"]["columns"]["step"] == [1, 2]


def test_a_report_needs_a_run_and_a_place(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no run has written there" in capsys.readouterr().err
    append_steps(tmp_path, 1, 1)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(CheckpointError, match=r"report\.html \(Is a directory\)"):
        write_report(tmp_path)

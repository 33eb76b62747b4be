"""The code of the README, on the shipped model."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from conftest import MODEL  # noqa: E402


def test_the_code_of_the_readme_runs(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    name = re.search(r'NAME = "(.*)"', code)[1]
    scope = {}
    exec(code.replace(name, str(MODEL)), scope)
    assert scope["tokens"].shape[1] == scope["inputs"].input_ids.shape[1] + 20
    assert "The state of the Union is" in capsys.readouterr().out

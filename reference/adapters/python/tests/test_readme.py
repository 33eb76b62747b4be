"""The code of the README on the shipped model, and of the page of all doors."""

import pathlib
import re
import textwrap

import numpy as np
import pytest
from conftest import MODEL, block

import kvcodes


def test_the_code_of_the_readme_runs(capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    name = re.search(r'NAME = "(.*)"', code)[1]
    scope = {}
    exec(code.replace(name, str(MODEL)), scope)
    assert scope["tokens"].shape[1] == scope["inputs"].input_ids.shape[1] + 20
    assert "The state of the Union is" in capsys.readouterr().out


def test_the_code_of_the_doors_runs(tmp_path, rng):
    exec(block("python").replace("/var/cache/kv", str(tmp_path)), {})
    path = tmp_path / "model.profile"
    code = textwrap.dedent(block("python profile")).replace('"model.profile"', repr(str(path)))
    rows = rng.standard_normal((2, 2, 64, 2, 8)).astype(np.float32)
    exec(code, {"rows": rows, "kvcodes": kvcodes, "pathlib": pathlib})
    assert kvcodes.Profile.from_bytes(path.read_bytes()).layers == 2

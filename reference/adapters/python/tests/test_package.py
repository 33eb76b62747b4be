"""What the installed package promises: a light import, types, errors."""

import subprocess
import sys
import typing
from pathlib import Path

import kvcodes


def test_import_needs_nothing_and_is_fast():
    program = (
        "import sys, time; start = time.perf_counter(); import kvcodes; took = time.perf_counter() - start;"
        "assert not {'numpy', 'torch', 'transformers'} & set(sys.modules); print(took)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(5)]
    assert min(times) < 0.1, times


def test_stubs_name_what_there_is():
    stubs = Path(kvcodes.__file__).with_name("_kvcodes.pyi").read_text()
    assert Path(kvcodes.__file__).with_name("py.typed").exists()
    for name in kvcodes.__all__:
        item = getattr(kvcodes, name)
        if isinstance(item, type) and issubclass(item, Exception):
            assert issubclass(item, kvcodes.Error)
            continue
        assert f"class {name}" in stubs or f"def {name}" in stubs, name
        for member in vars(item) if isinstance(item, type) else ():
            if not member.startswith("_"):
                assert f"def {member}(" in stubs, (name, member)


def test_errors_are_also_those_of_python():
    bases = {"ArgumentError": ValueError, "ElementError": TypeError, "FormatError": ValueError}
    bases |= {"StoreError": OSError, "UnsupportedError": NotImplementedError}
    for name, base in bases.items():
        assert issubclass(getattr(kvcodes, name), base)
    assert typing.cast(kvcodes.Error, kvcodes.ArgumentError("x", 3)).code == 3

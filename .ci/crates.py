"""Draws which crate imports which into ARCHITECTURE.md; with --check fails when the picture is not that of today."""

import json
import os
import subprocess
import sys

PATH = os.path.join(os.path.dirname(__file__), "..", ".github", "ARCHITECTURE.md")
BEGIN, END = "```mermaid\n", "```\n"

metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]))
imports = {
    package["name"]: {d["name"] for d in package["dependencies"] if d.get("path") and d["kind"] is None}
    for package in metadata["packages"]
}


def reach(name):
    """All crates below one. Cargo refuses circles."""
    return imports[name].union(*map(reach, imports[name]))


# An arrow that others imply is left out.
arrows = [
    f"    {name} --> {below}\n"
    for name in sorted(imports)
    for below in sorted(imports[name])
    if not any(below in reach(other) for other in imports[name] - {below})
]
text = open(PATH, encoding="utf-8").read()
begin = text.index(BEGIN) + len(BEGIN)
drawn = text[:begin] + "graph BT\n" + "".join(arrows) + text[text.index(END, begin) :]
if "--check" in sys.argv:
    sys.exit("the picture of crates is old: python3 .ci/crates.py" if drawn != text else 0)
open(PATH, "w", encoding="utf-8").write(drawn)

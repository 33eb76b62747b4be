"""Fails when a locked dependency declares a newer rust-version than the workspace does."""

import json
import subprocess
import sys

metadata = json.loads(subprocess.check_output(["cargo", "metadata", "--locked", "--format-version", "1"]))
version = lambda text: tuple(int(part) for part in (text + ".0.0").split(".")[:3])  # noqa: E731
members = set(metadata["workspace_members"])
ours = min(version(p["rust_version"]) for p in metadata["packages"] if p["id"] in members)
newer = [p for p in metadata["packages"] if p.get("rust_version") and version(p["rust_version"]) > ours]
for package in newer:
    print(f"{package['name']} {package['version']} needs Rust {package['rust_version']}")
print(f"{len(metadata['packages'])} packages, ours supports Rust {'.'.join(map(str, ours))}")
sys.exit(bool(newer))

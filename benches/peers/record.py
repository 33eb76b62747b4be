"""What the scripts share: the commit that is measured, and where its results go."""

import subprocess


def commit():
    """The commit that is checked out, with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(path, lines):
    """Writes results to `path`."""
    with open(path, "w") as file:
        file.write("\n".join(lines).rstrip() + "\n")

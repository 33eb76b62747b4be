"""What the scripts share: the commit that is measured, and where its results go."""

import datetime, os, subprocess


def commit():
    """The commit that is checked out, with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(path, lines, commit):
    """Writes the newest results to `path`, and the same to `record/DATE-COMMIT` in its folder, where every run stays."""
    folder, name = os.path.split(path)
    for place in (folder, os.path.join(folder, "record", f"{datetime.date.today()}-{commit}")):
        os.makedirs(place or ".", exist_ok=True)
        with open(os.path.join(place, name), "w") as file:
            file.write("\n".join(lines).rstrip() + "\n")

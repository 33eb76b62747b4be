#!/usr/bin/env python3
"""Writes the page results/NAME.md of each file results/NAME.json; `pages.py` prints it.

    python benches/peers/tables.py            # all pages
    python benches/peers/tables.py --check    # fails where a page is not that of its file
    PROGRAM | python benches/peers/tables.py NAME    # what a program has printed

A script that measures calls `write` with its results. Results that a script prints itself are a list of blocks:
headings, texts, quoted output, and tables with their columns and rows (`blocks`). What the figures mean is in
results/README.md.
"""

import datetime, glob, json, os, platform, subprocess, sys

import pages

RESULTS = os.path.join(os.path.dirname(__file__), "..", "results")


def commit():
    """The commit that is checked out, with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def cpu():
    """The name of the CPU."""
    with open("/proc/cpuinfo") as info:
        names = (line.split(":")[1].strip() for line in info if line.startswith("model name"))
        return next(names, platform.machine())


def today():
    return datetime.date.today().isoformat()


def write(path, data):
    """Writes a file of results, and its page beside it."""
    stem = os.path.splitext(path)[0]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{stem}.json", "w") as file:
        file.write(dump(data) + "\n")
    with open(f"{stem}.md", "w") as file:
        file.write(page(os.path.basename(stem), data))


def dump(data, indent=""):
    """JSON with a line for every list or object that contains no other, such as a row."""
    inner = indent + " "
    items = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else []
    if not any(isinstance(item, (dict, list)) for item in items):
        return json.dumps(data, ensure_ascii=False)
    if isinstance(data, dict):
        lines = [f"{inner}{json.dumps(str(key))}: {dump(value, inner)}" for key, value in data.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + dump(item, inner) for item in data) + f"\n{indent}]"


def write_printed(path, lines):
    """Writes what a script has printed."""
    write(path, {"blocks": blocks(lines)})


def page(name, data):
    lines = pages.PAGES.get(name, pages.printed)(data)
    note = f"Printed from `{name}.json` by `benches/peers/tables.py`. [How to read it](README.md)."
    return "\n".join(lines[:1] + ["", note] + lines[1:]).rstrip() + "\n"


def blocks(lines):
    """Lines of Markdown as headings, texts, quoted output and tables."""
    lines = [line for text in lines for line in text.split("\n")]
    found, i = [], 0
    while i < len(lines):
        start = i
        if not lines[i].strip():
            i += 1
        elif lines[i].startswith("#"):
            level = len(lines[i]) - len(lines[i].lstrip("#"))
            found.append({"heading": lines[i][level:].strip(), "level": level})
            i += 1
        elif lines[i].startswith("```"):
            i = lines.index("```", i + 1) + 1
            found.append({"output": lines[start + 1 : i - 1]})
        elif lines[i].startswith("|"):
            while i < len(lines) and lines[i].startswith("|"):
                i += 1
            rows = [
                [cell.strip() for cell in line[1:].rstrip().removesuffix("|").split("|")]
                for line in lines[start:i]
            ]
            found.append({"columns": rows[0], "rows": rows[2:]})
        else:
            while i < len(lines) and lines[i].strip() and not lines[i].startswith(("#", "|", "```")):
                i += 1
            found.append({"text": lines[start:i]})
    return found


def main():
    check, stale = "--check" in sys.argv[1:], []
    if sys.argv[1:] and not check:
        return write_printed(os.path.join(RESULTS, sys.argv[1]), sys.stdin.read().splitlines())
    for path in sorted(glob.glob(os.path.join(RESULTS, "*.json"))):
        stem = os.path.splitext(path)[0]
        with open(path) as file:
            text = page(os.path.basename(stem), json.load(file))
        if not check:
            with open(f"{stem}.md", "w") as file:
                file.write(text)
        elif not os.path.exists(f"{stem}.md") or open(f"{stem}.md").read() != text:
            stale.append(f"{os.path.basename(stem)}.md")
    if stale:
        sys.exit(f"not printed from their data: {', '.join(stale)}; run benches/peers/tables.py")


if __name__ == "__main__":
    main()

"""Programs of this repository as the scripts run them: what they print, and what `kv compare` and `kv eval` find."""

import json, statistics, subprocess, tempfile, time


def run(command, **options):
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def given(**options):
    """Arguments for the options that have a value."""
    return [part for name, value in options.items() if value for part in (f"--{name}", value)]


def compared(kv, methods, context, decode, *options):
    """The result of `kv compare`."""
    with tempfile.NamedTemporaryFile() as file:
        command = [kv, "compare", *options, "--context", str(context), "--decode", str(decode), "--json", file.name]
        run(command + ["--methods", ",".join(methods)])
        return json.load(open(file.name))


def retrieval(kv, methods, lengths, *options):
    """A section: pass keys and lines to be recalled, as `kv eval` prints them."""
    command = [kv, "eval", "--methods", ",".join(methods), "--lengths", ",".join(map(str, lengths))]
    printed = run([*command, "--windows", "1", "--trials", "4", *options]).strip("\n")
    return ["### Retrieval (`kv eval`)", "", "```", printed, "```", ""]


def median(repeats, run):
    """Seconds of a function."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

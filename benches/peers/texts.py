"""Texts that a profile has not seen, and runs of `kv` over them: what any_text, joint, margins and models have in common."""

import argparse, glob, json, os, subprocess, textwrap

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
CALIBRATION = 4096


def parser():
    """Arguments of every such script."""
    made = argparse.ArgumentParser()
    made.add_argument("kv")
    made.add_argument("results", help="a folder")
    made.add_argument("--wikitext", required=True)
    made.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    made.add_argument("--texts", type=int)
    made.add_argument("--device", default="cpu", help="of `kv eval`: with auto, methods without kernels run on the CPU")
    return made


def chosen(args, names=None):
    """The first `--texts` texts by name: those of the repository, or some of them, and `--text`."""
    texts = {name: text for name, text in own_texts().items() if names is None or name in names}
    for name, path in (given.split("=", 1) for given in args.text):
        texts[name] = open(path, encoding="utf-8").read()
    return dict(list(texts.items())[: args.texts])


def models(shipped, given):
    """Settings by model: those of the shipped one, (path, text, number, last), and of `--model NAME=PATH:TEXT:NUMBER:LAST`."""
    found = {"tiny-llama-12m": shipped}
    for name, setting in (one.split("=", 1) for one in given):
        found[name] = tuple(kind(part) for kind, part in zip(map(type, shipped), setting.rsplit(":", 3)))
    return found


def own_texts():
    """Texts of the repository by name: what the shipped model and WikiText-2 have little of."""
    read = lambda path: open(os.path.join(ROOT, path), encoding="utf-8").read()
    speeches = read("reference/assets/sotu-heldout.txt").split("\n")
    code = sorted(glob.glob(os.path.join(ROOT, "svd-core/src/**/*.rs"), recursive=True))
    results = lambda kind: "\n".join(read(f"benches/results/{name}.{kind}") for name in ("gpu", "streaming", "hybrid"))
    return {
        "prose in lines": "\n".join(textwrap.fill(paragraph, 72) for paragraph in speeches),
        "code": "\n".join(map(read, code)),
        "JSON": results("json"),
        "tables": results("md"),
    }


class Bench:
    """Runs of `kv` on one model, with files in a folder."""

    def __init__(self, kv, path, folder, device="cpu"):
        self.kv, self.folder, self.device = kv, folder, device
        self.model = ["--model", path] if path else []
        self.profile = os.path.join(folder, "profile")

    def file(self, content):
        """The path of a file with this text, until the next one."""
        path = os.path.join(self.folder, "text")
        with open(path, "w", encoding="utf-8") as out:
            out.write(content)
        return path

    def run(self, command, *arguments):
        path = os.path.join(self.folder, "json")
        line = [self.kv, command, *map(str, arguments), *self.model, "--json", path]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        return json.load(open(path))

    def calibrate(self, text, methods):
        self.run("calibrate", self.profile, "--replace", "--text", text, "--tokens", CALIBRATION, "--methods", ",".join(methods))

    def eval(self, text, methods, length, decode, trials, profile=True, calibration=CALIBRATION):
        """A row for every method; the last tokens of the calibration are those before the prompt."""
        arguments = ["--text", text, "--methods", ",".join(methods), "--lengths", length, "--decode", decode]
        arguments += ["--trials", trials, "--depths", 0.5, "--windows", 0, "--calibration", calibration, "--device", self.device]
        arguments += ["--profile", self.profile] if profile else []
        return dict(zip(methods, self.run("eval", *arguments)["rows"]))


def found(at):
    return [sum(part["hits"] for part in at), sum(part["trials"] for part in at)]

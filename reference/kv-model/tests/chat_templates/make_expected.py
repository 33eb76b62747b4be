#!/usr/bin/env python3
"""Writes expected.json: what Jinja makes of the templates here, with the options and functions that
transformers.utils.chat_template_utils gives it. Needs the package jinja2; the date is fixed.

    python3 make_expected.py
"""
import json
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent

CONVERSATIONS = [
    [("user", "Why is the sky blue?")],
    [("system", "Be brief."), ("user", " Zwölf?\n"), ("assistant", "12\n"), ("user", "and\nmore <|im_end|>")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    [("assistant", "I begin."), ("user", "No.")],
    [("user", "a"), ("tool", "{}")],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


class Generation(Extension):
    """The tags {% generation %} of transformers' AssistantTracker, which mark what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: "29 Nov 2026"
    cases = []
    for path in sorted(HERE.glob("*.jinja")):
        template = environment.from_string(path.read_text())
        for conversation in CONVERSATIONS:
            for prompt in [False, True]:
                messages = [{"role": role, "content": content} for role, content in conversation]
                try:
                    made = template.render(messages=messages, add_generation_prompt=prompt, **TOKENS)
                    outcome = {"text": made}
                except jinja2.exceptions.TemplateError as error:
                    outcome = {"error": str(error)}
                cases.append({"template": path.stem, "messages": messages, "prompt": prompt, **outcome})
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / "expected.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()

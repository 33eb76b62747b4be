#!/usr/bin/env python3
"""A token of a model in quantized GGUF blocks on CPU threads, by `kv generate` and by llama.cpp: quantized.{json,md}.

    cargo build --release -p kv-reference
    npm pack @node-llama-cpp/linux-x64 && tar xzf node-llama-cpp-linux-x64-*.tgz    # llama.cpp's libraries
    python benches/peers/quantized.py target/release/kv package/bins/linux-x64 benches/results MODEL.gguf...

Both continue the same text greedily, with keys and values in half precision, in rounds that take turns. Their prompts have
equal numbers of tokens, and our first token is one of llama.cpp's five likeliest: it rounds activations to 8 bits.
"""

import argparse, ctypes, glob, heapq, json, os, statistics, subprocess, sys, tempfile, time

import tables

TEXT = os.path.join(os.path.dirname(__file__), "..", "..", "reference", "assets", "sotu-heldout.txt")


class Llama:
    """llama.cpp by its C interface, with its defaults but for the sizes at the start of a context's parameters."""

    class Context(ctypes.Structure):
        # The parameters are passed on the stack, as the last argument: what is behind those that exist is ignored.
        _fields_ = [("n_ctx", ctypes.c_uint32), ("n_batch", ctypes.c_uint32), ("rest", ctypes.c_byte * 504)]

    class Parameters(ctypes.Structure):
        _fields_ = [("rest", ctypes.c_byte * 512)]

    class Batch(ctypes.Structure):
        _fields_ = [("n_tokens", ctypes.c_int32), ("rest", ctypes.c_void_p * 6)]

    def __init__(self, folder, model, context, threads):
        def load(name):
            return ctypes.CDLL(glob.glob(os.path.join(folder, f"{name}.*so*"))[0], mode=ctypes.RTLD_GLOBAL)

        load("libggml-base")
        ggml, self.library = load("libggml"), load("libllama")
        self.silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self.library.llama_log_set(self.silent, None)
        ggml.ggml_backend_load_all_from_path(folder.encode())
        begin = time.perf_counter()
        path, parameters = model.encode(), self.call("llama_model_default_params", self.Parameters)
        self.model = self.call("llama_model_load_from_file", ctypes.c_void_p, path, parameters)
        given = self.call("llama_context_default_params", self.Context)
        given.n_ctx = given.n_batch = context
        self.context = self.call("llama_init_from_model", ctypes.c_void_p, ctypes.c_void_p(self.model), given)
        assert self.model and self.context, model
        self.load_seconds = time.perf_counter() - begin
        self.call("llama_set_n_threads", None, ctypes.c_void_p(self.context), threads, threads)
        self.vocabulary = self.call("llama_model_get_vocab", ctypes.c_void_p, ctypes.c_void_p(self.model))
        self.size = self.call("llama_vocab_n_tokens", ctypes.c_int32, ctypes.c_void_p(self.vocabulary))

    def call(self, name, result, *arguments):
        function = getattr(self.library, name)
        function.restype = result
        return function(*arguments)

    def tokens(self, text):
        text = text.encode()
        out, flag = (ctypes.c_int32 * (len(text) + 8))(), ctypes.c_bool
        arguments = ctypes.c_void_p(self.vocabulary), text, len(text), out, len(out), flag(True), flag(False)
        return list(out[: self.call("llama_tokenize", ctypes.c_int32, *arguments)])

    def step(self, tokens):
        """The five most likely tokens after some."""
        given = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.call("llama_batch_get_one", self.Batch, given, len(tokens))
        assert self.call("llama_decode", ctypes.c_int32, ctypes.c_void_p(self.context), batch) == 0
        row = ctypes.POINTER(ctypes.c_float)
        logits = self.call("llama_get_logits_ith", row, ctypes.c_void_p(self.context), -1)[: self.size]
        return heapq.nlargest(5, range(self.size), key=logits.__getitem__)


def llama(folder, model, text, context, tokens, threads):
    """A run of llama.cpp: prints one line of JSON."""
    peer = Llama(folder, model, context + tokens, threads)
    prompt = peer.tokens(text)
    begin = time.perf_counter()
    likeliest = peer.step(prompt)
    made = likeliest[:1]
    prompt_seconds, seconds = time.perf_counter() - begin, []
    # Searching a list for its largest entry takes Python as long as a step: only the call is timed.
    call = peer.call

    def timed(name, *arguments):
        begin = time.perf_counter()
        result = call(name, *arguments)
        if name == "llama_decode":
            seconds.append(time.perf_counter() - begin)
        return result

    peer.call = timed
    while len(made) < tokens:
        made.append(peer.step([made[-1]])[0])
    rest = {"likeliest": likeliest, "prompt_tokens": len(prompt), "prompt_seconds": prompt_seconds, "load_seconds": peer.load_seconds}
    print(json.dumps({"tokens": made, "token_seconds": seconds, **rest}))


def ours(kv, model, text, tokens, threads):
    """A run of `kv generate`."""
    with tempfile.NamedTemporaryFile() as file:
        command = [kv, "generate", "-f", "-", "--model", model, "--tokens", str(tokens), "--device", "cpu", "--json", file.name]
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads)}
        subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.DEVNULL, env=environment)
        run = json.load(open(file.name))
        run["token_seconds"] = run["token_seconds"][1:]  # the first token is chosen from the prompt's logits
        return run


def measure(args, model):
    text = open(TEXT).read()
    text = text[: args.context * 4].rsplit(" ", 1)[0]
    runs = {"kv": [], "llama.cpp": []}
    for _ in range(args.rounds):
        runs["kv"].append(ours(args.kv, model, text, args.tokens, args.threads))
        child = [sys.executable, __file__, "--child", args.llama, model, str(args.context), str(args.tokens), str(args.threads)]
        made = subprocess.run(child, input=text, text=True, check=True, capture_output=True).stdout
        runs["llama.cpp"].append(json.loads(made))
    a, b = runs["kv"][0], runs["llama.cpp"][0]
    assert a["prompt_tokens"] == b["prompt_tokens"], (a["prompt_tokens"], b["prompt_tokens"])
    equal = next((i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"])) if x != y), len(a["tokens"]))
    assert a["tokens"][0] in b["likeliest"], (a["tokens"][0], b["likeliest"])
    size = os.path.getsize(model)
    rows = []
    for name, found in runs.items():
        token = statistics.median(second for run in found for second in run["token_seconds"])
        prompt = statistics.median(run["prompt_seconds"] for run in found)
        rows.append((name, token, prompt))
    ratio = rows[0][1] / rows[1][1]
    lines = [f"## {os.path.basename(model)}", ""]
    lines += [f"{size:,} bytes, {args.threads} threads, a prompt of {a['prompt_tokens']} tokens; medians of {args.rounds} rounds of {args.tokens} tokens.", ""]
    lines += ["| engine | token, ms | prompt, s | token, GB/s of the file |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {1e3 * token:.1f} | {prompt:.2f} | {size / token / 1e9:.1f} |" for name, token, prompt in rows]
    same = f"The first {equal} tokens are equal." if equal else "Its first token is another of llama.cpp's five likeliest."
    return lines + ["", f"A token takes {ratio:.2f} times that of llama.cpp. {same}", ""]


def main():
    if sys.argv[1:2] == ["--child"]:
        folder, model, context, tokens, threads = sys.argv[2:]
        return llama(folder, model, sys.stdin.read(), int(context) + 1024, int(tokens), int(threads))
    parser = argparse.ArgumentParser()
    parser.add_argument("kv")
    parser.add_argument("llama", help="the folder of llama.cpp's libraries")
    parser.add_argument("results", help="a folder")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    lines = ["# A token of quantized models on CPU threads", "", f"{tables.cpu()}; {tables.today()}, commit {tables.commit()}.", ""]
    for model in args.models:
        lines += measure(args, model)
    tables.write_printed(os.path.join(args.results, "quantized.md"), lines)


main()

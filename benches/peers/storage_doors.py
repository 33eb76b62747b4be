#!/usr/bin/env python3
"""Objects of LMCache below its memory, through its own storage manager: storage_doors.{json,md}.

    PROFILE=release .ci/adapters engines    # installs kvcodes and LMCache into target/engines-venv
    target/engines-venv/bin/python benches/peers/storage_doors.py benches/results

Keys after RoPE and values of the shipped model, in bf16, in LMCache's chunks of 256 tokens: the held-out speeches.
Lossy levels are fitted to another text (reference/assets/calibration). Each adapter stores all chunks; they are
dropped from memory, found, and loaded again. Bytes are those of the files. Speeds are bytes of rows per second of
wall time, the fastest of five rounds, with everything that the manager does, and a folder in memory (/dev/shm):
those of the disk would be the same for all. LMCache's CacheGen needs CUDA, and its serde interface refuses objects
of varying length, so that its lossy peer here is fp8.
"""

import argparse, json, os, pathlib, shutil, tempfile, time

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvcodes
import tables

ASSETS = pathlib.Path(__file__).parents[2] / "reference/assets"
CHUNK, ROUNDS, RANK = 256, 5, 0x01000100


def rows(model, ids):
    """Keys and values of a text, (2, layers, tokens, heads, dim)."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, cache=cache, logits_to_keep=1)
    sides = [[getattr(layer, side)[0].transpose(0, 1) for layer in cache.layers] for side in ("keys", "values")]
    return torch.stack([torch.stack(side) for side in sides]).to(torch.bfloat16)


def profile(sample, steps, path):
    """A file of levels with loss."""
    fitted = kvcodes.Profile.fit(sample.transpose(0, 1).contiguous(), "shipped", steps=steps)
    path.write_bytes(fitted.to_bytes())
    return str(path)


def manager(adapter):
    parser = add_storage_manager_args(argparse.ArgumentParser())
    arguments = ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
    return StorageManager(parse_args_to_config(parser.parse_args(arguments)))


def until(found):
    deadline = time.monotonic() + 120
    while not found():
        assert time.monotonic() < deadline, "the manager does not end"
        time.sleep(0.0005)


class Watch:
    """Counts the objects that the adapter says it has stored."""

    def __init__(self):
        self.stored = 0

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += len(keys)

    def on_l2_keys_accessed(self, keys): ...
    def on_l2_keys_deleted(self, keys, sizes): ...


def measure(adapter, chunks, folder):
    """Bytes, errors and speeds of an adapter."""
    store, watch = manager(adapter), Watch()
    store.register_l2_listener(watch)
    layout = MemoryLayoutDesc([torch.Size((*chunks[0].shape[:3], chunks[0][0, 0, 0].numel()))], [torch.bfloat16])
    raw = sum(chunk.nbytes for chunk in chunks)
    put, get, outs = [], [], []
    for round_ in range(ROUNDS):
        keys = [ObjectKey(bytes([round_, i]) * 16, "shipped", RANK, 0, "") for i in range(len(chunks))]
        reserved = store.reserve_write(keys, layout)
        for key, chunk in zip(keys, chunks, strict=True):
            reserved[key].tensor.copy_(chunk.flatten(-2))
        watch.stored, start = 0, time.perf_counter()
        store.finish_write(keys)
        until(lambda: watch.stored == len(chunks))
        put.append(raw / (time.perf_counter() - start))
        until(lambda: store.delete_l1_keys(keys) == (len(chunks), 0) or not store.delete_l1_keys(keys)[1])
        start = time.perf_counter()
        handle = store.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)]))
        assert store.wait_prefetch_status(handle, 120)
        get.append(raw / (time.perf_counter() - start))
        result = store.query_prefetch_status(handle)
        assert result.l2_hit_count == len(chunks), result
        with store.read_prefetched_results(keys) as loaded:
            outs = [out.tensor.clone().reshape(chunks[0].shape) for out in loaded]
        store.finish_read_prefetched(keys)
        store.delete_l1_keys(keys)
    store.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and "profiles" not in path.parts)
    truth, found = torch.stack(chunks).float(), torch.stack(outs).float()
    error = [float((found[:, s] - truth[:, s]).norm() / truth[:, s].norm()) for s in range(2)]
    return {
        "share": size / (ROUNDS * raw),
        "key_error": error[0],
        "value_error": error[1],
        "store_gb_s": max(put) / 1e9,
        "load_gb_s": max(get) / 1e9,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", help="a folder")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", default="1,4,16")
    parser.add_argument("--commit")
    args = parser.parse_args()
    path = ASSETS / "tiny-llama-12m"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    ids = lambda text, n: tokenizer(text, return_tensors="pt").input_ids[:, :n]
    held_out = ids((ASSETS / "sotu-heldout.txt").read_text(), args.tokens)
    other = "\n".join(file.read_text() for file in sorted((ASSETS / "calibration").glob("*.txt")))
    pieces = [rows(model, piece) for piece in held_out.split(2048, 1)]
    chunks = [chunk.contiguous() for piece in pieces for chunk in piece.split(CHUNK, 2) if chunk.shape[2] == CHUNK]
    sample = rows(model, ids(other, 2048))

    made = {"cpu": tables.cpu(), "date": tables.today(), "commit": args.commit or tables.commit()}
    made |= {"chunks": len(chunks), "chunk_bytes": chunks[0].nbytes, "rows": []}
    scratch = pathlib.Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        peers = [("fs", "raw", {"type": "fs"}), ("fs", "serde fp8", {"type": "fs", "serde": {"type": "fp8"}})]
        for name, setting, adapter in peers:
            folder = scratch / setting.replace(" ", "-")
            row = measure(adapter | {"base_path": str(folder)}, chunks, folder)
            made["rows"].append({"adapter": name, "setting": setting, "threads": None} | row)
        for steps in [None, 0.05, 0.1, 0.25, 0.5]:
            for threads in map(int, args.threads.split(",")):
                setting = "lossless" if steps is None else f"steps of {steps}"
                folder = scratch / f"{setting} {threads}".replace(" ", "-")
                params = {"url": str(folder), "shape": list(chunks[0].shape), "threads": threads}
                if steps is not None:
                    params["profile"] = profile(sample, [steps], scratch / f"{steps}.profile")
                module = {"module_path": "kvcodes.lmcache", "class_name": "Connector", "adapter_params": params}
                row = measure({"type": "native_plugin"} | module, chunks, folder)
                assert steps is not None or (row["key_error"], row["value_error"]) == (0, 0)
                made["rows"].append({"adapter": "kvcodes", "setting": setting, "threads": threads} | row)
                shutil.rmtree(folder)
    finally:
        shutil.rmtree(scratch)
    tables.write(os.path.join(args.results, "storage_doors.json"), made)


if __name__ == "__main__":
    main()

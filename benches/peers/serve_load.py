#!/usr/bin/env python3
"""Clients of a running `kv serve` that arrive at random, and of whom some cancel, stall or disconnect: serve-load.{json,md}.

    cargo build --release -p kv-reference --features serve
    python benches/peers/serve_load.py target/release/kv benches/results --clients 200 --seconds 1800 -- --method million:pages=64
    python benches/peers/serve_load.py target/release/kv - --seconds 20 -- --device cpu    # prints what it finds, writes nothing

What follows `--` are options of `kv serve`, which the script starts and ends. Each client waits for an exponential time, sends one request
over a connection of its own, and does one of four things: it reads the whole answer (in a stream or at once), cancels after some tokens of a
stream, stalls (reads nothing for some seconds, then the rest), or disconnects at once. After a warm-up of a fifth of the time all requests
end, and the server's memory is read; then the clients go on. The run fails where an answer that was read is not whole, where the counters of
`/metrics` are not back at zero after it, or where resident memory has grown by 5 % or more since the warm-up.
"""

import argparse, asyncio, json, random, re, statistics, subprocess, sys, time

import tables

WORDS = "we the people of this nation must work together to build a better future for every family and year".split()
# What clients do, and how many of them.
SHARES = {"whole": 35, "stream": 35, "cancel": 10, "stall": 10, "disconnect": 10}
# Seconds in which counters must be back at zero.
SETTLE = 60
MOST_GROWTH = 0.05


class Server:
    def __init__(self, kv, options):
        self.process = subprocess.Popen([kv, "serve", "--port", "0", *options], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        found = re.match(r"http://(.*):(\d+)\s", line)
        if not found:
            sys.exit(f"kv serve has not started: {line!r}")
        self.host, self.port = found[1], int(found[2])

    def resident_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    async def send(self, method, path, body=b""):
        """The open connection of a request."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 24)
        head = f"{method} {path} HTTP/1.1\r\nHost: kv\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        return reader, writer

    async def metrics(self):
        reader, writer = await self.send("GET", "/metrics")
        text = (await reader.read()).decode()
        writer.close()
        return {name: int(value) for name, value in re.findall(r"^kv_(\w+) (\d+)", text, re.MULTILINE)}

    async def is_idle(self):
        """Waits until nothing runs or waits. Returns the last counters, and whether that was so."""
        for _ in range(10 * SETTLE):
            found = await self.metrics()
            if not any(found[name] for name in ("requests_running", "requests_waiting", "cached_tokens")):
                return found, True
            await asyncio.sleep(0.1)
        return found, False

    def end(self):
        self.process.terminate()
        return self.process.wait(timeout=120)


class Load:
    """What clients have found."""

    def __init__(self, server, seed):
        self.server, self.random = server, random.Random(seed)
        self.counts, self.lost, self.normalized, self.first = {}, [], [], []

    def count(self, what):
        self.counts[what] = self.counts.get(what, 0) + 1

    async def client(self, until, mean_wait):
        while True:
            await asyncio.sleep(self.random.expovariate(1 / mean_wait))
            if time.monotonic() > until:
                return
            kind = self.random.choices(list(SHARES), SHARES.values())[0]
            try:
                await self.request(kind)
            except OSError as e:  # the server has not taken or has dropped the connection
                self.lost.append(f"{kind}: {e}")

    async def request(self, kind):
        prompt = " ".join(self.random.choices(WORDS, k=self.random.randint(1, 120)))
        tokens, streams = self.random.randint(1, 64), kind in ("stream", "cancel", "stall")
        body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0.8, "stream": streams}).encode()
        came = time.monotonic()
        reader, writer = await self.server.send("POST", "/v1/completions", body)
        try:
            if kind == "disconnect":
                await asyncio.sleep(self.random.random() / 10)
                return self.count(kind)
            if kind == "stall":
                await asyncio.sleep(self.random.expovariate(1 / 4))
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status = int(head.split(" ")[1])
            if status == 503:
                return self.count("refused")
            if status != 200:
                return self.lost.append(f"{kind}: status {status}")
            if streams:
                return await self.stream(kind, reader, came)
            text = (await reader.read()).decode()
            answer = json.loads(text)
            self.whole(kind, answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"], came)
        except (asyncio.IncompleteReadError, ValueError, KeyError) as e:
            self.lost.append(f"{kind}: {e!r}")
        finally:
            writer.close()

    async def stream(self, kind, reader, came):
        first, parts, finish = None, 0, None
        stops_at = self.random.randint(1, 10) if kind == "cancel" else None
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            first = first or time.monotonic()
            if line.strip() == b"data: [DONE]":
                if kind == "stream":
                    self.first.append(first - came)
                return self.whole(kind, finish, parts, came)
            part = json.loads(line[6:])
            if "error" in part:
                return self.lost.append(f"{kind}: {part['error']['message']}")
            parts, finish = parts + 1, part["choices"][0]["finish_reason"]
            if parts == stops_at:
                return self.count(kind)
        self.lost.append(f"{kind}: the stream has no end")

    def whole(self, kind, finish, tokens, came):
        if finish not in ("length", "stop"):
            return self.lost.append(f"{kind}: an answer without an end")
        self.count(kind)
        if kind in ("whole", "stream") and tokens:
            self.normalized.append((time.monotonic() - came) / tokens)


def summary(seconds):
    if not seconds:
        return None
    seconds = sorted(seconds)
    return {
        "mean": statistics.fmean(seconds),
        "p50": seconds[len(seconds) // 2],
        "p99": seconds[len(seconds) * 99 // 100],
    }


async def measure(server, args):
    mean_wait = args.clients / args.rate

    async def load_for(seconds, seed):
        load, until = Load(server, seed), time.monotonic() + seconds
        await asyncio.gather(*(load.client(until, mean_wait) for _ in range(args.clients)))
        return load, await server.is_idle()

    warm_up, (before, was_idle) = await load_for(args.seconds / 5, args.seed)
    started_with = server.resident_bytes()
    load, (after, is_idle) = await load_for(args.seconds, args.seed + 1)
    ended_with = server.resident_bytes()
    lost = warm_up.lost + load.lost
    failures = [f"{len(lost)} answers are lost, such as {lost[0]}"] if lost else []
    if not (was_idle and is_idle):
        failures.append(f"not all has ended: {after}")
    growth = ended_with / started_with - 1
    if growth >= MOST_GROWTH:
        failures.append(f"resident memory has grown by {100 * growth:.1f} %")
    return {
        "clients": args.clients,
        "rate": args.rate,
        "seconds": args.seconds,
        "requests": load.counts,
        "put_back": after["requests_put_back_total"] - before["requests_put_back_total"],
        "normalized": summary(load.normalized),
        "first_token": summary(load.first),
        "resident_bytes": [started_with, ended_with],
        "failures": failures,
    }


def main():
    own, separator, options = sys.argv[1:], "--", []
    if separator in own:
        own, options = own[: own.index(separator)], own[own.index(separator) + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kv")
    parser.add_argument("results", help="a folder, or - to print alone")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of all clients, while none waits for an answer")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commit", help="of the program, where there is no repository")
    args = parser.parse_args(own)
    server = Server(args.kv, options)
    try:
        found = asyncio.run(measure(server, args))
    finally:
        code = server.end()
    if code:
        found["failures"].append(f"the server ended with {code}")
    result = {"date": tables.today(), "device": tables.cpu(), "options": options, **found}
    if args.results == "-":
        print(tables.dump(result))
    else:
        result["commit"] = args.commit or tables.commit()
        tables.write(f"{args.results}/serve-load.json", result)
    sys.exit("; ".join(found["failures"]) or None)


if __name__ == "__main__":
    main()

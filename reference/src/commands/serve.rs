//! `kv serve`: requests over HTTP, in the shape of OpenAI's API.

mod answer;
mod engine;
mod error;
mod fields;
mod metrics;
mod question;
mod reader;
mod routes;

use std::net::{TcpListener, ToSocketAddrs};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use clap::{Args, value_parser};
use kv_llama::Decoder;
use kv_llama::serve::{Engine, Sequences};
#[cfg(feature = "cuda")]
use kv_llama_gpu::Batch;
#[cfg(feature = "cuda")]
use kv_llama_gpu::ranks::{Batches, Lockstep, Rank};
#[cfg(feature = "cuda")]
use kv_methods::Place;
use kv_methods::Prepared;
#[cfg(feature = "cuda")]
use kv_reference::compare::OnGpu;
use kv_reference::{Error, Result};

use super::cache::CacheArgs;
use super::chat::Chat;
use super::{
    Files, ModelArgs, Stdout, at_least_one, check_profile_has_effect, load, print_error, read_profile,
};
use engine::Inbox;
use routes::Served;

#[derive(Args)]
#[command(after_help = "Example:\n  kv serve --method int4 --sequences 8 --port 8080\n  \
                        curl localhost:8080/v1/completions -H 'Content-Type: application/json' \\\n    \
                        -d '{\"prompt\": \"We, the people\", \"max_tokens\": 32, \"temperature\": 0}'\n\n\
                        Methods and their settings: kv methods")]
pub struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    /// Address to listen on; nothing protects it
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes one that is free
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=1024))]
    sequences: u32,
    /// Requests that wait for them; more are refused
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = value_parser!(u32).range(..=1_000_000))]
    queue: u32,
    /// Tokens of a sequence, the prompt included [default: those of the model, but at most 8192]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    context: Option<NonZeroUsize>,
    #[command(flatten)]
    cache: CacheArgs,
}

/// Default tokens of a sequence: on a GPU a cache of all is made at the start.
const MOST_CONTEXT: usize = 8192;

/// Default tokens of prompts that run between two steps: on a CPU with the shipped model a fraction of a
/// second, on a GPU with a model of 8 billion parameters the time of five steps.
const CHUNK: usize = 512;
#[cfg(feature = "cuda")]
const DEVICE_CHUNK: usize = 2048;

impl Serve {
    pub fn run(mut self, out: &mut Stdout) -> Result<()> {
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.cache.add_to(&mut files);
        check_profile_has_effect(self.cache.profile.as_ref(), std::slice::from_ref(&self.cache.method))?;
        let checkpoint = self.model.open()?;
        let placement = self.cache.place(&checkpoint)?;
        let most = checkpoint.config.max_seq_len;
        let context = self.context.map_or(most.min(MOST_CONTEXT), NonZeroUsize::get);
        checkpoint.check_context(context)?;
        let methods = std::slice::from_ref(&self.cache.method);
        let profile = read_profile(self.cache.profile.as_ref(), &checkpoint.config, methods)?;
        checkpoint.tokenizer()?;
        let chat = Chat::of(&checkpoint);
        // Before the long work: the port may be in use.
        let listener = self.listen()?;
        let model = load(checkpoint)?;
        let profile = profile.map(|profile| profile.of(&model)).transpose()?;
        let rope = Arc::new(CacheArgs::rope(&model.config, context));
        let profile = self.cache.calibrated(profile, &model, &rope)?;
        let notes: Vec<String> = placement.note.clone().into_iter().chain(placement.placed.notes()).collect();
        notes.iter().for_each(|note| print_error(format_args!("kv: {note}\n")));
        let (door, inbox) = engine::door(self.sequences + self.queue);
        let served = Served { model: model.clone(), chat, context, door };
        let opening = Opening { listener, served, inbox };
        let chunk = |default| self.cache.given_chunk().unwrap_or(default);
        let sequences = (self.sequences as usize, context);
        #[cfg(not(feature = "cuda"))]
        drop(placement); // it has no GPU
        #[cfg(feature = "cuda")]
        if let Some(OnGpu { ranks, .. }) = placement.gpu.filter(|_| self.cache.method.place() == Place::Cuda)
        {
            let make = self.cache.device_decoder(&model, &profile, sequences)?;
            let batch = move |rank: &Rank| Result::Ok(Batch::new(make(rank)?)?);
            return opening.run(Batches::new(Lockstep::start(ranks, batch)?)?, chunk(DEVICE_CHUNK), out);
        }
        let Prepared { model, cache } = self.cache.method.prepare(&model, &rope, &profile)?;
        let decoder = Decoder::new(model, rope);
        opening.run(Sequences::new(decoder, cache, sequences), chunk(CHUNK), out)
    }

    fn listen(&self) -> Result<TcpListener> {
        let address = (self.host.as_str(), self.port);
        let listener =
            address.to_socket_addrs().and_then(|found| TcpListener::bind(&*found.collect::<Vec<_>>()));
        listener.map_err(|e| Error::Argument(format!("--host {} --port {}: {e}", self.host, self.port)))
    }
}

/// What is ready when the engine is.
struct Opening {
    listener: TcpListener,
    served: Served,
    inbox: Inbox,
}

impl Opening {
    /// Accepts requests and runs them, `chunk` tokens of prompts between two steps, until a signal ends that.
    fn run<E: Engine>(self, engine: E, chunk: usize, out: &mut Stdout) -> Result<()>
    where
        Error: From<E::Error>,
    {
        let ends = self.served.model.config.eos_tokens.clone();
        let http = Http::start(self.listener, self.served, out)?;
        let run = self.inbox.run(engine, ends, chunk);
        http.end();
        run
    }
}

/// The thread of the HTTP server.
struct Http {
    thread: thread::JoinHandle<()>,
    stop: Arc<tokio::sync::Notify>,
}

impl Http {
    /// Starts to accept connections and prints where.
    fn start(listener: TcpListener, served: Served, out: &mut Stdout) -> Result<Self> {
        let io = |e: std::io::Error| Error::Argument(format!("kv serve: {e}"));
        listener.set_nonblocking(true).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        let stop = Arc::new(tokio::sync::Notify::new());
        let stopped = stop.clone();
        let run = move || {
            if let Err(e) = runtime.block_on(routes::run(listener, served, stopped)) {
                print_error(format_args!("kv: HTTP: {e}\n"));
            }
            // Threads that still tokenize would be waited for.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("http".into()).spawn(run).map_err(io)?;
        out.print(format_args!("http://{address}\n"));
        Ok(Self { thread, stop })
    }

    /// Stops to accept connections and waits for those that there are.
    fn end(self) {
        self.stop.notify_one();
        let _ = self.thread.join(); // it has said what went wrong
    }
}

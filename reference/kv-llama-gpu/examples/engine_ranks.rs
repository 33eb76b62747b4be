//! Two parts of the shipped model in an engine that brings its own exchanges: here they count their bytes.
//! Needs a GPU, which both parts share.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use cudarc::driver::sys::CUstream;
use kv_attend::Window;
use kv_device::{CacheShape, Gpu, Plan};
use kv_gpu::{DevicePtr, Element};
use kv_llama_gpu::ranks::{Communicator, HostMemory, Lockstep, Rank, Shard};
use kv_llama_gpu::{CHUNK, Decoder, Result, WeightLayout, Weights};
use kv_model::{Config, Model, rope_frequencies};

/// The engine's exchanges, which pass rows on.
struct Counted(HostMemory, Arc<AtomicUsize>);

impl Communicator for Counted {
    fn shard(&self) -> Shard {
        self.0.shard()
    }

    unsafe fn sum(&self, stream: CUstream, data: DevicePtr<f32>, len: usize) -> Result<()> {
        self.1.fetch_add(4 * len, Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.0.sum(stream, data, len) }
    }

    unsafe fn gather(&self, stream: CUstream, data: DevicePtr<f32>, rows: usize, len: usize) -> Result<()> {
        self.1.fetch_add(4 * rows * len, Relaxed);
        // SAFETY: the caller's contract.
        unsafe { self.0.gather(stream, data, rows, len) }
    }

    fn is_capturable(&self) -> bool {
        false
    }

    fn abort(&self) {
        self.0.abort();
    }
}

/// The cache of a part of the model.
fn shape(config: &Config) -> CacheShape {
    let (layers, heads, group, head_dim) =
        (config.n_layers, config.n_kv_heads, config.gqa_group(), config.head_dim);
    let (frequencies, element) = (rope_frequencies(config), Element::F16);
    let window = Window { sinks: 4, recent: 64, batch: 1 };
    CacheShape { layers, heads, group, head_dim, frequencies, element, window, batch: 1, capacity: 512 }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let model = Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/tiny-llama-12m"))?;
    let bytes = Arc::new(AtomicUsize::new(0));
    let rank = |memory| {
        let communicator: Arc<dyn Communicator> = Arc::new(Counted(memory, bytes.clone()));
        Ok(Rank { gpu: Arc::new(Gpu::open(0)?), communicator: Some(communicator) }) // each with a stream
    };
    let ranks = HostMemory::ranks(2).into_iter().map(rank).collect::<Result<Vec<Rank>>>()?;
    let mut decoder = Lockstep::start(ranks, move |rank| {
        let (element, layout) = (Element::F16, WeightLayout::Packed);
        let weights = Weights::shard_of(&rank.gpu, &model, element, layout, rank.shard())?;
        let cache = Plan::Dense(None).build(&rank.gpu, &shape(&weights.config))?;
        Decoder::of_rank(rank, Arc::new(weights), cache, 1)
    })?;
    let picked = decoder.call(|decoder| {
        decoder.prefill(&[vec![1, 2, 3]], CHUNK)?;
        (0..10).try_for_each(|_| decoder.step())?;
        decoder.picked()
    })?;
    println!("{:?} after {} bytes between the ranks", picked[0], bytes.load(Relaxed));
    Ok(())
}

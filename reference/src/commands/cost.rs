#[cfg(feature = "cuda")]
use std::path::Path;
use std::path::PathBuf;
#[cfg(feature = "cuda")]
use std::sync::Arc;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
#[cfg(feature = "cuda")]
use kv_reference::device::{DeviceClustering, Gpu, LayerTimes};
use kv_reference::method::Method;
use kv_reference::method::cost::{ClusteringProfile, PrefillTimes};
#[cfg(feature = "cuda")]
use kv_reference::model::Config;
use kv_reference::{Error, Result};

#[cfg(feature = "cuda")]
use super::device::Chosen;
use super::device::DeviceArgs;
#[cfg(feature = "cuda")]
use super::no_effect;
use super::{Files, JsonArgs, ModelArgs, Stdout, TextArgs, distinct, print_error};

#[derive(Args)]
#[command(after_help = "Example:
  kv cost --method pqcache:code=2x6 --json cost.json
  kv compare --methods pqcache:code=2x6:iterations=cost.json

Columns: milliseconds of a layer's prefill, of writing its keys and values to --offload, and of one k-means
iteration over its heads; the iterations that take as long as a layer, by a fit of both times, 1 to 25;
milliseconds of a layer followed by 4 iterations (in turn), and with them running next to the following
layers (overlapped). --json has seconds: `times` by length, and the coefficients of the fits for n tokens,
`iteration`: c[0] + c[1] n, and `layer`: c[0] + c[1] n + c[2] n^2.

The times of a GPU go to a file next to that of --json, which iterations= reads there; they need no text and
write no rows.")]
pub struct Cost {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Method whose codebooks are trained on the prompt
    #[arg(long, default_value = "pqcache")]
    method: Method,
    /// Prompt lengths in tokens, at least three different ones
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512,1024,2048,4096")]
    lengths: Vec<usize>,
    /// Folder in which rows are written
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    offload: PathBuf,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    json: JsonArgs,
}

impl Cost {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        if self.lengths.contains(&0) {
            return Err(Error::argument("--lengths must be at least 1, not 0"));
        }
        distinct("--lengths", &self.lengths)?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        files.reads_settings("--method", std::slice::from_ref(&self.method));
        let json = files.writes("--json", self.json.json.clone())?;
        let model = self.model.load()?;
        #[cfg(feature = "cuda")]
        let note = match self.device.choose()? {
            Chosen::Gpu(gpu) => match self.on_device(&Arc::new(gpu), &model.config, out) {
                Ok(()) => return Ok(()),
                Err(e) => Some(self.device.fall_back(e)?),
            },
            Chosen::Cpu { note } => note,
        };
        #[cfg(not(feature = "cuda"))]
        let note = self.device.cpu()?;
        let shape = self.method.prompt_quantizer(&model.config)?;
        let (_, tokens) = self.text.tokens(&model)?;
        let profile = ClusteringProfile::measure(&model, &tokens, &self.lengths, shape, &self.offload)?;
        note.iter().for_each(|note| print_error(format_args!("kv: {note}\n")));
        out.print(format_args!("{}\n", table(&profile)));
        json.write_json(&profile)
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self, gpu: &Arc<Gpu>, config: &Config, out: &mut Stdout) -> Result<()> {
        if self.text.text.is_some() {
            return Err(no_effect("--text", "on a GPU: pass --device cpu"));
        }
        if self.offload != Path::new(".") {
            return Err(no_effect("--offload", "on a GPU: pass --device cpu"));
        }
        let profile = DeviceClustering::measure(gpu, &self.method, config, &self.lengths)?;
        out.print(format_args!("{}\n", device_table(&profile)));
        let Some(json) = &self.json.json else { return Ok(()) };
        let path = profile.write_beside(json)?;
        out.print(format_args!("The device's times are now in {}.\n", path.display()));
        Ok(())
    }
}

fn ms(seconds: f64) -> String {
    format!("{:.3}", 1000.0 * seconds)
}

/// Milliseconds by length, and the resulting iterations of the fit.
fn table(profile: &ClusteringProfile) -> String {
    let header =
        ["tokens", "layer ms", "offload ms", "iteration ms", "iterations", "in turn ms", "overlapped ms"];
    let row = |at: &PrefillTimes| {
        let iterations = profile.iterations(at.tokens).to_string();
        let [layer, offload, iteration] = [at.layer, at.offload, at.iteration].map(ms);
        [at.tokens.to_string(), layer, offload, iteration, iterations, ms(at.in_turn), ms(at.overlapped)]
    };
    of_rows(header, profile.times.iter().map(row))
}

/// The same for a GPU.
#[cfg(feature = "cuda")]
fn device_table(profile: &DeviceClustering) -> String {
    let row = |at: &LayerTimes| {
        let iterations = profile.iterations(at.tokens).to_string();
        [at.tokens.to_string(), ms(at.layer), ms(at.iteration), iterations]
    };
    of_rows(["tokens", "layer ms", "iteration ms", "iterations"], profile.times.iter().map(row))
}

fn of_rows<const N: usize>(header: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header);
    table.add_rows(rows);
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.trim_fmt()
}

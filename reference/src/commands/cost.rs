use std::path::PathBuf;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use kv_reference::Result;
use kv_reference::method::Method;
use kv_reference::method::cost::ClusteringProfile;

use super::{Files, JsonArgs, ModelArgs, Stdout, TextArgs, distinct};

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv cost --method pqcache:code=2x6 --json cost.json\n  kv compare --methods pqcache:code=2x6:iterations=cost.json"
)]
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
    json: JsonArgs,
}

impl Cost {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        distinct("--lengths", &self.lengths)?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        files.reads("--text", &self.text.path());
        let json = files.writes("--json", self.json.json)?;
        let model = self.model.load()?;
        let shape = self.method.prompt_quantizer(&model.config)?;
        let (_, tokens) = self.text.tokens(&model)?;
        let profile = ClusteringProfile::measure(&model, &tokens, &self.lengths, shape, &self.offload)?;
        out.print(format_args!("{}\n", table(&profile)));
        json.write_json(&profile)
    }
}

/// Milliseconds by length, and the iterations that follow from the fit.
fn table(profile: &ClusteringProfile) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "tokens",
        "layer ms",
        "offload ms",
        "iteration ms",
        "iterations",
        "in turn ms",
        "overlapped ms",
    ]);
    for at in &profile.times {
        let ms = |seconds: f64| format!("{:.3}", 1000.0 * seconds);
        table.add_row([
            at.tokens.to_string(),
            ms(at.layer),
            ms(at.offload),
            ms(at.iteration),
            profile.iterations(at.tokens).to_string(),
            ms(at.in_turn),
            ms(at.overlapped),
        ]);
    }
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

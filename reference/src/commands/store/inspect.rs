//! `kv store ls`, `verify` and `rm`: they need no model.

use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanBytes;
use kv_reference::store::{ChunkId, KvStore, ListedChunk, Listing, Options, sweep_unfinished};
use kv_reference::{Error, Result};
use serde::Serialize;

use super::super::output::Output;
use super::super::{Files, JsonArgs, Stdout, count};
use super::transfer_bar;

/// The store.
#[derive(Args)]
struct UrlArgs {
    /// A folder, or s3://BUCKET/PATH with the settings of the environment (AWS_ACCESS_KEY_ID and others)
    #[arg(value_name = "URL")]
    url: String,
}

impl UrlArgs {
    fn open(&self) -> Result<KvStore> {
        Ok(KvStore::open_existing(&self.url, Options::default())?)
    }

    /// The store, and an output that is outside of it.
    fn open_with(&self, json: JsonArgs) -> Result<(KvStore, Output)> {
        let mut files = Files::default();
        files.reads_store("URL", &self.url)?;
        let json = files.writes("--json", json.json)?;
        Ok((self.open()?, json))
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store ls s3://caches/eu")]
pub struct Ls {
    #[command(flatten)]
    url: UrlArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// A space: the caches of one model, profile and grid.
#[derive(Serialize)]
struct SpaceReport {
    space: String,
    about: Option<String>, // the model, its levels and the grid
    contexts: usize,       // that share no beginning
    chunks: usize,
    tokens: usize,
    bytes: u64,
    orphans: usize,
    orphan_bytes: u64,
    damaged: Vec<String>,
    #[serde(skip)]
    about_is_damaged: bool,
}

impl SpaceReport {
    fn new(store: &KvStore, space: ChunkId, listing: &Listing) -> Result<Self> {
        let chunks = &listing.chunks;
        let (about, fault) = match store.about(space) {
            Err(e) if e.is_damage() => (None, Some(e)),
            about => (about?, None),
        };
        Ok(Self {
            space: space.to_string(),
            about,
            contexts: chunks.iter().filter(|chunk| chunk.is_first()).count(),
            chunks: chunks.len(),
            tokens: chunks.iter().map(ListedChunk::tokens).sum(),
            bytes: chunks.iter().map(ListedChunk::bytes).sum(),
            orphans: listing.orphans.len(),
            orphan_bytes: listing.orphans.iter().map(|orphan| orphan.bytes).sum(),
            damaged: listing.damaged.iter().map(|(_, e)| e).chain(&fault).map(ToString::to_string).collect(),
            about_is_damaged: fault.is_some(),
        })
    }
}

const COLUMNS: [&str; 9] = [
    "space",
    "contexts",
    "chunks",
    "tokens",
    "size",
    "orphans",
    "orphan size",
    "damaged",
    "model, levels, grid",
];

/// Prints a line for each space, then the damage.
fn print(reports: &[SpaceReport], out: &mut Stdout) {
    if reports.is_empty() {
        out.print("nothing is stored there\n");
        return;
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for report in reports {
        table.add_row([
            report.space.clone(),
            report.contexts.to_string(),
            report.chunks.to_string(),
            report.tokens.to_string(),
            HumanBytes(report.bytes).to_string(),
            report.orphans.to_string(),
            HumanBytes(report.orphan_bytes).to_string(),
            report.damaged.len().to_string(),
            report.about.clone().unwrap_or_else(|| "?".into()),
        ]);
    }
    let numbers = table.column_iter_mut().skip(1).take(COLUMNS.len() - 2);
    numbers.for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    out.print(format_args!("{}\n", table));
    let damaged = reports.iter().flat_map(|report| &report.damaged);
    damaged.for_each(|e| out.print(format_args!("damaged: {e}\n")));
}

impl Ls {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let (store, json) = self.url.open_with(self.json)?;
        let mut reports = vec![];
        for space in store.spaces()? {
            let listing = store.list(space)?;
            // Directories outlive the objects of a deleted space.
            if listing.is_empty() {
                continue;
            }
            reports.push(SpaceReport::new(&store, space, &listing)?);
        }
        print(&reports, out);
        json.write_json(&reports)
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store verify s3://caches/eu --remove")]
pub struct Verify {
    #[command(flatten)]
    url: UrlArgs,
    /// Delete damaged chunks and lines, so that they can be stored again
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    json: JsonArgs,
}

impl Verify {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let (store, json) = self.url.open_with(self.json)?;
        let (mut reports, mut damaged) = (vec![], 0);
        for space in store.spaces()? {
            let mut listing = store.list(space)?;
            let bar = transfer_bar(listing.chunks.iter().map(ListedChunk::bytes).sum());
            let mut sound = vec![];
            for chunk in listing.chunks {
                match store.verify(space, &chunk) {
                    Err(e) if e.is_damage() => listing.damaged.push((chunk.id(), e)),
                    verified => {
                        verified?;
                        bar.inc(chunk.bytes());
                        sound.push(chunk);
                    }
                }
            }
            bar.finish_and_clear();
            listing.chunks = sound;
            let report = SpaceReport::new(&store, space, &listing)?;
            damaged += report.damaged.len();
            if self.remove {
                listing.damaged.iter().try_for_each(|(id, _)| store.delete(space, *id))?;
                report.about_is_damaged.then(|| store.delete_about(space)).transpose()?;
            }
            reports.push(report);
        }
        print(&reports, out);
        json.write_json(&reports)?;
        let profiles = store.damaged_profiles()?;
        for id in &profiles {
            // The caches of another profile have other names, so removing it would not repair anything.
            out.print(format_args!(
                "profile {id} is damaged: caches that were stored with it are not found\n"
            ));
        }
        if self.remove && damaged > 0 {
            out.print(format_args!("{} removed\n", count(damaged, "damaged object")));
            damaged = 0;
        }
        let left = [
            (damaged, "damaged object", "--remove deletes what is damaged"),
            (
                profiles.len(),
                "damaged profile",
                "`kv store put` with the same model and levels makes it again",
            ),
        ];
        let left = left.into_iter().filter(|(n, ..)| *n > 0);
        let left: Vec<_> = left.map(|(n, what, mend)| format!("{}: {mend}", count(n, what))).collect();
        if left.is_empty() { Ok(()) } else { Err(Error::Argument(left.join("; "))) }
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store rm s3://caches/eu --orphans 24")]
pub struct Rm {
    #[command(flatten)]
    url: UrlArgs,
    /// Spaces to delete, by the names that `kv store ls` prints
    #[arg(value_name = "SPACE", required_unless_present = "orphans")]
    spaces: Vec<ChunkId>,
    /// Delete objects that no manifest names and that are older than this, in every space: no write of a
    /// chunk may take longer
    #[arg(long, value_name = "HOURS")]
    orphans: Option<u32>,
}

impl Rm {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let store = self.url.open()?;
        let there = store.spaces()?;
        if let Some(space) = self.spaces.iter().find(|space| !there.contains(space)) {
            return Err(Error::Argument(format!("there is no space {space}")));
        }
        for &space in &self.spaces {
            store.delete_space(space)?;
            out.print(format_args!("{space} deleted\n"));
        }
        let Some(hours) = self.orphans else { return Ok(()) };
        let mut n = 0;
        for &space in there.iter().filter(|space| !self.spaces.contains(space)) {
            let age = Duration::from_secs(u64::from(hours) * 3600);
            n += store.sweep(&store.list(space)?.orphans, age)?;
        }
        n += sweep_unfinished(&self.url.url, Duration::from_secs(u64::from(hours) * 3600))?;
        out.print(format_args!("{} deleted\n", count(n, "orphan")));
        Ok(())
    }
}

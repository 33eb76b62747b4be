//! `kv store ls`, `verify` and `rm`: they need no model.

use std::time::Duration;

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::HumanBytes;
use kv_reference::{Error, Result};
use kv_store::{ChunkId, KvStore, ListedChunk, Listing, Orphan, sweep_unfinished, unfinished};
use serde::Serialize;

use super::super::output::Output;
use super::super::{Files, JsonArgs, Stdout, count, print_error};
use super::{RetryArgs, transfer_bar};

/// The store.
#[derive(Args)]
struct UrlArgs {
    /// A folder, or s3://BUCKET/PATH with the settings of the environment (AWS_ACCESS_KEY_ID and others)
    #[arg(value_name = "URL")]
    url: String,
    #[command(flatten)]
    retry: RetryArgs,
}

impl UrlArgs {
    fn open(&self) -> Result<KvStore> {
        Ok(KvStore::open_existing(&self.url, self.retry.options())?)
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
#[command(after_help = "Example:\n  kv store ls s3://caches/eu\n\n\
                  Contexts that are the beginning of another one do not count, shared chunks count once.")]
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
    contexts: usize,       // that are not the beginning of another one
    chunks: usize,         // of all contexts; those of a common beginning are stored once
    tokens: usize,         // of these chunks
    bytes: u64,
    orphans: usize, // with the files of interrupted writes
    orphan_bytes: u64,
    damaged: Vec<String>,
    unreadable: Vec<String>,
    #[serde(skip)]
    about_is_damaged: bool,
}

impl SpaceReport {
    fn new(store: &KvStore, space: ChunkId, listing: &Listing) -> Result<Self> {
        let chunks = &listing.chunks;
        let mut damaged: Vec<_> = listing.damaged.iter().map(|(_, e)| e.to_string()).collect();
        let mut unreadable: Vec<_> = listing.unreadable.iter().map(ToString::to_string).collect();
        let mut about_is_damaged = false;
        let about = match store.about(space) {
            Ok(about) => about,
            Err(e) if e.is_damage() => {
                about_is_damaged = true;
                damaged.push(e.to_string());
                None
            }
            Err(e) => {
                unreadable.push(store.isolate(e)?.to_string());
                None
            }
        };
        Ok(Self {
            space: space.to_string(),
            about,
            contexts: listing.contexts(),
            chunks: chunks.len(),
            tokens: chunks.iter().map(ListedChunk::tokens).sum(),
            bytes: chunks.iter().map(ListedChunk::bytes).sum(),
            orphans: listing.orphans.len(),
            orphan_bytes: listing.orphans.iter().map(|orphan| orphan.bytes).sum(),
            damaged,
            unreadable,
            about_is_damaged,
        })
    }

    /// Lines about its damage and about what could not be read.
    fn faults(&self) -> impl Iterator<Item = String> {
        let damaged = self.damaged.iter().map(|e| format!("damaged: {e}\n"));
        damaged.chain(self.unreadable.iter().map(|e| format!("unreadable: {e}\n")))
    }
}

/// Takes the files of a space from the unfinished files of a store.
fn take_files(unfinished: &mut Vec<Orphan>, space: ChunkId) -> Vec<Orphan> {
    let folder = format!("{space}/");
    unfinished.extract_if(.., |file| file.path().starts_with(&folder)).collect()
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

/// Prints a line for each space.
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
    out.print(format_args!("{}\n", table.trim_fmt()));
}

impl Ls {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let (store, json) = self.url.open_with(self.json)?;
        let (mut reports, mut unfinished) = (vec![], unfinished(&self.url.url)?);
        for space in store.spaces()? {
            let mut listing = store.list(space)?;
            listing.orphans.extend(take_files(&mut unfinished, space));
            // Directories outlive the objects of a deleted space.
            if listing.is_empty() {
                continue;
            }
            reports.push(SpaceReport::new(&store, space, &listing)?);
        }
        print(&reports, out);
        let faults = reports.iter().flat_map(SpaceReport::faults);
        faults.for_each(|line| print_error(format_args!("kv: {line}")));
        if !unfinished.is_empty() {
            let files = count(unfinished.len(), "file");
            print_error(format_args!(
                "kv: {files} of interrupted writes of profiles: see `kv store verify`\n"
            ));
        }
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
        let mut unfinished = unfinished(&self.url.url)?;
        let (mut reports, mut listings) = (vec![], vec![]);
        for space in store.spaces()? {
            let mut listing = verified(&store, space)?;
            listing.orphans.extend(take_files(&mut unfinished, space));
            reports.push(SpaceReport::new(&store, space, &listing)?);
            listings.push((space, listing));
        }
        print(&reports, out);
        reports.iter().flat_map(SpaceReport::faults).for_each(|line| out.print(line));
        json.write_json(&reports)?;
        let mut unreadable: usize = reports.iter().map(|report| report.unreadable.len()).sum();
        let mut profiles = 0;
        for e in faulty_profiles(&store)? {
            let (what, n) = match e.is_damage() {
                // The caches of another profile have other names, so removing it would not repair anything.
                true => ("damaged profile, whose caches are not found", &mut profiles),
                false => ("unreadable", &mut unreadable),
            };
            out.print(format_args!("{what}: {e}\n"));
            *n += 1;
        }
        let orphans = listings.iter().flat_map(|(_, listing)| &listing.orphans).chain(&unfinished);
        let orphans = orphans.map(|orphan| {
            out.print(format_args!("orphan: {} ({})\n", orphan.path(), HumanBytes(orphan.bytes)));
        });
        if orphans.count() > 0 {
            out.print(
                "orphans are of writers that have died or are at work: `kv store rm URL --orphans HOURS` \
                 deletes older ones\n",
            );
        }
        let mut damaged: usize = reports.iter().map(|report| report.damaged.len()).sum();
        if damaged + profiles + unreadable == 0 && !reports.is_empty() {
            let chunks = count(reports.iter().map(|report| report.chunks).sum(), "chunk");
            let bytes = HumanBytes(reports.iter().map(|report| report.bytes).sum());
            out.print(format_args!("verified {chunks}, {bytes}, no damage\n"));
        }
        if self.remove && damaged > 0 {
            for ((space, listing), report) in listings.iter().zip(&reports) {
                listing.damaged.iter().try_for_each(|(id, _)| store.delete(*space, *id))?;
                report.about_is_damaged.then(|| store.delete_about(*space)).transpose()?;
            }
            out.print(format_args!("{} removed\n", count(damaged, "damaged object")));
            damaged = 0;
        }
        let left = [
            (damaged, "damaged object", ": --remove deletes what is damaged"),
            (profiles, "damaged profile", ": `kv store put` with the same model and levels makes it again"),
            (unreadable, "unreadable object", ""),
        ];
        let left = left.into_iter().filter(|(n, ..)| *n > 0);
        let left: Vec<_> = left.map(|(n, what, mend)| format!("{}{mend}", count(n, what))).collect();
        if left.is_empty() { Ok(()) } else { Err(Error::Argument(left.join("; "))) }
    }
}

/// The contents of a space whose frames match their digests.
fn verified(store: &KvStore, space: ChunkId) -> Result<Listing> {
    let mut listing = store.list(space)?;
    let bar = transfer_bar(listing.chunks.iter().map(ListedChunk::bytes).sum());
    for chunk in std::mem::take(&mut listing.chunks) {
        match store.verify(space, &chunk) {
            Ok(()) => {
                bar.inc(chunk.bytes());
                listing.chunks.push(chunk);
            }
            Err(e) if e.is_damage() => listing.damaged.push((chunk.id(), e)),
            Err(e) => listing.unreadable.push(store.isolate(e)?),
        }
    }
    bar.finish_and_clear();
    Ok(listing)
}

/// What is wrong with the profiles.
fn faulty_profiles(store: &KvStore) -> Result<Vec<kv_store::Error>> {
    match store.faulty_profiles() {
        Ok(faulty) => Ok(faulty.into_iter().map(|(_, e)| e).collect()),
        Err(e) => Ok(vec![store.isolate(e)?]),
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
        let (url, mut unfinished) = (&self.url.url, unfinished(&self.url.url)?);
        for &space in &self.spaces {
            store.delete_space(space)?;
            sweep_unfinished(url, &take_files(&mut unfinished, space), Duration::ZERO)?;
            out.print(format_args!("{space} deleted\n"));
        }
        let Some(hours) = self.orphans else { return Ok(()) };
        let age = Duration::from_secs(u64::from(hours) * 3600);
        let (mut n, mut unreadable) = (0, 0);
        for &space in there.iter().filter(|space| !self.spaces.contains(space)) {
            let listing = store.list(space)?;
            n += store.sweep(&listing.orphans, age)?;
            listing.unreadable.iter().for_each(|e| print_error(format_args!("kv: unreadable: {e}\n")));
            unreadable += listing.unreadable.len();
        }
        n += sweep_unfinished(url, &unfinished, age)?;
        out.print(format_args!("{} deleted\n", count(n, "orphan")));
        match unreadable {
            0 => Ok(()),
            n => Err(Error::Argument(format!("{}: orphans there may remain", count(n, "unreadable object")))),
        }
    }
}

//! Renders a comparison as a terminal table and as an HTML page with charts.

pub mod labels;

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use kv_llama::FetchedPerStep;
use kv_methods::Place;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;

use crate::compare::{Comparison, Row};
use crate::{Error, Result};
use labels::{DOT, LABEL_HEIGHT, Labels};

const COLUMNS: [&str; 10] = [
    "method",
    "setting",
    "bits/value",
    "bytes/token",
    "ratio",
    "perplexity",
    "KL",
    "top-1",
    "needle",
    "ms/token",
];

fn cells(row: &Row) -> [String; 10] {
    let trials = row.needle_trials;
    let needle = row.needle.map(|part| format!("{}/{trials}", (part * trials as f64).round()));
    [
        row.name.clone(),
        row.setting.replace(':', " "),
        format!("{:.2}", row.bits_per_value),
        format!("{:.0}", row.kv_bytes_per_token),
        format!("{:.2}", row.ratio),
        format!("{:.3}", row.perplexity),
        format!("{:.5}", row.kl),
        format!("{:.1} %", 100.0 * row.top1),
        needle.unwrap_or_default(),
        format!("{:.2}", row.ms_per_token),
    ]
}

/// Explanations under the table.
fn notes(comparison: &Comparison) -> Vec<String> {
    let mut notes = vec![
        format!(
            "{} over {}: {} tokens of prompt, {} decoded, {} calibrated on; seed {}.",
            comparison.model,
            comparison.text,
            comparison.context,
            comparison.decode,
            comparison.calibration,
            comparison.seed
        ),
        "Bits and bytes are all that a sequence keeps: codes, scales, codebooks trained for it, exact sinks and \
         window. Ratio is to 16 bits. KL (nats) and top-1 are relative to the dense 32-bit cache."
            .into(),
    ];
    let on_gpu = comparison.methods.iter().filter(|row| row.device == Place::Cuda);
    let on_gpu: Vec<String> = on_gpu.map(Row::title).collect();
    if !on_gpu.is_empty() {
        notes.push(format!(
            "On the GPU, relative to the dense cache with the same 16 bits there: {}.",
            on_gpu.join(", ")
        ));
    }
    for row in &comparison.methods {
        let mut further = vec![];
        if row.offloaded_bytes_per_token > 0.0 {
            further.push(format!("{:.0} bytes/token offloaded", row.offloaded_bytes_per_token));
        }
        let FetchedPerStep { rows, hit_rate, bytes, loaded_bytes, scored_bytes } = row.fetched;
        if rows > 0.0 {
            let (percent, kib) = (100.0 * hit_rate, bytes / 1024.0);
            further.push(format!("{rows:.1} rows read per step and head, {kib:.0} KiB"));
            if scored_bytes > 0.0 {
                further.push(format!("{:.0} KiB read to score tokens", scored_bytes / 1024.0));
            }
            if hit_rate > 0.0 {
                let loaded = loaded_bytes / 1024.0;
                further.push(format!(
                    "{percent:.0} % of the rows in the block cache, {loaded:.0} KiB of blocks loaded"
                ));
            }
        }
        if row.working_bytes_per_token > 0.0 {
            further.push(format!("{:.0} bytes/token of copies in memory", row.working_bytes_per_token));
        }
        if row.shared_bytes > 0 {
            let mib = row.shared_bytes as f64 / f64::from(1 << 20);
            further.push(format!("{mib:.1} MiB for all sequences of the model"));
        }
        if !further.is_empty() {
            notes.push(format!("{} also has: {}.", row.title(), further.join(", ")));
        }
    }
    notes
}

/// The table with its notes, for the terminal.
#[must_use]
pub fn table(comparison: &Comparison) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for row in &comparison.methods {
        table.add_row(cells(row));
    }
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{}\n\n{}\n", table.trim_fmt(), notes(comparison).join("\n"))
}

/// One self-contained HTML page: the table and two charts.
///
/// # Errors
/// [`Error::Argument`] when a chart cannot be drawn.
pub fn html(comparison: &Comparison) -> Result<String> {
    let charts =
        draw(quality_against_bytes, comparison).and_then(|a| Ok((a, draw(error_by_position, comparison)?)));
    let (quality, position) = charts.map_err(|e| Error::Argument(format!("report: {e}")))?;
    let mut rows = String::new();
    for row in &comparison.methods {
        let cells = cells(row).map(|cell| format!("<td>{}</td>", escape(&cell))).concat();
        let _ = writeln!(rows, "<tr>{cells}</tr>"); // writing to a String cannot fail
    }
    let header = COLUMNS.map(|column| format!("<th>{column}</th>")).concat();
    let notes: String = notes(comparison).iter().map(|note| format!("<p>{}</p>\n", escape(note))).collect();
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>KV caches compared</title>\n<style>{STYLE}</style>\n\
         <h1>What each KV cache saves, and what it costs</h1>\n\
         <div><table><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table></div>\n\
         {notes}<h2>Quality against bytes</h2>\n{quality}\n<h2>Error by position</h2>\n{position}\n</html>\n"
    ))
}

type Drawn<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const STYLE: &str = "\
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222}\
table{border-collapse:collapse;font-variant-numeric:tabular-nums}\
th,td{padding:.2em .7em;text-align:right;white-space:nowrap}\
th{border-bottom:2px solid #222}td{border-bottom:1px solid #ddd}\
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}\
p{margin:.4em 0;color:#555;font-size:14px}svg{max-width:100%;height:auto}div{overflow-x:auto}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

const SIZE: (u32, u32) = (1100, 600);

/// Draws the legend of the labelled series.
fn legend<'a, X: Ranged<ValueType = f64>, Y: Ranged<ValueType = f64>>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    position: SeriesLabelPosition,
) -> Drawn<()> {
    let mut labels = chart.configure_series_labels();
    Ok(labels.position(position).background_style(WHITE).label_font(("sans-serif", 12)).draw()?)
}

fn draw(chart: fn(&Comparison, SVGBackend<'_>) -> Drawn<()>, comparison: &Comparison) -> Drawn<String> {
    let mut svg = String::new();
    chart(comparison, SVGBackend::with_string(&mut svg, SIZE))?;
    Ok(svg)
}

/// Minimum divergence drawn, since the axis is logarithmic.
const LEAST_KL: f64 = 1e-7;

fn kl_range(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, LEAST_KL), |(a, b), x| (a.min(x.max(LEAST_KL)), b.max(x)));
    (low.min(high) / 2.0)..(high * 2.0)
}

/// Distinguishable colours on white.
const COLOURS: [RGBColor; 13] = [
    RGBColor(60, 60, 60),
    RGBColor(31, 119, 180),
    RGBColor(23, 150, 170),
    RGBColor(44, 130, 44),
    RGBColor(214, 120, 10),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 60, 160),
    RGBColor(200, 30, 40),
    RGBColor(120, 120, 10),
    RGBColor(90, 170, 90),
    RGBColor(70, 70, 200),
    RGBColor(230, 170, 20),
];

/// Each row's stroke: one colour per method, in order of first appearance; thinner lines for its other
/// settings.
fn strokes(comparison: &Comparison) -> Vec<ShapeStyle> {
    let mut seen: Vec<&str> = vec![];
    let mut strokes = vec![];
    for row in &comparison.methods {
        let known = seen.iter().position(|name| *name == row.name);
        let colour = COLOURS[known.unwrap_or(seen.len()) % COLOURS.len()];
        strokes.push(colour.stroke_width(if known.is_none() { 3 } else { 1 }));
        if known.is_none() {
            seen.push(&row.name);
        }
    }
    strokes
}

fn quality_against_bytes(comparison: &Comparison, backend: SVGBackend<'_>) -> Drawn<()> {
    let rows = &comparison.methods;
    let bits = rows.iter().map(|row| row.bits_per_value);
    let (low, high) = bits.fold((16.0_f64, 16.0_f64), |(a, b), x| (a.min(x), b.max(x)));
    let root = backend.into_drawing_area();
    root.fill(&WHITE)?;
    let kl = kl_range(rows.iter().map(|row| row.kl));
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(((low / 1.3)..(high * 2.2)).log_scale(), kl.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("bits kept per value (log)")
        .y_desc("KL to dense, nats (log)")
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .x_label_formatter(&|x| format!("{x:.3}").trim_end_matches('0').trim_end_matches('.').to_owned())
        .draw()?;
    let points: Vec<_> = rows.iter().map(|row| (row.bits_per_value, row.kl.max(LEAST_KL))).collect();
    let area = chart.plotting_area();
    let names = labels(rows);
    let mut labels = Labels::new(points.iter().map(|at| area.map_coordinate(at)));
    for ((at, label), stroke) in points.into_iter().zip(names).zip(strokes(comparison)) {
        let offset = labels.place(chart.plotting_area().map_coordinate(&at), label.len() as i32);
        let font = ("sans-serif", LABEL_HEIGHT).into_font().color(&stroke.color);
        let point =
            EmptyElement::at(at) + Circle::new((0, 0), DOT, stroke.filled()) + Text::new(label, offset, font);
        chart.draw_series([point])?;
    }
    Ok(root.present()?)
}

/// Short titles for charts: the name and first two settings of every row, and the further settings that
/// distinguish it from rows with the same beginning.
fn labels(rows: &[Row]) -> Vec<String> {
    let parts = |row: &Row| row.setting.split(':').map(str::to_owned).collect::<Vec<_>>();
    let head = |parts: &[String]| parts[..parts.len().min(2)].to_vec();
    let label = |row: &Row| {
        let own = parts(row);
        let mut shown = head(&own);
        let others = rows.iter().filter(|other| other.name == row.name).map(parts);
        let mut alike: Vec<_> = others.filter(|other| *other != own && head(other) == shown).collect();
        for part in own.iter().skip(2) {
            let before = alike.len();
            alike.retain(|other| other.contains(part));
            if alike.len() < before {
                shown.push(part.clone());
            }
        }
        format!("{} {}", row.name, shown.join(" "))
    };
    rows.iter().map(label).collect()
}

fn error_by_position(comparison: &Comparison, backend: SVGBackend<'_>) -> Drawn<()> {
    let smooth = |values: &[f64]| -> Vec<(f64, f64)> {
        let bucket = (values.len() / 16).max(1);
        let mean = |chunk: &[f64]| (chunk.iter().sum::<f64>() / chunk.len() as f64).max(LEAST_KL);
        values
            .chunks(bucket)
            .enumerate()
            .map(|(i, chunk)| (((i * bucket) + chunk.len() / 2) as f64, mean(chunk)))
            .collect()
    };
    let lines: Vec<_> = comparison.methods.iter().map(|row| smooth(&row.kl_by_position)).collect();
    let root = backend.into_drawing_area();
    root.fill(&WHITE)?;
    let kl = kl_range(lines.iter().flatten().map(|point| point.1));
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..(comparison.decode as f64 * 1.35), kl.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("tokens decoded after the prompt")
        .y_desc("KL to dense, nats (log)")
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    let names = labels(&comparison.methods);
    for ((name, line), stroke) in names.into_iter().zip(lines).zip(strokes(comparison)) {
        chart
            .draw_series(LineSeries::new(line, stroke))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], stroke));
    }
    legend(&mut chart, SeriesLabelPosition::UpperRight)?;
    Ok(root.present()?)
}

//! A stream as a table for the terminal, and as one HTML page with a chart.

use comfy_table::{Table, presets};
use plotters::prelude::*;

use super::link::GBPS;
use super::{Event, Outcome, Trace};
use crate::report::{COLOURS, Drawn, SIZE, STYLE, escape, legend};
use crate::{Error, Result};

const COLUMNS: [&str; 10] = [
    "request",
    "chunk",
    "tokens",
    "encoding",
    "why",
    "Gbit/s",
    "asked at",
    "arrived",
    "in the cache",
    "outcome",
];

fn cells(event: &Event) -> [String; 10] {
    let ms = |seconds: f64| format!("{:.1} ms", 1000.0 * seconds);
    [
        event.request.to_string(),
        event.chunk.to_string(),
        event.tokens.to_string(),
        event.encoding.clone(),
        event.reason.to_owned(),
        event.throughput.map_or_else(String::new, |rate| format!("{:.2}", rate / GBPS)),
        ms(event.requested),
        ms(event.arrived),
        event.computed_at.map_or_else(String::new, ms),
        match &event.outcome {
            Outcome::Loaded => "loaded".into(),
            Outcome::Recomputed => "recomputed".into(),
            Outcome::Abandoned => "abandoned".into(),
            Outcome::Failed(what) => format!("failed: {what}"),
            Outcome::Damaged(what) => format!("recomputed: {what}"),
        },
    ]
}

/// Label of the x axis, which also explains the bars.
const X_AXIS: &str =
    "seconds since the request: a chunk's upper bar is its transfer, the lower one decoding or recomputation";

/// The decisions as a table for the terminal.
#[must_use]
pub fn table(trace: &Trace) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(COLUMNS);
    for event in &trace.events {
        table.add_row(cells(event));
    }
    table.trim_fmt()
}

/// One self-contained HTML page: a chart of transfers, decoding and recomputation over time, and the table of
/// decisions. `notes` are lines above the chart.
///
/// # Errors
/// [`Error::Argument`] when the chart cannot be drawn.
pub fn html(trace: &Trace, slo: f64, notes: &[String]) -> Result<String> {
    let mut svg = String::new();
    let chart = draw(trace, slo, SVGBackend::with_string(&mut svg, SIZE));
    chart.map_err(|e| Error::Argument(format!("report: {e}")))?;
    let row = |event| {
        format!("<tr>{}</tr>\n", cells(event).map(|cell| format!("<td>{}</td>", escape(&cell))).concat())
    };
    let rows: String = trace.events.iter().map(row).collect();
    let notes: String = notes.iter().map(|note| format!("<p>{}</p>\n", escape(note))).collect();
    let header = COLUMNS.map(|column| format!("<th>{column}</th>")).concat();
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>A context streamed</title>\n<style>{STYLE}</style>\n\
         <h1>A context streamed into a cache</h1>\n{notes}{svg}\n\
         <div><table><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table></div>\n</html>\n"
    ))
}

/// A colour for every encoding: text is grey, levels have one each; abandoned and failed transfers are pale.
fn colour(event: &Event) -> RGBAColor {
    let level = event.encoding.strip_prefix("level ").and_then(|level| level.parse::<usize>().ok());
    let colour = level.map_or(COLOURS[0], |level| COLOURS[1 + level % (COLOURS.len() - 1)]);
    let lost = matches!(event.outcome, Outcome::Abandoned | Outcome::Failed(_));
    colour.mix(if lost { 0.3 } else { 1.0 })
}

/// Bars of the link and of the receiver over time, a lane for each, and the objective.
fn draw(trace: &Trace, slo: f64, backend: SVGBackend<'_>) -> Drawn<()> {
    let root = backend.into_drawing_area();
    root.fill(&WHITE)?;
    let ends = trace.events.iter().map(|event| event.computed_at.unwrap_or(event.arrived));
    let end = ends.fold(slo.max(1e-6), f64::max);
    let chunks = trace.events.iter().map(|event| event.chunk + 1).max().unwrap_or(1) as f64;
    let mut chart = ChartBuilder::on(&root)
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(0.0..end * 1.05, 0.0..chunks)?;
    chart.configure_mesh().light_line_style(WHITE).x_desc(X_AXIS).y_desc("chunk").draw()?;
    let lane = |event: &Event, lane: f64| event.chunk as f64 + lane;
    let bar = |from: f64, to: f64, bottom: f64, style: ShapeStyle| {
        Rectangle::new([(from, bottom), (to, bottom + 0.38)], style)
    };
    let transfers = trace.events.iter().filter(|event| event.arrived > event.requested);
    chart.draw_series(
        transfers.map(|event| bar(event.requested, event.arrived, lane(event, 0.5), colour(event).filled())),
    )?;
    chart.draw_series(trace.events.iter().filter_map(|event| {
        let (from, to) = (event.computing_from?, event.computed_at?);
        Some(bar(from, to, lane(event, 0.1), colour(event).filled()))
    }))?;
    if slo > 0.0 {
        chart
            .draw_series(LineSeries::new([(slo, 0.0), (slo, chunks)], RED.stroke_width(2)))?
            .label("objective")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], RED.stroke_width(2)));
    }
    let mut encodings: Vec<&Event> = vec![];
    for event in &trace.events {
        if encodings.iter().all(|known| known.encoding != event.encoding) {
            encodings.push(event);
        }
    }
    encodings.sort_by(|a, b| a.encoding.cmp(&b.encoding));
    for event in encodings {
        let colour = colour(&Event { outcome: Outcome::Loaded, ..event.clone() });
        chart
            .draw_series(LineSeries::new([], colour.stroke_width(6)))?
            .label(event.encoding.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(6)));
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)?;
    Ok(root.present()?)
}

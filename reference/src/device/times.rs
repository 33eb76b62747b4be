//! Times of decode steps and prompts, as a table for the terminal and as one HTML page with a chart.

use comfy_table::{Table, presets};
use plotters::prelude::*;
use serde::Serialize;

use crate::report::{COLOURS, Drawn, SIZE, STYLE, escape, legend};
use crate::{Error, Result};

/// One method at one context and batch. Times in milliseconds, on the device's clock.
#[derive(Clone, Debug, Serialize)]
pub struct StepTimes {
    /// The method's spec.
    pub method: String,
    /// Tokens that a step attends to.
    pub context: usize,
    /// Sequences.
    pub batch: usize,
    /// Capacity of the cache's rows in tokens.
    pub capacity: usize,
    /// Median of a step.
    pub step_ms: f32,
    /// Mean of a step, including work between steps, such as encoding.
    pub mean_ms: f32,
    /// Throughput of the whole batch.
    pub tokens_per_second: f32,
    /// Bytes of weights that a step reads.
    pub weight_bytes: usize,
    /// Bytes of the cache that a step reads.
    pub cache_bytes: usize,
    /// Bytes of the whole cache on the device.
    pub device_bytes: usize,
    /// Bytes of the cache in host memory.
    pub host_bytes: usize,
    /// Exact rows (a token's key and value) that a step reads for one head, on average, if steps decide how
    /// many.
    pub chosen_rows: Option<f64>,
    /// Rows (a token's key and value of one head) that a step reads from the host, on average.
    pub fetched_rows: f64,
    /// Bytes of these rows.
    pub fetched_bytes: f64,
    /// Time in which the device copies the bytes of a step.
    pub floor_ms: f64,
    /// Products with weights alone, with norms, RoPE, SwiGLU and residual sums.
    pub products_ms: f32,
    /// Attention alone.
    pub attention_ms: f32,
    /// Embedding and the choice of tokens alone.
    pub rest_ms: f32,
    /// Times to the first and the second tokens on the host, for a batch of prompts as long as the context.
    pub prompt: Option<PromptTimes>,
}

/// Times of the prompts of a batch, in milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct PromptTimes {
    /// Tokens per chunk.
    pub chunk: usize,
    /// Time until all first tokens are on the host.
    pub first_token_ms: f64,
    /// Time until all second tokens are on the host.
    pub second_token_ms: f64,
}

/// The times of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Times {
    /// The model's name.
    pub model: String,
    /// Copy rate of the device, reads and writes both counted.
    pub copy_bytes_per_second: f64,
    /// One for each method, context and batch.
    pub rows: Vec<StepTimes>,
}

const COLUMNS: [&str; 18] = [
    "method",
    "context",
    "batch",
    "ms/step",
    "mean",
    "tokens/s",
    "GB read",
    "floor, ms",
    "over floor",
    "GB device",
    "GB host",
    "rows a head",
    "rows fetched",
    "products",
    "attention",
    "rest",
    "first token, ms",
    "second",
];

fn cells(row: &StepTimes) -> [String; 18] {
    [
        row.method.replace(':', " "),
        row.context.to_string(),
        row.batch.to_string(),
        format!("{:.3}", row.step_ms),
        format!("{:.3}", row.mean_ms),
        format!("{:.0}", row.tokens_per_second),
        format!("{:.2}", (row.weight_bytes + row.cache_bytes) as f64 / 1e9),
        format!("{:.3}", row.floor_ms),
        format!("{:.2}", f64::from(row.step_ms) / row.floor_ms),
        format!("{:.2}", row.device_bytes as f64 / 1e9),
        format!("{:.2}", row.host_bytes as f64 / 1e9),
        row.chosen_rows.map_or("-".into(), |rows| format!("{rows:.1}")),
        format!("{:.0}", row.fetched_rows),
        format!("{:.3}", row.products_ms),
        format!("{:.3}", row.attention_ms),
        format!("{:.3}", row.rest_ms),
        row.prompt.as_ref().map_or("-".into(), |prompt| format!("{:.1}", prompt.first_token_ms)),
        row.prompt.as_ref().map_or("-".into(), |prompt| format!("{:.1}", prompt.second_token_ms)),
    ]
}

impl Times {
    /// The table, for the terminal.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header(COLUMNS);
        self.rows.iter().for_each(|row| {
            table.add_row(cells(row));
        });
        table.trim_fmt()
    }

    /// One self-contained HTML page: a chart of the parts of steps, and the table.
    ///
    /// # Errors
    /// [`Error::Argument`] when the chart cannot be drawn.
    pub fn html(&self) -> Result<String> {
        let mut svg = String::new();
        let height = (SIZE.1 / 10 * self.rows.len() as u32 + 120).min(8 * SIZE.1);
        let chart = self.draw(SVGBackend::with_string(&mut svg, (SIZE.0, height)));
        chart.map_err(|e| Error::Argument(format!("report: {e}")))?;
        let row = |row| {
            format!("<tr>{}</tr>\n", cells(row).map(|cell| format!("<td>{}</td>", escape(&cell))).concat())
        };
        let rows: String = self.rows.iter().map(row).collect();
        let header = COLUMNS.map(|column| format!("<th>{column}</th>")).concat();
        let (model, copy) = (escape(&self.model), self.copy_bytes_per_second / 1e12);
        Ok(format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">\
             <title>Decode steps</title>\n<style>{STYLE}</style>\n\
             <h1>Decode steps of {model}</h1>\n\
             <p>Milliseconds of a step of the whole batch. Parts are timed alone, without their overlap. The black \
             mark is the step itself; the red one is its floor, the time in which the device copies, at {copy:.2} \
             TB/s, the bytes that the step reads.</p>\n{svg}\n\
             <div><table><thead><tr>{header}</tr></thead><tbody>\n{rows}</tbody></table></div>\n</html>\n"
        ))
    }

    /// A bar for every row, made of its parts, with the step and its floor.
    fn draw(&self, backend: SVGBackend<'_>) -> Drawn<()> {
        let root = backend.into_drawing_area();
        root.fill(&WHITE)?;
        let parts = |row: &StepTimes| [row.products_ms, row.attention_ms, row.rest_ms].map(f64::from);
        let ends =
            self.rows.iter().map(|row| f64::from(row.step_ms).max(parts(row).iter().sum()).max(row.floor_ms));
        let (end, n) = (ends.fold(1e-3, f64::max), self.rows.len().max(1));
        let mut chart = ChartBuilder::on(&root)
            .margin(12)
            .x_label_area_size(44)
            .build_cartesian_2d(0.0..end * 1.3, 0.0..n as f64 + 0.8)?;
        let mut mesh = chart.configure_mesh();
        mesh.light_line_style(WHITE).disable_y_axis().disable_y_mesh().x_desc("milliseconds").draw()?;
        let colours = [COLOURS[1], COLOURS[4], COLOURS[0]];
        for (i, row) in self.rows.iter().enumerate() {
            let bottom = (n - 1 - i) as f64 + 0.1;
            let mut from = 0.0;
            for (part, colour) in parts(row).into_iter().zip(colours) {
                let bar = Rectangle::new([(from, bottom), (from + part, bottom + 0.45)], colour.filled());
                chart.draw_series([bar])?;
                from += part;
            }
            for (at, stroke) in
                [(f64::from(row.step_ms), BLACK.stroke_width(3)), (row.floor_ms, RED.stroke_width(1))]
            {
                chart.draw_series(LineSeries::new([(at, bottom - 0.05), (at, bottom + 0.5)], stroke))?;
            }
            let label = format!("{}, {} x {}", row.method.replace(':', " "), row.context, row.batch);
            chart.draw_series([Text::new(label, (0.0, bottom + 0.75), ("sans-serif", 13))])?;
        }
        for (name, colour) in ["products", "attention", "rest"].into_iter().zip(colours) {
            chart
                .draw_series(LineSeries::new([], colour.stroke_width(6)))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(6)));
        }
        legend(&mut chart, SeriesLabelPosition::UpperRight)?;
        Ok(root.present()?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_page_has_every_row_and_escapes_names() {
        let row = |method: &str, step_ms: f32| StepTimes {
            method: method.into(),
            context: 8192,
            batch: 2,
            capacity: 8256,
            step_ms,
            mean_ms: step_ms,
            tokens_per_second: 2000.0 / step_ms,
            weight_bytes: 16 << 30,
            cache_bytes: 1 << 30,
            device_bytes: 1 << 30,
            host_bytes: 0,
            chosen_rows: None,
            fetched_rows: 0.0,
            fetched_bytes: 0.0,
            floor_ms: 4.1,
            products_ms: 3.4,
            attention_ms: 0.5,
            rest_ms: 0.02,
            prompt: Some(PromptTimes { chunk: 8192, first_token_ms: 213.0, second_token_ms: 217.0 }),
        };
        let mut times =
            Times { model: "<model>".into(), copy_bytes_per_second: 4.2e12, rows: vec![row("dense", 4.2)] };
        times.rows.push(row("million:k=64x8", f32::NAN));
        let page = times.html().unwrap();
        assert_eq!((page.matches("<tr>").count(), page.matches("<svg").count()), (3, 1));
        assert!(page.contains("&lt;model&gt;") && page.contains("million k=64x8, 8192 x 2"), "{page}");
        assert!(times.table().contains("217.0"));
        times.rows.clear();
        assert!(times.html().is_ok(), "nothing was timed");
    }
}

//! Memory and queues over time, as SVG: what a table cannot show is when the models are busy.

use std::time::Duration;

use plotters::backend::SVGBackend;
use plotters::prelude::*;

use crate::{Comparison, Outcome};

const SIZE: (u32, u32) = (1200, 800);
/// One for each model, in turn.
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(255, 127, 14),
    RGBColor(44, 160, 44),
    RGBColor(214, 39, 40),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(23, 190, 207),
];

/// Draws both sides: above, each model's mapped memory beside its static share; below, how many
/// requests waited.
#[must_use]
pub fn plot(comparison: &Comparison) -> String {
    let mut svg = String::new();
    // A string does not fail; the library's error type is for files and screens.
    let drawn = draw(comparison, SVGBackend::with_string(&mut svg, SIZE));
    drawn.expect("drawing into a string does not fail");
    svg
}

type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn draw<'a>(comparison: &Comparison, backend: SVGBackend<'a>) -> Drawn<'a> {
    let root = backend.into_drawing_area();
    root.fill(&WHITE)?;
    let (above, below) = root.split_vertically(SIZE.1 * 3 / 5);
    let Comparison {
        elastic,
        fixed,
        share_bytes,
        faults,
        ..
    } = comparison;
    let end = minutes(elastic.end.max(fixed.end)).max(1e-3);

    let peak = elastic
        .series
        .points()
        .flat_map(|(_, models)| models)
        .map(|m| m.mapped_bytes);
    let top = gib(peak.max().unwrap_or(0).max(*share_bytes)) * 1.05;
    let mut memory = ChartBuilder::on(&above)
        .margin(12)
        .caption("KV memory mapped per rank, by model", ("sans-serif", 18))
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end, 0.0..top)?;
    memory
        .configure_mesh()
        .y_desc("GiB")
        .x_desc("minutes")
        .light_line_style(WHITE)
        .draw()?;
    for (index, model) in elastic.models.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let points = elastic
            .series
            .points()
            .map(|(at, models)| (minutes(at), gib(models[index].mapped_bytes)));
        memory
            .draw_series(LineSeries::new(points, colour))?
            .label(model.label.as_str())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
    }
    if let Some(faults) = faults {
        let colour = BLACK.mix(0.25);
        let marks = faults.at.iter().map(|at| minutes(*at));
        memory
            .draw_series(marks.map(|x| PathElement::new([(x, 0.0), (x, top)], colour)))?
            .label("a rank killed or stalled")
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
    }
    let share = gib(*share_bytes);
    memory
        .draw_series(LineSeries::new(
            [(0.0, share), (end, share)],
            BLACK.stroke_width(2),
        ))?
        .label("static share of each")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK.stroke_width(2)));
    memory
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;

    let longest = waiting(elastic)
        .chain(waiting(fixed))
        .map(|(_, count)| count);
    let mut queues = ChartBuilder::on(&below)
        .margin(12)
        .caption("Requests waiting, all models", ("sans-serif", 18))
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..end, 0.0..longest.fold(1.0, f64::max) * 1.05)?;
    queues
        .configure_mesh()
        .y_desc("requests")
        .x_desc("minutes")
        .light_line_style(WHITE)
        .draw()?;
    for (outcome, name, colour) in [(fixed, "static", BLACK), (elastic, "elastic", COLOURS[2])] {
        queues
            .draw_series(LineSeries::new(waiting(outcome), colour))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour));
    }
    queues
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()
}

/// How many requests waited in all, over time.
fn waiting(outcome: &Outcome) -> impl Iterator<Item = (f64, f64)> {
    outcome.series.points().map(|(at, models)| {
        let count: u32 = models.iter().map(|model| model.waiting).sum();
        (minutes(at), f64::from(count))
    })
}

fn minutes(time: Duration) -> f64 {
    time.as_secs_f64() / 60.0
}

#[expect(clippy::cast_precision_loss, reason = "a pixel is far coarser")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

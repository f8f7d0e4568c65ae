//! Charts as SVG, each in two widths, with text of the same size in both.

use super::axis::{Axis, log};
use super::data::{Common, KINDS, Series, Share, kind_number, measured};
use super::words::{milliseconds, number, percent, plain, width, wrap};
use crate::results::{Clock, Run};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

// These colours are put in the scheme's place by chart.css.
const SURFACE: RGBColor = RGBColor(0xff, 0xff, 0xff);
const INK: RGBColor = RGBColor(0x1b, 0x1f, 0x24);
const MUTED: RGBColor = RGBColor(0x57, 0x60, 0x6a);
const GRID: RGBColor = RGBColor(0xe1, 0xe4, 0xe8);
/// Eight that people with any colour vision can tell apart, after Okabe and Ito, darkened for a white page.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x87, 0x5f),
    RGBColor(0xb4, 0x50, 0x8f),
    RGBColor(0x9a, 0x6b, 0x00),
    RGBColor(0x3f, 0x94, 0xcc),
    RGBColor(0x2f, 0x34, 0x39),
    RGBColor(0x85, 0x8b, 0x93),
];

/// Cases that a chart of bars shows at most.
pub(super) const MOST_BARS: usize = 40;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;
type Pixel = (i32, i32);

/// A chart in both widths.
#[derive(Clone, Debug)]
pub(super) struct Picture {
    /// Of its file, without the extension.
    pub(super) name: String,
    /// What it shows, in a sentence, for those who do not see it.
    pub(super) description: String,
    pub(super) wide: Svg,
    pub(super) narrow: Svg,
}

/// What is inside an `<svg>`.
#[derive(Clone, Debug)]
pub(super) struct Svg {
    pub(super) width: i32,
    pub(super) height: i32,
    pub(super) inner: String,
}

/// How wide a chart is, and how large its text.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Size {
    width: i32,
    font: i32,
    /// Of the part inside the axes.
    height: i32,
}

const WIDE: Size = Size {
    width: 900,
    font: 13,
    height: 360,
};
const NARROW: Size = Size {
    width: 330,
    font: 12,
    height: 270,
};

impl Size {
    fn is_narrow(self) -> bool {
        self == NARROW
    }

    fn line(self) -> i32 {
        self.font + 4
    }
}

fn picture(name: String, description: String, draw: impl Fn(Size) -> Svg) -> Picture {
    Picture {
        name,
        description: plain(&description),
        wide: draw(WIDE),
        narrow: draw(NARROW),
    }
}

/// Draws; what plotters cannot do, which nothing here should ask for, is said in the picture's place.
fn paint(width: i32, height: i32, draw: impl FnOnce(&Area) -> Drawn) -> Svg {
    let size = (width.max(1) as u32, height.max(1) as u32);
    let mut text = String::new();
    let drawn = {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        let filled = area.fill(&SURFACE);
        filled
            .and_then(|()| draw(&area))
            .and_then(|()| area.present())
    };
    let begin = text.find('>').map_or(0, |at| at + 1);
    let end = text.rfind("</svg>").unwrap_or(text.len());
    let inner = match drawn {
        Ok(()) => text.get(begin..end).unwrap_or_default().to_string(),
        Err(_) => {
            r##"<text x="4" y="20" fill="#1B1F24">This chart could not be drawn.</text>"##.into()
        }
    };
    Svg {
        width,
        height,
        inner,
    }
}

/// Where a text is to be in relation to its point.
#[derive(Clone, Copy)]
struct Anchor(HPos, VPos);

fn style(font: i32, colour: RGBColor, bold: bool, Anchor(h, v): Anchor) -> TextStyle<'static> {
    // (plotters writes sizes that are smaller by this factor.)
    let size = f64::from(font) * 1.24;
    let weight = match bold {
        true => FontStyle::Bold,
        false => FontStyle::Normal,
    };
    let font = FontDesc::new(FontFamily::SansSerif, size, weight);
    TextStyle {
        font,
        color: colour.to_backend_color(),
        pos: Pos::new(h, v),
    }
}

fn text(area: &Area, words: &str, at: Pixel, style: TextStyle<'static>) -> Drawn {
    area.draw(&Text::new(words.to_string(), at, style))
}

const LEFT: Anchor = Anchor(HPos::Left, VPos::Top);
const LEFT_MIDDLE: Anchor = Anchor(HPos::Left, VPos::Center);
const RIGHT_MIDDLE: Anchor = Anchor(HPos::Right, VPos::Center);

// ---------------------------------------------------------------- marks and legend

/// The corners of a shape about 0, of a size that looks the same for each; none for a disc.
fn corners(shape: usize, size: f64) -> Vec<(f64, f64)> {
    let turned = |number: usize, radius: f64, turn: f64| -> Vec<(f64, f64)> {
        let angle = |at: usize| (at as f64 / number as f64 + turn) * std::f64::consts::TAU;
        let corner = |at| (radius * angle(at).sin(), -radius * angle(at).cos());
        (0..number).map(corner).collect()
    };
    let arms = |turn: f64| -> Vec<(f64, f64)> {
        // A cross of four arms: outer corners, and an inner one between two arms.
        let (long, thin) = (1.25 * size, 0.45 * size);
        let arm = [(-thin, -long), (thin, -long), (thin, -thin)];
        let (sin, cos) = (turn * std::f64::consts::TAU).sin_cos();
        let quarter = |(x, y): (f64, f64), at: usize| match at {
            0 => (x, y),
            1 => (-y, x),
            2 => (-x, -y),
            _ => (y, -x),
        };
        let all = (0..4).flat_map(|at| arm.map(|corner| quarter(corner, at)));
        all.map(|(x, y)| (x * cos - y * sin, x * sin + y * cos))
            .collect()
    };
    match shape % 8 {
        0 => Vec::new(),
        1 => turned(4, 1.3 * size, 0.125),
        2 => turned(3, 1.4 * size, 0.0),
        3 => turned(4, 1.35 * size, 0.0),
        4 => turned(3, 1.4 * size, 0.5),
        5 => arms(0.0),
        6 => arms(0.125),
        _ => turned(6, 1.15 * size, 0.0),
    }
}

/// A mark with a rim of the background, so that two that overlap are seen as two.
fn mark(area: &Area, at: Pixel, shape: usize, colour: RGBColor, size: f64) -> Drawn {
    for (colour, size) in [(SURFACE, size + 1.5), (colour, size)] {
        let corners = corners(shape, size);
        if corners.is_empty() {
            area.draw(&Circle::new(at, size.round() as i32, colour.filled()))?;
            continue;
        }
        let corner = |(x, y): &(f64, f64)| (at.0 + x.round() as i32, at.1 + y.round() as i32);
        let corners: Vec<Pixel> = corners.iter().map(corner).collect();
        area.draw(&Polygon::new(corners, colour.filled()))?;
    }
    Ok(())
}

const MARK: f64 = 5.0;

/// What stands for what.
struct Entry {
    colour: RGBColor,
    shape: usize,
    words: String,
}

/// Entries in rows, each as wide as it is, and the height of all.
struct Legend<'a> {
    placed: Vec<(Pixel, &'a Entry, Vec<String>)>,
    height: i32,
}

impl<'a> Legend<'a> {
    fn new(entries: &'a [Entry], size: Size) -> Self {
        let mut placed = Vec::new();
        let (mut x, mut y) = (8, 0);
        // Several in a row only where all of them are short.
        let widths = entries
            .iter()
            .map(|entry| width(&entry.words, size.font) + 38);
        let widest_entry = widths.max().unwrap_or(0);
        let one_a_row = widest_entry > size.width / 2;
        for entry in entries {
            let lines = wrap(&entry.words, size.font, size.width - 36, 4);
            let widest = lines.iter().map(|line| width(line, size.font)).max();
            let wide = match one_a_row {
                true => size.width,
                false => 22 + widest.unwrap_or(0) + 16,
            };
            let height = size.line() * lines.len().max(1) as i32 + 3;
            if x > 8 && (x + wide > size.width || lines.len() > 1) {
                x = 8;
                y += size.line() + 3;
            }
            placed.push(((x, y), entry, lines));
            x += wide;
            // What comes after several lines begins below them.
            if height > size.line() + 3 {
                x = 8;
                y += height;
            }
        }
        Legend {
            placed,
            height: if x > 8 { y + size.line() + 3 } else { y },
        }
    }

    fn draw(&self, area: &Area, top: i32, size: Size) -> Drawn {
        for ((x, y), entry, lines) in &self.placed {
            let middle = top + y + size.line() / 2;
            mark(area, (x + 6, middle), entry.shape, entry.colour, MARK)?;
            for (number, line) in lines.iter().enumerate() {
                let at = (x + 18, middle + size.line() * number as i32);
                text(area, line, at, style(size.font, INK, false, LEFT_MIDDLE))?;
            }
        }
        Ok(())
    }
}

/// The title's lines, and where what is below begins.
fn title(words: &str, size: Size) -> (Vec<String>, i32) {
    // (Bold letters are wider.)
    let lines = wrap(words, size.font + 2, size.width - 8, 3);
    let below = 4 + (size.line() + 1) * lines.len() as i32 + 6;
    (lines, below)
}

fn draw_title(area: &Area, lines: &[String], size: Size) -> Drawn {
    for (number, line) in lines.iter().enumerate() {
        let at = (2, 4 + (size.line() + 1) * number as i32);
        text(area, line, at, style(size.font + 1, INK, true, LEFT))?;
    }
    Ok(())
}

// ---------------------------------------------------------------- axes

/// A chart with two axes: what is around its marks.
struct Plot<'a> {
    title: &'a str,
    x_title: &'a str,
    y_title: &'a str,
    x: &'a dyn Fn(f64) -> Axis,
    y: &'a dyn Fn(f64) -> Axis,
    legend: &'a [Entry],
    size: Size,
}

/// The part inside the axes: its edges, and the pixel of a value of each axis.
struct Inside<'a> {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    pixel: &'a dyn Fn(f64, f64) -> Pixel,
}

impl Plot<'_> {
    /// Draws axes, then what `draw` draws at places of the axes.
    fn paint(&self, draw: impl FnOnce(&Area, &Inside) -> Drawn) -> Svg {
        let size = self.size;
        let font = size.font;
        let (title, below_title) = title(self.title, size);
        let y_titles = wrap(self.y_title, font, size.width - 8, 2);
        let top = below_title + size.line() * y_titles.len() as i32 + font / 2 + 2;
        let y = (self.y)(f64::from(size.height));
        let widest = y.ticks.iter().map(|(_, label)| width(label, font)).max();
        let left = widest.unwrap_or(0).clamp(20, size.width / 3) + 8;
        let right_margin = 24;
        let inner = size.width - left - right_margin;
        let x = (self.x)(f64::from(inner));
        let bottom = top + size.height;
        let x_titles = wrap(self.x_title, font, size.width - 16, 3);
        let x_title_top = bottom + font + 12;
        let legend = Legend::new(self.legend, size);
        let legend_top = x_title_top + size.line() * x_titles.len() as i32 + 8;
        let height = legend_top + legend.height + 4;
        paint(size.width, height, |area| {
            draw_title(area, &title, size)?;
            for (number, line) in y_titles.iter().enumerate() {
                let at = (2, below_title + size.line() * number as i32);
                text(area, line, at, style(font, MUTED, false, LEFT))?;
            }
            let label_height = font + 10;
            let mut chart = ChartBuilder::on(area)
                .margin_top(top)
                .margin_right(right_margin)
                .margin_bottom(height - bottom - label_height)
                .x_label_area_size(label_height)
                .y_label_area_size(left)
                .build_cartesian_2d(x.clone(), y.clone())?;
            chart
                .configure_mesh()
                .bold_line_style(GRID)
                .light_line_style(TRANSPARENT)
                .axis_style(MUTED)
                .label_style(style(font, MUTED, false, LEFT))
                .set_all_tick_mark_size(3)
                .draw()?;
            for (number, line) in x_titles.iter().enumerate() {
                let at = (left + inner / 2, x_title_top + size.line() * number as i32);
                // About the middle of the axis, and within the chart.
                let half = width(line, font) / 2;
                let middle = at.0.min(size.width - 4 - half).max(4 + half);
                let centred = Anchor(HPos::Center, VPos::Top);
                text(
                    area,
                    line,
                    (middle, at.1),
                    style(font, MUTED, false, centred),
                )?;
            }
            legend.draw(area, legend_top, size)?;
            let pixel = |at_x: f64, at_y: f64| chart.backend_coord(&(at_x, at_y));
            draw(
                area,
                &Inside {
                    left,
                    right: left + inner,
                    top,
                    bottom,
                    pixel: &|at_x, at_y| pixel(x.place(at_x), y.place(at_y)),
                },
            )
        })
    }
}

fn x_gap(font: i32) -> impl Fn(&str) -> f64 {
    move |label| f64::from(width(label, font) + 6)
}

// ---------------------------------------------------------------- the roofline

/// Ranges of a roofline's axes, as logarithms, before there is room for labels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Roof {
    x: (f64, f64),
    y: (f64, f64),
    /// Compute roofs of the run that has the most of them.
    roofs: usize,
}

/// The compute roofs of a run that it has, with their names; each the logarithm of GFLOP/s. Arithmetic that is slower than f32
/// (f16 on adapters that are a CPU) is no roof: nothing would be computed by it.
fn compute_roofs(run: &Run) -> Vec<(&'static str, f64)> {
    let named = ["f32", "f16", "matrices"];
    let roofs = named
        .into_iter()
        .filter_map(|name| Some((name, run.peaks.rate(name)?)))
        .filter(|(name, rate)| *name == "f32" || *rate > run.peaks.f32_flops_per_second);
    let mut roofs: Vec<_> = roofs.map(|(name, rate)| (name, log(rate) - 9.0)).collect();
    roofs.sort_by(|a, b| a.1.total_cmp(&b.1));
    roofs
}

/// Operations a byte, GFLOP/s (both as logarithms) and kind of each measured case that has any.
fn roofline_points(run: &Run) -> Vec<(f64, f64, usize)> {
    let with_work = measured(run).filter(|(case, _)| case.flops > 0 && case.bytes > 0);
    let points = with_work.map(|(case, measured)| {
        let intensity = log(case.flops as f64) - log(case.bytes as f64);
        let rate = log(measured.flops_per_second) - 9.0;
        (intensity, rate, kind_number(&case.kind))
    });
    points.collect()
}

impl Roof {
    /// What a run's marks and roofs take.
    pub(super) fn of(run: &Run) -> Self {
        let points = roofline_points(run);
        let roofs = compute_roofs(run);
        let memory = log(run.peaks.bytes_per_second) - 9.0;
        let ridges = roofs.iter().map(|(_, rate)| rate - memory);
        let x = points.iter().map(|point| point.0).chain(ridges);
        let lowest = roofs.first().map_or(0.0, |roof| roof.1);
        let y = points.iter().map(|point| point.1);
        let y = y
            .chain(roofs.iter().map(|roof| roof.1))
            .chain([lowest - 1.0]);
        let range = |values: &mut dyn Iterator<Item = f64>, pad: f64| {
            let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| {
                (low.min(value), high.max(value))
            });
            let pad = ((high - low) * pad).max(0.15);
            (low - pad, high + pad)
        };
        Roof {
            x: range(&mut { x }, 0.06),
            y: range(&mut { y }, 0.06),
            roofs: roofs.len(),
        }
    }

    /// One frame for all, so that they can be compared; none where it would show little of each.
    pub(super) fn common(roofs: &[Roof]) -> Option<Self> {
        let first = *roofs.first()?;
        let both = |a: (f64, f64), b: (f64, f64)| (a.0.min(b.0), a.1.max(b.1));
        let all = roofs.iter().fold(first, |all, roof| Roof {
            x: both(all.x, roof.x),
            y: both(all.y, roof.y),
            roofs: all.roofs.max(roof.roofs),
        });
        (all.y.1 - all.y.0 <= 9.0 && all.x.1 - all.x.0 <= 9.0).then_some(all)
    }
}

/// GFLOP/s by operations a byte, below what the peaks allow.
pub(super) fn roofline(number_of_run: usize, label: &str, run: &Run, roof: Roof) -> Picture {
    let points = roofline_points(run);
    let roofs = compute_roofs(run);
    let memory = log(run.peaks.bytes_per_second) - 9.0;
    let mut legend = Vec::new();
    for kind in 0..=KINDS.len() {
        let count = points.iter().filter(|point| point.2 == kind).count();
        if count > 0 {
            let name = KINDS.get(kind).copied().unwrap_or("other");
            legend.push(Entry {
                colour: COLOURS[kind % COLOURS.len()],
                shape: kind,
                words: format!("{name} ({count})"),
            });
        }
    }
    let heading = format!("{number_of_run}  {label}");
    let description = format!(
        "Roofline of {label}: GFLOP/s against operations per byte for {} measured cases, below roofs of {} and {} GB/s",
        points.len(),
        roofs
            .iter()
            .map(|(name, rate)| format!("{name} {} GFLOP/s", number(10f64.powf(*rate))))
            .collect::<Vec<_>>()
            .join(", "),
        number(run.peaks.bytes_per_second / 1e9),
    );
    picture(format!("roofline-{number_of_run}"), description, |size| {
        let font = size.font;
        let line = size.line();
        let rate = number(run.peaks.bytes_per_second / 1e9);
        let memory_words = match size.is_narrow() {
            true => vec!["memory".to_string(), format!("{rate} GB/s")],
            false => vec![format!("memory {rate} GB/s")],
        };
        // Room above the highest roof for a label of each and of the memory's.
        let labels = (roof.roofs + memory_words.len()) as i32;
        let room = f64::from(labels * line + 10) / f64::from(size.height);
        let span = roof.y.1 - roof.y.0;
        let y_range = (roof.y.0, roof.y.1 + span * room / (1.0 - room));
        let plot = Plot {
            title: &heading,
            x_title: "operations per byte moved at least (FLOP/B)",
            y_title: "GFLOP/s",
            x: &|pixels| Axis::logarithms(roof.x, pixels, x_gap(font)),
            y: &|pixels| Axis::logarithms(y_range, pixels, |_| f64::from(2 * line)),
            legend: &legend,
            size,
        };
        plot.paint(|area, inside| {
            // These are logarithms already.
            let pixel = |x: f64, y: f64| (inside.pixel)(10f64.powf(x), 10f64.powf(y));
            let roof_style = INK.stroke_width(2);
            let x_of = |x: f64| x.clamp(roof.x.0, roof.x.1);
            let highest = roofs.last().map_or(0.0, |roof| roof.1);
            for (_, rate) in &roofs {
                let from = pixel(x_of(rate - memory), *rate);
                let to = (inside.right, from.1);
                area.draw(&PathElement::new(vec![from, to], roof_style))?;
            }
            let begin = x_of(y_range.0 - memory);
            let end = x_of(highest - memory);
            let diagonal = [begin, end].map(|x| {
                let (x, y) = pixel(x, x + memory);
                (x, y.clamp(inside.top, inside.bottom))
            });
            area.draw(&PathElement::new(diagonal.to_vec(), roof_style))?;
            for (x, y, kind) in &points {
                let colour = COLOURS[kind % COLOURS.len()];
                mark(area, pixel(*x, *y), *kind, colour, MARK)?;
            }
            // From the lowest roof up: each label above its line, and above the label below it. Where lines are closer to each other than
            // their labels are high, all of theirs stand above the highest of them.
            let mut bottoms: Vec<i32> = Vec::new();
            let lines: Vec<i32> = roofs.iter().map(|roof| pixel(0.0, roof.1).1).collect();
            let mut at = 0;
            while at < lines.len() {
                let mut last = at;
                while last + 1 < lines.len() && lines[last] - lines[last + 1] < line * 2 {
                    last += 1;
                }
                for place in at..=last {
                    bottoms.push(lines[last] - 4 - line * (place - at) as i32);
                }
                at = last + 1;
            }
            let above = Anchor(HPos::Right, VPos::Bottom);
            let mut leftmost = Vec::new();
            for ((name, rate), bottom) in roofs.iter().zip(&bottoms) {
                let words = format!("{name} {} GFLOP/s", number(10f64.powf(*rate)));
                let at = (inside.right - 4, *bottom);
                leftmost.push((at.0 - width(&words, font), *bottom));
                text(area, &words, at, style(font, INK, false, above))?;
            }
            // The memory's stands above its line, as low as its end allows; above all else where another is there already.
            let left = inside.left + 8;
            let widest = memory_words.iter().map(|words| width(words, font)).max();
            let end = left + widest.unwrap_or(0);
            let [low, ridge] = [diagonal[0], diagonal[1]];
            let share = f64::from(end - low.0) / f64::from((ridge.0 - low.0).max(1));
            let rise = f64::from(low.1 - ridge.1) * share.clamp(0.0, 1.0);
            let mut bottom = (low.1 - rise as i32).min(inside.bottom - 8) - 6;
            let height = line * memory_words.len() as i32;
            let meets = |(other_left, other_bottom): &(i32, i32)| {
                end + 8 > *other_left
                    && bottom > other_bottom - line
                    && bottom - height < *other_bottom
            };
            if leftmost.iter().any(meets) {
                bottom = bottoms.iter().min().map_or(bottom, |bottom| bottom - line);
            }
            let above = Anchor(HPos::Left, VPos::Bottom);
            for (number, words) in memory_words.iter().rev().enumerate() {
                let at = (left, bottom - line * number as i32);
                text(area, words, at, style(font, INK, false, above))?;
            }
            Ok(())
        })
    })
}

// ---------------------------------------------------------------- series over a size

/// What a chart of series shows, in words.
pub(super) struct SeriesWords<'a> {
    pub(super) name: String,
    pub(super) title: &'a str,
    pub(super) x_title: &'a str,
    pub(super) y_title: &'a str,
    /// What the families' names begin with, which need not be said again.
    pub(super) kind: &'a str,
}

/// A series for each run, variant and family, in one chart.
pub(super) fn series(
    words: &SeriesWords,
    series: &[Series],
    labels: &[String],
    always_logarithmic: bool,
) -> Picture {
    let mut families: Vec<(&str, Option<&str>)> = Vec::new();
    for own in series {
        let key = (own.family.as_str(), own.variant.as_deref());
        if !families.contains(&key) {
            families.push(key);
        }
    }
    let several_families = families.windows(2).any(|pair| pair[0].0 != pair[1].0);
    let short = |family: &str| {
        let begin = format!("{}-", words.kind);
        family.strip_prefix(&begin).unwrap_or(family).to_string()
    };
    let several_runs = labels.len() > 1;
    let entries: Vec<Entry> = series
        .iter()
        .map(|own| {
            let family = families
                .iter()
                .position(|(family, variant)| {
                    *family == own.family && *variant == own.variant.as_deref()
                })
                .unwrap_or(0);
            let mut parts = Vec::new();
            if several_runs {
                let label = labels.get(own.run).map_or("", String::as_str);
                parts.push(format!("{}  {label}", own.run + 1));
            }
            if several_families {
                parts.push(short(&own.family));
            }
            if let Some(variant) = &own.variant {
                parts.push(format!("@{variant}"));
            }
            parts.push(own.kernels.join(" / "));
            Entry {
                colour: COLOURS[if several_runs { own.run } else { family } % COLOURS.len()],
                shape: if several_runs && families.len() == 1 {
                    own.run
                } else {
                    family
                },
                words: parts.join(", "),
            }
        })
        .collect();
    let title = match (several_families, families.first()) {
        (false, Some((family, _))) => format!("{}: {}", words.title, short(family)),
        _ => words.title.to_string(),
    };
    let points = || series.iter().flat_map(|series| series.points.iter());
    let lengths: Vec<f64> = points().map(|point| point.0).collect();
    let (least, most) = points().fold((f64::MAX, 0.0), |(least, most): (f64, f64), point| {
        (least.min(point.1), most.max(point.1))
    });
    let logarithmic = always_logarithmic || log(most) - log(least) > 1.3;
    let scale = if logarithmic { ", log scale" } else { "" };
    let y_title = format!("{}{scale}", words.y_title);
    let description = format!(
        "{title}. {} against {}; {} series, values from {} to {}",
        words.y_title,
        words.x_title,
        series.len(),
        number(least),
        number(most)
    );
    picture(words.name.clone(), description, |size| {
        let font = size.font;
        let plot = Plot {
            title: &title,
            x_title: words.x_title,
            y_title: &y_title,
            x: &|pixels| Axis::lengths(&lengths, pixels, x_gap(font)),
            y: &|pixels| match logarithmic {
                true => {
                    let pad = ((log(most) - log(least)) * 0.06).max(0.08);
                    let range = (log(least) - pad, log(most) + pad);
                    Axis::logarithms(range, pixels, |_| f64::from(2 * font))
                }
                false => Axis::from_zero(most, pixels, f64::from(3 * font)),
            },
            legend: &entries,
            size,
        };
        plot.paint(|area, inside| {
            for (own, entry) in series.iter().zip(&entries) {
                let path = own.points.iter().map(|(x, y)| (inside.pixel)(*x, *y));
                let path: Vec<Pixel> = path.collect();
                if path.len() > 1 {
                    area.draw(&PathElement::new(path, entry.colour.stroke_width(2)))?;
                }
            }
            for (own, entry) in series.iter().zip(&entries) {
                for (x, y) in &own.points {
                    let at = (inside.pixel)(*x, *y);
                    mark(area, at, entry.shape, entry.colour, MARK)?;
                }
            }
            Ok(())
        })
    })
}

// ---------------------------------------------------------------- bars

/// A bar: what is in front of it, how long it is, and what is behind it.
struct Bar {
    before: String,
    colour: RGBColor,
    /// 1 is the whole width.
    share: f64,
    behind: String,
}

/// A case and its bars.
struct BarGroup {
    name: String,
    bars: Vec<Bar>,
}

fn bars(
    size: Size,
    title_words: &str,
    x_title: &str,
    groups: &[BarGroup],
    legend: &[Entry],
) -> Svg {
    let font = size.font;
    let (title, below_title) = title(title_words, size);
    let legend = Legend::new(legend, size);
    let all = || groups.iter().flat_map(|group| &group.bars);
    let widest = |words: &dyn Fn(&Bar) -> &str| {
        let widths = all().map(|bar| width(words(bar), font));
        widths.max().unwrap_or(0)
    };
    let before = widest(&|bar| &bar.before);
    let behind = widest(&|bar| &bar.behind).min(size.width / 3);
    // (Long only where a file has long words for what binds a case.)
    let cut = |words: &str| wrap(words, font, behind.max(font), 1).concat();
    // Names in a column of their own where there is room, else above the bars.
    let names = groups.iter().map(|group| width(&group.name, font)).max();
    let names = match size.is_narrow() {
        true => None,
        false => Some(names.unwrap_or(0).clamp(40, 380) + 12),
    };
    let before_room = if before == 0 { 0 } else { before + 6 };
    let left = 4 + names.unwrap_or(0) + before_room;
    let right = size.width - behind - 14;
    let bar_height = font + 2;
    let step = bar_height + 3;
    let wrapped = |group: &BarGroup| match names {
        Some(names) => wrap(&group.name, font, names - 8, group.bars.len().clamp(1, 3)),
        None => wrap(&group.name, font, size.width - 8, 2),
    };
    // Of each group: its name's lines, and where name and bars begin.
    let top = below_title + legend.height + 6;
    let mut y = top + 6;
    let mut placed = Vec::new();
    for group in groups {
        let lines = wrapped(group);
        let name_top = y;
        if names.is_none() {
            y += size.line() * lines.len() as i32;
        }
        let bars_top = y;
        y += step * group.bars.len() as i32 + 9;
        placed.push((lines, name_top, bars_top));
    }
    let bottom = y;
    let x_titles = wrap(x_title, font, size.width - 16, 3);
    let x_title_top = bottom + font + 12;
    let height = x_title_top + size.line() * x_titles.len() as i32 + 6;
    let longest = all().map(|bar| bar.share).fold(1.0, f64::max).min(1.5);
    paint(size.width, height, |area| {
        draw_title(area, &title, size)?;
        legend.draw(area, below_title, size)?;
        let label_height = font + 10;
        let mut chart = ChartBuilder::on(area)
            .margin_top(top)
            .margin_left(left)
            .margin_right(size.width - right)
            .margin_bottom(height - bottom - label_height)
            .x_label_area_size(label_height)
            .build_cartesian_2d(Axis::shares(longest), 0.0..1.0)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(MUTED)
            .label_style(style(font, MUTED, false, LEFT))
            .set_all_tick_mark_size(3)
            .draw()?;
        for (number, line) in x_titles.iter().enumerate() {
            let half = width(line, font) / 2;
            let middle = ((left + right) / 2)
                .min(size.width - 4 - half)
                .max(4 + half);
            let at = (middle, x_title_top + size.line() * number as i32);
            let centred = Anchor(HPos::Center, VPos::Top);
            text(area, line, at, style(font, MUTED, false, centred))?;
        }
        for (group, (lines, name_top, bars_top)) in groups.iter().zip(&placed) {
            for (number, line) in lines.iter().enumerate() {
                let at = (4, name_top + size.line() * number as i32 + size.line() / 2);
                text(area, line, at, style(font, INK, false, LEFT_MIDDLE))?;
            }
            for (number, bar) in group.bars.iter().enumerate() {
                let top = bars_top + step * number as i32;
                let end = chart.backend_coord(&(bar.share.clamp(0.0, longest), 0.0)).0;
                let middle = top + bar_height / 2;
                let corners = [(left, top), (end.max(left + 2), top + bar_height)];
                area.draw(&Rectangle::new(corners, bar.colour.filled()))?;
                if !bar.before.is_empty() {
                    let at = (left - 6, middle);
                    text(
                        area,
                        &bar.before,
                        at,
                        style(font, MUTED, false, RIGHT_MIDDLE),
                    )?;
                }
                let at = (end.max(left + 2) + 5, middle);
                text(
                    area,
                    &cut(&bar.behind),
                    at,
                    style(font, INK, false, LEFT_MIDDLE),
                )?;
            }
        }
        Ok(())
    })
}

/// What each run makes of the cases that it shares with others, as a share of the fastest.
pub(super) fn speeds(kind: &str, cases: &[&Common], labels: &[String]) -> Picture {
    let shown = &cases[..cases.len().min(MOST_BARS)];
    let mut present = vec![false; labels.len()];
    let groups: Vec<BarGroup> = shown
        .iter()
        .map(|case| {
            // By one clock: the GPUs' if all runs have it.
            let by_gpu = case.of_runs.iter().all(|(_, own)| own.clock == Clock::Gpu);
            let seconds = |at: &(usize, &crate::results::MeasuredCase)| match by_gpu {
                true => at.1.best().median_s,
                false => at.1.wall.median_s,
            };
            let fastest = case.of_runs.iter().map(seconds).fold(f64::MAX, f64::min);
            let bars = case.of_runs.iter().map(|of_run| {
                if let Some(present) = present.get_mut(of_run.0) {
                    *present = true;
                }
                Bar {
                    before: (of_run.0 + 1).to_string(),
                    colour: COLOURS[of_run.0 % COLOURS.len()],
                    share: fastest / seconds(of_run),
                    behind: milliseconds(seconds(of_run)),
                }
            });
            BarGroup {
                name: case.id.clone(),
                bars: bars.collect(),
            }
        })
        .collect();
    let legend: Vec<Entry> = labels
        .iter()
        .enumerate()
        .filter(|(at, _)| present[*at])
        .map(|(at, label)| Entry {
            colour: COLOURS[at % COLOURS.len()],
            shape: 1,
            words: format!("{}  {label}", at + 1),
        })
        .collect();
    let description = format!(
        "Speed of {} {kind} cases on {} adapters, relative to the fastest of each case",
        shown.len(),
        legend.len()
    );
    picture(format!("speed-{kind}"), description, |size| {
        let title = format!("{kind}: speed relative to the fastest");
        bars(
            size,
            &title,
            "speed, % of the fastest (the label is the time)",
            &groups,
            &legend,
        )
    })
}

/// The shares of one run's cases.
pub(super) fn shares(kind: &str, shares: &[&Share]) -> Picture {
    let shown = &shares[..shares.len().min(MOST_BARS)];
    let bound_number = |bound: &str| {
        let known = ["memory", "f32", "f16", "matrices"];
        let at = known.iter().position(|known| *known == bound);
        at.unwrap_or(known.len())
    };
    let mut bounds: Vec<&str> = Vec::new();
    for share in shown {
        if !bounds.contains(&share.bound) && bounds.len() < 12 {
            bounds.push(share.bound);
        }
    }
    let legend: Vec<Entry> = bounds
        .iter()
        .map(|bound| Entry {
            colour: COLOURS[bound_number(bound) % COLOURS.len()],
            shape: 1,
            words: format!("of the {bound} peak"),
        })
        .collect();
    let groups: Vec<BarGroup> = shown
        .iter()
        .map(|share| BarGroup {
            name: share.id.clone(),
            bars: vec![Bar {
                before: String::new(),
                colour: COLOURS[bound_number(share.bound) % COLOURS.len()],
                share: share.share,
                behind: format!("{} {}", percent(share.share), share.bound),
            }],
        })
        .collect();
    let description = format!(
        "Share of the binding peak that {} {kind} cases reach",
        shown.len()
    );
    picture(format!("share-{kind}"), description, |size| {
        let title = format!("{kind}: share of the binding peak");
        bars(
            size,
            &title,
            "share of the peak that binds the case, %",
            &groups,
            &legend,
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_colour_has_its_rules() {
        let css = include_str!("chart.css");
        for RGBColor(r, g, b) in [SURFACE, INK, MUTED, GRID].into_iter().chain(COLOURS) {
            let colour = format!("#{r:02X}{g:02X}{b:02X}");
            assert!(css.contains(&format!("[fill=\"{colour}\"]")), "{colour}");
        }
    }

    #[test]
    fn names_cannot_leave_their_text() {
        let svg = paint(100, 50, |area| {
            let words = "</text><script>alert(\"1\")</script>&'";
            text(area, words, (0, 0), style(12, INK, false, LEFT))
        });
        assert!(!svg.inner.contains("<script"), "{}", svg.inner);
        assert!(svg.inner.contains("&lt;script&gt;"), "{}", svg.inner);
        assert!(svg.inner.contains("&amp;&apos;"), "{}", svg.inner);
    }

    #[test]
    fn a_legend_keeps_to_the_width_and_lines_do_not_meet() {
        let words = [
            "short",
            "a name that takes more than one line of a narrow chart, it does",
            "b",
        ];
        let entries: Vec<Entry> = words
            .iter()
            .cycle()
            .take(9)
            .map(|words| Entry {
                colour: INK,
                shape: 0,
                words: words.to_string(),
            })
            .collect();
        for size in [NARROW, WIDE] {
            let legend = Legend::new(&entries, size);
            let mut last = 0;
            for ((x, y), _, lines) in &legend.placed {
                let widest = lines
                    .iter()
                    .map(|line| width(line, size.font))
                    .max()
                    .unwrap();
                assert!(x + 18 + widest <= size.width);
                assert!(*y >= last || *x > 8);
                last = *y;
                assert!(y + size.line() * lines.len() as i32 <= legend.height);
            }
        }
    }
}

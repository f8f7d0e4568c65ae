//! Axes: a range, and where its marks are.

use super::words::tick;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use std::ops::Range;

/// An axis over numbers or over their decimal logarithms.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    /// Place on the axis and what it says.
    pub(super) ticks: Vec<(f64, String)>,
    logarithmic: bool,
}

impl Axis {
    /// Where a value lies on it.
    pub(super) fn place(&self, value: f64) -> f64 {
        match self.logarithmic {
            true => log(value),
            false => value,
        }
    }

    /// What the mark nearest to a place says.
    fn label(&self, place: f64) -> String {
        let distance = |tick: &&(f64, String)| (tick.0 - place).abs();
        let nearest = self
            .ticks
            .iter()
            .min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.map_or_else(String::new, |tick| tick.1.clone())
    }

    /// From 0 to a share, with marks of a quarter each, in percent.
    pub(super) fn shares(most: f64) -> Self {
        let marks = (0..).map(|quarters| f64::from(quarters) / 4.0);
        let marks = marks.take_while(|mark| *mark <= most + 1e-9).take(9);
        Axis {
            low: 0.0,
            high: most,
            ticks: marks
                .map(|mark| (mark, format!("{:.0}", mark * 100.0)))
                .collect(),
            logarithmic: false,
        }
    }

    /// Logarithmic over a range of logarithms, with marks that are `gap(label)` pixels apart at least, of `pixels`.
    pub(super) fn logarithms(
        (low, high): (f64, f64),
        pixels: f64,
        gap: impl Fn(&str) -> f64,
    ) -> Self {
        let (low, high) = widened(low, high, 0.5);
        let decades = |step: i64, digits: &[u32]| {
            let first = (low.floor() as i64).div_euclid(step) * step;
            let exponents = (0..).map(|n| first + n * step);
            let mut ticks = Vec::new();
            for exponent in exponents.take_while(|exponent| *exponent as f64 <= high) {
                for digit in digits {
                    let place = exponent as f64 + f64::from(*digit).log10();
                    if (low..=high).contains(&place) {
                        ticks.push((place, tick(*digit, exponent as i32)));
                    }
                }
            }
            ticks
        };
        let fits = |ticks: &[(f64, String)]| {
            ticks.windows(2).all(|pair| {
                let apart = (pair[1].0 - pair[0].0) / (high - low) * pixels;
                apart >= gap(&pair[0].1).max(gap(&pair[1].1))
            })
        };
        let mut candidates: Vec<(i64, &[u32])> = Vec::new();
        if high - low <= 3.5 {
            candidates.push((1, &[1, 2, 5]));
        }
        let steps = [1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000];
        candidates.extend(steps.iter().map(|step| (*step, &[1u32] as &[u32])));
        let ticks = candidates
            .into_iter()
            .map(|(step, digits)| decades(step, digits))
            .find(|ticks| fits(ticks))
            .unwrap_or_default();
        Axis {
            low,
            high,
            ticks,
            logarithmic: true,
        }
    }

    /// Logarithmic over lengths: marks are the lengths themselves where there is room, else powers of two.
    pub(super) fn lengths(lengths: &[f64], pixels: f64, gap: impl Fn(&str) -> f64) -> Self {
        let mut own: Vec<f64> = lengths.to_vec();
        own.sort_by(f64::total_cmp);
        own.dedup();
        let first = own.first().copied().unwrap_or(1.0).max(1.0);
        let last = own.last().copied().unwrap_or(1.0).max(1.0);
        let (low, high) = widened(log(first), log(last), 0.3);
        let pad = (high - low) * 0.04;
        let (low, high) = (low - pad, high + pad);
        let fits = |ticks: &[(f64, String)]| {
            ticks.windows(2).all(|pair| {
                let apart = (pair[1].0 - pair[0].0) / (high - low) * pixels;
                apart >= gap(&pair[0].1).max(gap(&pair[1].1))
            })
        };
        let label = |length: f64| match length < 1e7 {
            true => format!("{length}"),
            false => format!("{length:.1e}"),
        };
        let powers = |step: usize| {
            let exponents = (0..64).step_by(step).map(|power| 2f64.powi(power));
            let within = exponents.filter(|length| (low..=high).contains(&log(*length)));
            within.collect::<Vec<_>>()
        };
        let candidates = std::iter::once(own).chain((1..32).map(powers));
        let ticks = candidates
            .map(|lengths| {
                let ticks = lengths.into_iter();
                ticks.map(|length| (log(length), label(length))).collect()
            })
            .find(|ticks: &Vec<_>| fits(ticks))
            .unwrap_or_default();
        Axis {
            low,
            high,
            ticks,
            logarithmic: true,
        }
    }

    /// From 0 to a little more than `most`, with marks that are `gap` pixels apart at least, of `pixels`.
    pub(super) fn from_zero(most: f64, pixels: f64, gap: f64) -> Self {
        let most = most.clamp(1e-290, 1e290);
        let high = most * 1.08;
        // (Half a mark more, for rounding.)
        let steps = (-300..300).flat_map(|exponent| [(1, exponent), (2, exponent), (5, exponent)]);
        let size = |digit: u32, exponent: i32| f64::from(digit) * 10f64.powi(exponent);
        let first = log(high / (pixels / gap).max(1.0)).floor() as i32;
        let step = steps
            .skip_while(|(_, exponent)| *exponent < first)
            .find(|(digit, exponent)| high / size(*digit, *exponent) * gap <= pixels);
        let mut ticks = vec![(0.0, "0".to_string())];
        if let Some((digit, exponent)) = step {
            let places = (1..).map(|n: u32| (n * digit, size(n * digit, exponent)));
            for (digits, place) in places.take_while(|(_, place)| *place <= high).take(100) {
                // 20 * 10^1 is said as 2 * 10^2.
                let (mut digits, mut exponent) = (digits, exponent);
                while digits % 10 == 0 && exponent != 0 {
                    digits /= 10;
                    exponent += 1;
                }
                ticks.push((place, tick(digits, exponent)));
            }
        }
        Axis {
            low: 0.0,
            high,
            ticks,
            logarithmic: false,
        }
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (first, last): (i32, i32)) -> i32 {
        let share = (place - self.low) / (self.high - self.low);
        first + (share * f64::from(last - first)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.iter().map(|tick| tick.0).collect(),
        }
    }

    fn range(&self) -> Range<f64> {
        self.low..self.high
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, place: &f64) -> String {
        self.label(*place)
    }
}

/// The decimal logarithm, of something for everything.
pub(super) fn log(value: f64) -> f64 {
    value.clamp(1e-300, 1e300).log10()
}

/// A range of a least width about the same centre.
fn widened(low: f64, high: f64, least: f64) -> (f64, f64) {
    let (low, high) = (low.clamp(-400.0, 400.0), high.clamp(-400.0, 400.0));
    match high - low < least {
        true => {
            let centre = (low + high) / 2.0;
            (centre - least / 2.0, centre + least / 2.0)
        }
        false => (low, high),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.1.as_str()).collect()
    }

    #[test]
    fn decades_are_as_many_as_there_is_room_for() {
        let axis = |range, pixels| Axis::logarithms(range, pixels, |_| 30.0);
        assert_eq!(
            labels(&axis((0.0, 2.0), 400.0)),
            ["1", "2", "5", "10", "20", "50", "100"]
        );
        assert_eq!(
            labels(&axis((0.0, 4.0), 400.0)),
            ["1", "10", "100", "1000", "10,000"]
        );
        assert_eq!(
            labels(&axis((-4.0, 4.0), 160.0)),
            ["1e-4", "0.01", "1", "100", "10,000"]
        );
        for range in [
            (-300.0, 300.0),
            (300.0, 300.0),
            (0.301, 0.302),
            (-400.0, -399.0),
        ] {
            let axis = axis(range, 300.0);
            assert!(!axis.ticks.is_empty() && axis.ticks.len() <= 11, "{axis:?}");
            assert!(axis.high > axis.low);
        }
    }

    #[test]
    fn lengths_mark_themselves_where_there_is_room() {
        let own = Axis::lengths(&[16384.0, 128.0, 1024.0, 128.0], 300.0, |_| 50.0);
        assert_eq!(labels(&own), ["128", "1024", "16384"]);
        let lengths = [100.0, 101.0, 102.0, 4000.0];
        let powers = Axis::lengths(&lengths, 300.0, |_| 50.0);
        assert_eq!(
            labels(&powers),
            ["128", "256", "512", "1024", "2048", "4096"]
        );
        for lengths in [&[][..], &[1.0], &[0.0, 1e19], &[1e18, 1e18]] {
            let axis = Axis::lengths(lengths, 200.0, |_| 50.0);
            assert!(axis.high > axis.low && axis.ticks.len() < 20, "{axis:?}");
        }
    }

    #[test]
    fn from_zero_marks_are_round() {
        let axis = Axis::from_zero(95.0, 300.0, 50.0);
        assert_eq!(labels(&axis), ["0", "20", "40", "60", "80", "100"]);
        let axis = Axis::from_zero(24_000.0, 200.0, 30.0);
        assert_eq!(
            labels(&axis),
            ["0", "5000", "10,000", "15,000", "20,000", "25,000"]
        );
        for most in [1e-300, 1e-9, 0.033, 1e9, 1e300, f64::MAX] {
            let axis = Axis::from_zero(most, 200.0, 30.0);
            assert!((2..9).contains(&axis.ticks.len()), "{axis:?}");
        }
    }
}

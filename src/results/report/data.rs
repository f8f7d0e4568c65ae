//! What of the runs goes into which chart.

use crate::results::{CaseResult, LabelledRun, MeasuredCase, Run};
use std::collections::{HashMap, HashSet};

/// Kinds of cases in the order of the table. What is none of them comes after.
pub(super) const KINDS: [&str; 4] = ["attention", "decode", "linear", "layer"];

/// As many series as a chart shows at once.
const MOST_SERIES: usize = 8;

/// Times or rates of one run over a size.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    /// The number of the run.
    pub(super) run: usize,
    /// The case's name but for the size: `attention-causal-h12-d64-f32`.
    pub(super) family: String,
    /// What was asked for; the planner's choice where there is none.
    pub(super) variant: Option<String>,
    /// The kernels of all its points, each set once.
    pub(super) kernels: Vec<String>,
    /// Size and value, by size.
    pub(super) points: Vec<(f64, f64)>,
}

/// Series, and what is none.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Picked {
    /// The series of each chart.
    pub(super) panels: Vec<Vec<Series>>,
    /// Measured cases that have no other size beside them.
    pub(super) left_out: Vec<String>,
}

/// A case that several runs have.
#[derive(Debug)]
pub(super) struct Common<'a> {
    pub(super) id: String,
    pub(super) kind: &'a str,
    /// The number of the run, and what it took there.
    pub(super) of_runs: Vec<(usize, &'a MeasuredCase)>,
}

/// A measured case with its share of the peak that binds it.
#[derive(Debug, PartialEq)]
pub(super) struct Share<'a> {
    pub(super) id: String,
    pub(super) kind: &'a str,
    pub(super) bound: &'a str,
    pub(super) share: f64,
}

/// Measured cases of a run, in its order.
pub(super) fn measured(run: &Run) -> impl Iterator<Item = (&CaseResult, &MeasuredCase)> {
    let cases = run.cases.iter();
    cases.filter_map(|case| Some((case, case.measured()?)))
}

/// The place of a kind among [`KINDS`].
pub(super) fn kind_number(kind: &str) -> usize {
    let at = KINDS.iter().position(|known| *known == kind);
    at.unwrap_or(KINDS.len())
}

/// Rates of attention by the number of queries.
pub(super) fn attention(runs: &[LabelledRun]) -> Picked {
    series(runs, "attention", ("q_len", 't'), |measured| {
        measured.flops_per_second / 1e9
    })
}

/// Milliseconds of decoding by the number of keys.
pub(super) fn decode(runs: &[LabelledRun]) -> Picked {
    series(runs, "decode", ("kv_len", 'k'), |measured| {
        (measured.best().median_s * 1e3).min(f64::MAX)
    })
}

/// Every series of a kind over a size that the name says behind a letter. A point alone is kept where another run has more of the same.
fn series(
    runs: &[LabelledRun],
    kind: &str,
    (size, letter): (&str, char),
    value: impl Fn(&MeasuredCase) -> f64,
) -> Picked {
    let mut all: Vec<(Series, Vec<String>)> = Vec::new();
    let mut known: HashMap<(usize, String, Option<String>), usize> = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        for (case, measured) in measured(run.run).filter(|(case, _)| case.kind == kind) {
            let length = case.sizes.get(size).copied().unwrap_or(0);
            let family = family(&case.name, letter, length);
            let key = (number, family.clone(), case.variant.clone());
            let at = *known.entry(key).or_insert_with(|| {
                let series = Series {
                    run: number,
                    family,
                    variant: case.variant.clone(),
                    kernels: Vec::new(),
                    points: Vec::new(),
                };
                all.push((series, Vec::new()));
                all.len() - 1
            });
            let (series, ids) = &mut all[at];
            ids.push(case.id());
            series.points.push((length as f64, value(measured)));
            let kernels = measured.kernels.join(" + ");
            if !series.kernels.contains(&kernels) && series.kernels.len() < 4 {
                series.kernels.push(kernels);
            }
        }
    }
    let mut most_points: HashMap<(String, Option<String>), usize> = HashMap::new();
    for (series, _) in &mut all {
        series.points.retain(|(length, _)| *length >= 1.0);
        series.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let key = (series.family.clone(), series.variant.clone());
        let most = most_points.entry(key).or_default();
        *most = (*most).max(series.points.len());
    }
    let has_others = |series: &Series| {
        let key = (series.family.clone(), series.variant.clone());
        !series.points.is_empty() && most_points.get(&key).is_some_and(|most| *most > 1)
    };
    let (kept, alone): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|(series, _)| has_others(series));
    let mut known = HashSet::new();
    let ids = alone.into_iter().flat_map(|(_, ids)| ids);
    let left_out = ids.filter(|id| known.insert(id.clone())).collect();
    Picked {
        panels: panels(kept.into_iter().map(|(series, _)| series).collect()),
        left_out,
    }
}

/// A name without the part that says this size, so that all sizes of one family have the same.
fn family(name: &str, letter: char, size: u64) -> String {
    let own = format!("{letter}{size}");
    let mut found = false;
    let parts = name.split('-').filter(|part| {
        let is = !found && **part == own;
        found |= is;
        !is
    });
    parts.collect::<Vec<_>>().join("-")
}

/// One chart for all where they are few, else one a family, else one a family and variant, else as many as it takes.
fn panels(series: Vec<Series>) -> Vec<Vec<Series>> {
    if series.is_empty() {
        return Vec::new();
    }
    if series.len() <= MOST_SERIES {
        return vec![series];
    }
    let by_family = grouped(series, |series| series.family.clone());
    let by_variant = by_family.into_iter().flat_map(|family| {
        if family.len() <= MOST_SERIES {
            return vec![family];
        }
        grouped(family, |series| {
            (series.family.clone(), series.variant.clone())
        })
    });
    let chunks = by_variant.flat_map(|series| {
        let chunks = series.chunks(MOST_SERIES).map(<[_]>::to_vec);
        chunks.collect::<Vec<_>>()
    });
    chunks.collect()
}

/// Those of each key, in the order in which the keys come first.
fn grouped<K: std::hash::Hash + Eq>(
    series: Vec<Series>,
    key: impl Fn(&Series) -> K,
) -> Vec<Vec<Series>> {
    let mut groups: Vec<Vec<Series>> = Vec::new();
    let mut known = HashMap::new();
    for series in series {
        let at = *known.entry(key(&series)).or_insert_with(|| {
            groups.push(Vec::new());
            groups.len() - 1
        });
        groups[at].push(series);
    }
    groups
}

/// The cases that two or more runs have measured, kind by kind.
pub(super) fn common<'a>(runs: &[LabelledRun<'a>]) -> Vec<Common<'a>> {
    let mut all: Vec<Common> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (number, run) in runs.iter().enumerate() {
        for (case, measured) in measured(run.run) {
            let at = *known.entry(case.id()).or_insert_with(|| {
                all.push(Common {
                    id: case.id(),
                    kind: &case.kind,
                    of_runs: Vec::new(),
                });
                all.len() - 1
            });
            all[at].of_runs.push((number, measured));
        }
    }
    all.retain(|common| common.of_runs.len() > 1);
    all.sort_by_key(|common| kind_number(common.kind));
    all
}

/// The shares of a run's measured cases, kind by kind, and the cases that have none.
pub(super) fn shares(run: &Run) -> (Vec<Share<'_>>, Vec<String>) {
    let mut shares = Vec::new();
    let mut without = Vec::new();
    for (case, measured) in measured(run) {
        match (measured.share_of_peak, &measured.bound) {
            (Some(share), Some(bound)) => shares.push(Share {
                id: case.id(),
                kind: &case.kind,
                bound,
                share,
            }),
            _ => without.push(case.id()),
        }
    }
    shares.sort_by_key(|share| kind_number(share.kind));
    (shares, without)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::super::samples::{file, labels, of_runs};
    use super::*;

    #[test]
    fn series_are_of_one_family_and_points_alone_are_named() {
        let runs = of_runs(1);
        let picked = attention(&labels(&runs));
        assert_eq!(picked.panels.len(), 1);
        let [series] = picked.panels[0].as_slice() else {
            panic!("one series: {picked:?}");
        };
        assert_eq!(series.family, "attention-causal-h12-d64-f32");
        let lengths: Vec<f64> = series.points.iter().map(|point| point.0).collect();
        assert_eq!(lengths, [128.0, 1024.0, 4096.0]);
        assert_eq!(
            picked.left_out,
            ["attention-causal-t1024-h12-d64-f16"],
            "the one of another type"
        );
        let picked = decode(&labels(&runs));
        assert_eq!(picked.panels[0][0].points.len(), 2);
        assert!(picked.left_out.is_empty());
    }

    #[test]
    fn a_point_alone_stays_beside_another_runs_series() {
        let mut runs = of_runs(2);
        runs[1].1.runs[0].cases.truncate(1);
        let picked = attention(&labels(&runs));
        let counts: Vec<usize> = picked.panels[0].iter().map(|s| s.points.len()).collect();
        assert_eq!(counts, [3, 1]);
    }

    #[test]
    fn many_series_go_into_several_charts() {
        let runs = of_runs(8);
        assert_eq!(attention(&labels(&runs)).panels.len(), 1);
        let runs = of_runs(20);
        let panels = attention(&labels(&runs)).panels;
        let counts: Vec<usize> = panels.iter().map(Vec::len).collect();
        assert_eq!(counts, [8, 8, 4]);
        // Two variants of one family: a chart each.
        let mut runs = of_runs(5);
        for (_, file) in &mut runs {
            let more = file.runs[0].cases.clone().into_iter().map(|mut case| {
                case.variant = Some("matrices".into());
                case
            });
            let more: Vec<_> = more.collect();
            file.runs[0].cases.extend(more);
        }
        let panels = attention(&labels(&runs)).panels;
        let counts: Vec<usize> = panels.iter().map(Vec::len).collect();
        assert_eq!(counts, [5, 5]);
        assert!(panels[1].iter().all(|series| series.variant.is_some()));
    }

    #[test]
    fn sizes_are_taken_out_of_names_once() {
        assert_eq!(
            family("attention-causal-t64-h1-d64", 't', 64),
            "attention-causal-h1-d64"
        );
        assert_eq!(
            family("decode-k1024-h12-d64-f32", 'k', 1024),
            "decode-h12-d64-f32"
        );
        assert_eq!(family("anything", 't', 5), "anything");
        assert_eq!(family("t5-t5", 't', 5), "t5");
    }

    #[test]
    fn common_cases_are_those_of_two_runs() {
        let mut runs = of_runs(3);
        runs[2].1.runs[0].cases.remove(0);
        let labelled = labels(&runs);
        let common = common(&labelled);
        assert_eq!(common[0].of_runs.len(), 2);
        assert_eq!(common[1].of_runs.len(), 3);
        assert!(super::common(&labels(&of_runs(1))).is_empty());
    }

    #[test]
    fn shares_are_of_those_that_have_one() {
        let mut file = file(0);
        let cases = &mut file.runs[0].cases;
        if let crate::results::Outcome::Measured(measured) = &mut cases[0].outcome {
            measured.bound = None;
            measured.share_of_peak = None;
        }
        let first = cases[0].name.clone();
        let (shares, without) = shares(&file.runs[0]);
        assert_eq!(without, [first]);
        assert!(shares.len() > 3);
    }
}

//! The core's rules, with numbers worked out by hand.

#![allow(clippy::unwrap_used)]

use super::*;

/// One sequence, one head.
fn single<'a>(
    (q_len, kv_len, head_dim): (usize, usize, usize),
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
) -> AttentionInputs<'a> {
    AttentionInputs {
        batch: 1,
        heads: 1,
        q_len,
        kv_len,
        head_dim,
        q,
        k,
        v,
        ..Default::default()
    }
}

fn assert_close(got: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(got.len(), expected.len(), "{got:?} {expected:?}");
    for (g, e) in got.iter().zip(expected) {
        assert!(
            g == e || (g - e).abs() <= allowed,
            "{got:?} is not {expected:?}"
        );
    }
}

const COUNTING: [f64; 4] = [0.0, 1.0, 2.0, 3.0];

#[test]
fn equal_scores_give_means_of_what_is_seen() {
    struct Case {
        name: &'static str,
        lengths: (usize, usize),
        causal: Option<Alignment>,
        key_mask: Option<&'static [bool]>,
        out: &'static [f64],
        /// How many keys each row sees.
        seen: &'static [f64],
    }
    let cases = [
        Case {
            name: "full",
            lengths: (2, 4),
            causal: None,
            key_mask: None,
            out: &[1.5, 1.5],
            seen: &[4.0, 4.0],
        },
        Case {
            name: "causal, first key masked",
            lengths: (4, 4),
            causal: Some(Alignment::TopLeft),
            key_mask: Some(&[false, true, true, true]),
            out: &[0.0, 1.0, 1.5, 2.0],
            seen: &[0.0, 1.0, 2.0, 3.0],
        },
        Case {
            name: "fewer queries, bottom right",
            lengths: (2, 3),
            causal: Some(Alignment::BottomRight),
            key_mask: None,
            out: &[0.5, 1.0],
            seen: &[2.0, 3.0],
        },
        Case {
            name: "fewer queries, top left",
            lengths: (2, 3),
            causal: Some(Alignment::TopLeft),
            key_mask: None,
            out: &[0.0, 0.5],
            seen: &[1.0, 2.0],
        },
        Case {
            name: "more queries, bottom right",
            lengths: (4, 2),
            causal: Some(Alignment::BottomRight),
            key_mask: None,
            out: &[0.0, 0.0, 0.0, 0.5],
            seen: &[0.0, 0.0, 1.0, 2.0],
        },
        Case {
            name: "more queries, top left",
            lengths: (4, 2),
            causal: Some(Alignment::TopLeft),
            key_mask: None,
            out: &[0.0, 0.5, 0.5, 0.5],
            seen: &[1.0, 2.0, 2.0, 2.0],
        },
        Case {
            name: "all masked",
            lengths: (1, 3),
            causal: None,
            key_mask: Some(&[false; 3]),
            out: &[0.0],
            seen: &[0.0],
        },
    ];
    for case in cases {
        let (q_len, kv_len) = case.lengths;
        let inputs = AttentionInputs {
            causal: case.causal,
            key_mask: case.key_mask,
            ..single(
                (q_len, kv_len, 1),
                &[0.0; 4][..q_len],
                &[7.0; 4][..kv_len],
                &COUNTING[..kv_len],
            )
        };
        println!("{}", case.name);
        let outputs = attention(&inputs).unwrap();
        assert_close(&outputs.out, case.out, 1e-15);
        let lse: Vec<f64> = case.seen.iter().map(|n| n.ln()).collect();
        assert_close(&outputs.lse, &lse, 1e-15);
        for (row, seen) in case.seen.iter().enumerate() {
            let weights = &outputs.weights[row * kv_len..(row + 1) * kv_len];
            let nonzero = weights.iter().filter(|w| **w != 0.0).count();
            assert_eq!(nonzero as f64, *seen);
            assert_close(&[weights.iter().sum()], &[seen.min(1.0)], 1e-15);
        }
    }
}

#[test]
fn the_maximum_is_subtracted_and_has_no_floor() {
    let v = [10.0, 20.0, 30.0];
    for (offset, factor) in [(0.0, 1.0), (1e5, 1.0), (-1e5, 1.0), (0.0, 1e300)] {
        let k = [200.0, 0.0, -200.0].map(|k| offset + factor * k);
        let outputs = attention(&single((1, 3, 1), &[1.0], &k, &v)).unwrap();
        assert_close(&outputs.out, &[10.0], 1e-12);
        assert_close(&outputs.weights, &[1.0, 0.0, 0.0], 1e-80);
        assert_eq!(outputs.lse, [k[0]]);
    }
}

#[test]
fn the_scale_is_used_as_given() {
    let mut k = [0.0; 32];
    k[..16].fill(1.0);
    let mut v = [0.0; 32];
    v[..16].fill(1.0);
    for (scale, expected) in [
        (None, 0.982_013_790_037_908_4),
        (Some(1.0), 0.999_999_887_464_837_9),
        (Some(0.0), 0.5),
        (Some(-0.25), 0.017_986_209_962_091_56),
    ] {
        let inputs = AttentionInputs {
            scale,
            ..single((1, 2, 16), &[1.0; 16], &k, &v)
        };
        let outputs = attention(&inputs).unwrap();
        assert_close(&outputs.out, &[expected; 16], 1e-15);
        assert_close(&outputs.weights, &[expected, 1.0 - expected], 1e-15);
    }
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let inputs = AttentionInputs {
            scale: Some(scale),
            ..single((1, 2, 16), &[1.0; 16], &k, &v)
        };
        assert!(matches!(
            attention(&inputs),
            Err(Error::Parameter {
                parameter: "scale",
                ..
            })
        ));
    }
}

#[test]
fn a_hidden_key_adds_nothing_whatever_lies_there() {
    let mask = [true, true, false];
    let clean = AttentionInputs {
        key_mask: Some(&mask),
        ..single((1, 3, 1), &[1.0], &[1.0, 2.0, 0.0], &[3.0, 4.0, 0.0])
    };
    let expected = attention(&clean).unwrap();
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let (k, v) = ([1.0, 2.0, poison], [3.0, 4.0, poison]);
        let masked = AttentionInputs {
            k: &k,
            v: &v,
            ..clean
        };
        assert_eq!(attention(&masked).unwrap(), expected);
        // Hidden by the causal rule from rows 0 and 1, seen by row 2.
        let causal = AttentionInputs {
            causal: Some(Alignment::TopLeft),
            ..single((3, 3, 1), &[1.0; 3], &k, &v)
        };
        let outputs = attention(&causal).unwrap();
        assert_eq!(outputs.out[1], expected.out[0]);
        assert_eq!(outputs.lse[1], expected.lse[0]);
        assert!(outputs.out[2].is_nan());
    }
}

#[test]
fn a_nan_query_poisons_its_own_row_alone() {
    let q = [0.0, f64::NAN, 0.0];
    let outputs = attention(&single((3, 2, 1), &q, &[1.0, 2.0], &[0.0, 1.0])).unwrap();
    assert_eq!((outputs.out[0], outputs.out[2]), (0.5, 0.5));
    assert_eq!(outputs.weights[..2], [0.5, 0.5]);
    assert_eq!(outputs.weights[4..], [0.5, 0.5]);
    assert!(outputs.out[1].is_nan() && outputs.lse[1].is_nan());
    assert!(outputs.weights[2..4].iter().all(|w| w.is_nan()));
}

#[test]
fn every_batch_and_head_reads_its_own_tokens() {
    // Scores are 0, so a row is the mean over its own sequence and head: v = 100 b + 10 h + d + {0, 2}.
    let (batch, heads, q_len, kv_len, head_dim) = (2, 3, 1, 2, 2);
    let mut v = Vec::new();
    for b in 0..batch {
        for j in 0..kv_len {
            for h in 0..heads {
                for d in 0..head_dim {
                    v.push((100 * b + 10 * h + d + 2 * j) as f64);
                }
            }
        }
    }
    let mask = [true, true, true, false];
    let inputs = AttentionInputs {
        batch,
        heads,
        q_len,
        kv_len,
        head_dim,
        q: &[0.0; 12],
        k: &[1.0; 24],
        v: &v,
        key_mask: Some(&mask),
        ..Default::default()
    };
    let outputs = attention(&inputs).unwrap();
    let expected = [
        1.0, 2.0, 11.0, 12.0, 21.0, 22.0, // batch 0: both keys
        100.0, 101.0, 110.0, 111.0, 120.0, 121.0, // batch 1: the first key
    ];
    assert_eq!(outputs.out, expected);
}

#[test]
fn rows_and_the_lean_form_agree_with_the_whole() {
    let (batch, heads, q_len, kv_len, head_dim) = (2, 2, 3, 4, 2);
    let wave = |n: usize, f: f64| (0..n).map(|i| (i as f64 * f).sin()).collect::<Vec<_>>();
    let (q, k, v) = (wave(24, 0.7), wave(32, 1.3), wave(32, 2.1));
    let inputs = AttentionInputs {
        batch,
        heads,
        q_len,
        kv_len,
        head_dim,
        q: &q,
        k: &k,
        v: &v,
        causal: Some(Alignment::BottomRight),
        ..Default::default()
    };
    let whole = attention(&inputs).unwrap();
    let lean = attention_without_weights(&inputs).unwrap();
    assert_eq!((&lean.out, &lean.lse), (&whole.out, &whole.lse));
    assert!(lean.weights.is_empty());
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..q_len {
                let row = attention_row(&inputs, b, h, i).unwrap();
                let index = (b * heads + h) * q_len + i;
                let start = ((b * q_len + i) * heads + h) * head_dim;
                assert_eq!(row.lse, whole.lse[index]);
                assert_eq!(row.out, whole.out[start..start + head_dim]);
                assert_eq!(
                    row.weights,
                    whole.weights[index * kv_len..(index + 1) * kv_len]
                );
            }
        }
    }
    for (b, h, i) in [(2, 0, 0), (0, 2, 0), (0, 0, 3)] {
        assert!(matches!(
            attention_row(&inputs, b, h, i),
            Err(Error::Parameter { .. })
        ));
    }
}

#[test]
fn empty_axes_work() {
    let no_keys = attention(&single((2, 0, 3), &[1.0; 6], &[], &[])).unwrap();
    assert_eq!(no_keys.out, [0.0; 6]);
    assert_eq!(no_keys.lse, [f64::NEG_INFINITY; 2]);
    assert!(no_keys.weights.is_empty());

    let no_queries = attention(&single((0, 2, 3), &[], &[1.0; 6], &[1.0; 6])).unwrap();
    assert!(no_queries.out.is_empty() && no_queries.lse.is_empty());

    for (batch, heads) in [(0, 2), (2, 0), (0, usize::MAX)] {
        let inputs = AttentionInputs {
            batch,
            heads,
            q_len: usize::MAX,
            kv_len: usize::MAX,
            head_dim: 3,
            causal: Some(Alignment::BottomRight),
            ..Default::default()
        };
        assert!(attention(&inputs).unwrap().out.is_empty());
        assert!(attention_without_weights(&inputs).unwrap().lse.is_empty());
        assert!(attention_row(&inputs, 0, 0, 0).is_err());
    }
}

#[test]
fn each_wrong_argument_is_named() {
    let good = single((2, 3, 2), &[0.0; 4], &[0.0; 6], &[0.0; 6]);
    let named = |inputs: AttentionInputs| match attention(&inputs) {
        Err(Error::Shape { argument, .. }) => argument,
        Err(Error::Parameter { parameter, .. }) => parameter.into(),
        other => format!("{other:?}"),
    };
    assert!(attention(&good).is_ok());
    let long = [0.0; 7];
    assert_eq!(named(AttentionInputs { q: &long, ..good }), "q");
    assert_eq!(named(AttentionInputs { k: &long, ..good }), "k");
    assert_eq!(named(AttentionInputs { v: &long, ..good }), "v");
    let key_mask = Some(&[true; 2][..]);
    assert_eq!(named(AttentionInputs { key_mask, ..good }), "key_mask");
    let head_dim = 0;
    assert_eq!(named(AttentionInputs { head_dim, ..good }), "head_dim");
    let heads = usize::MAX;
    assert_eq!(named(AttentionInputs { heads, ..good }), "q");
}

//! The core's rules, with numbers worked out by hand.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::reference::testing::{assert_close, counting, single, wave};
use crate::reference::{Alignment, Broadcast, MergeInputs, Partial, merge};

const COUNTING: [f64; 4] = [0.0, 1.0, 2.0, 3.0];

fn bottom_right<'a>() -> Rules<'a> {
    Rules {
        causal: true,
        alignment: Some(Alignment::BottomRight),
        ..Default::default()
    }
}

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
            rules: Rules {
                causal: case.causal.is_some(),
                alignment: case.causal,
                mask: case.key_mask.map(|values| Broadcast {
                    values,
                    shape: [1, 1, 1, kv_len],
                }),
                ..Default::default()
            },
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
    let scaled = |scale| Rules {
        scale,
        ..Default::default()
    };
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
            rules: scaled(scale),
            ..single((1, 2, 16), &[1.0; 16], &k, &v)
        };
        let outputs = attention(&inputs).unwrap();
        assert_close(&outputs.out, &[expected; 16], 1e-15);
        assert_close(&outputs.weights, &[expected, 1.0 - expected], 1e-15);
    }
    for scale in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let inputs = AttentionInputs {
            rules: scaled(Some(scale)),
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
        rules: Rules {
            mask: Some(Broadcast {
                values: &mask,
                shape: [1, 1, 1, 3],
            }),
            ..Default::default()
        },
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
            rules: Rules {
                causal: true,
                ..Default::default()
            },
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
        rules: Rules {
            mask: Some(Broadcast {
                values: &mask,
                shape: [batch, 1, 1, kv_len],
            }),
            ..Default::default()
        },
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
        rules: bottom_right(),
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
            rules: bottom_right(),
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
    let value_dim = Some(3);
    assert_eq!(named(AttentionInputs { value_dim, ..good }), "v");
    let value_dim = Some(0);
    assert_eq!(named(AttentionInputs { value_dim, ..good }), "value_dim");
    for kv_heads in [Some(0), Some(2), Some(usize::MAX)] {
        assert_eq!(named(AttentionInputs { kv_heads, ..good }), "kv_heads");
    }
    let head_dim = 0;
    assert_eq!(named(AttentionInputs { head_dim, ..good }), "head_dim");
    let heads = usize::MAX;
    assert_eq!(named(AttentionInputs { heads, ..good }), "q");
}

#[test]
fn groups_of_heads_share_keys_and_values() {
    // Values of two dimensions, queries and keys of one.
    let outputs = attention(&AttentionInputs {
        heads: 4,
        kv_heads: Some(2),
        value_dim: Some(2),
        ..single((1, 1, 1), &[0.0; 4], &[1.0; 2], &[1.0, -1.0, 2.0, -2.0])
    });
    let expected = [1.0, -1.0, 1.0, -1.0, 2.0, -2.0, 2.0, -2.0];
    assert_eq!(outputs.unwrap().out, expected);

    // Keys too: as if each head had its own copy.
    let (q, k, v) = (wave(24, 0.7), wave(16, 1.3), wave(16, 2.1));
    let shared = AttentionInputs {
        heads: 4,
        kv_heads: Some(2),
        ..single((3, 4, 2), &q, &k, &v)
    };
    let copied = |tensor: &[f64]| -> Vec<f64> {
        let heads = tensor.chunks(2).flat_map(|head| [head, head]);
        heads.flatten().copied().collect()
    };
    let (k, v) = (copied(&k), copied(&v));
    let own = AttentionInputs {
        kv_heads: None,
        k: &k,
        v: &v,
        ..shared
    };
    assert_eq!(attention(&shared).unwrap(), attention(&own).unwrap());
    assert_eq!(
        scores(&shared, Stage::Products).unwrap(),
        scores(&own, Stage::Products).unwrap()
    );
}

#[test]
fn scores_are_what_the_weights_are_made_of() {
    let (q, k) = (wave(6, 0.7), wave(8, 1.3));
    let inputs = AttentionInputs {
        rules: Rules {
            softcap: Some(0.5),
            ..bottom_right()
        },
        ..single((3, 4, 2), &q, &k, &k)
    };
    let outputs = attention(&inputs).unwrap();
    let scores = scores(&inputs, Stage::Masked).unwrap();
    for (row, lse) in outputs.lse.iter().enumerate() {
        let row = row * 4..(row + 1) * 4;
        let weights: Vec<f64> = scores[row.clone()]
            .iter()
            .map(|s| (s - lse).exp())
            .collect();
        assert_close(&outputs.weights[row], &weights, 1e-15);
    }
    // Of a problem without values, and of no pairs at all.
    assert!(super::scores(&AttentionInputs { v: &[], ..inputs }, Stage::Capped).is_ok());
    let none = single((usize::MAX, 0, 1), &[], &[], &[]);
    assert!(
        super::scores(&AttentionInputs { heads: 0, ..none }, Stage::Products)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn parts_merge_to_the_whole() {
    let (batch, heads, q_len, kv_len, value_dim) = (2, 4, 3, 7, 3);
    let (q, k, v) = (wave(48, 0.7), wave(56, 1.3), wave(84, 2.1));
    let rules = Rules {
        slopes: Some(&[0.5, 0.25, 0.125, 0.0]),
        kv_lens: Some(&[7, 4]),
        sinks: Some(&[0.0, 1.0, -1.0, f64::NEG_INFINITY]),
        ..bottom_right()
    };
    let whole = AttentionInputs {
        batch,
        heads,
        kv_heads: Some(2),
        q_len,
        kv_len,
        head_dim: 2,
        value_dim: Some(value_dim),
        q: &q,
        k: &k,
        v: &v,
        rules,
    };
    let expected = attention(&whole).unwrap();
    for splits in [&[0, 7][..], &[0, 3, 7], &[0, 0, 1, 5, 6, 7]] {
        let parts: Vec<AttentionOutputs> = splits
            .windows(2)
            .enumerate()
            .map(|(part, keys)| {
                let rules = Rules {
                    keys: Some((keys[0], keys[1])),
                    // In one part only.
                    sinks: rules.sinks.filter(|_| part == 0),
                    ..rules
                };
                attention_without_weights(&AttentionInputs { rules, ..whole }).unwrap()
            })
            .collect();
        let parts: Vec<Partial> = parts
            .iter()
            .map(|part| Partial {
                out: &part.out,
                lse: &part.lse,
            })
            .collect();
        let inputs = MergeInputs {
            batch,
            q_len,
            heads,
            value_dim,
            parts: &parts,
        };
        let (out, lse) = merge(&inputs).unwrap();
        assert_close(&out, &expected.out, 1e-14);
        assert_close(&lse, &expected.lse, 1e-14);
    }
}

#[test]
fn packed_sequences_are_as_each_alone() {
    let (heads, q_len, kv_len) = (4, 3, 5);
    let (cu_q, cu_k) = ([0, 2, 2, 5, 6], [0, 5, 7, 7, 10]);
    let (q, k, v) = (wave(6 * 8, 0.7), wave(10 * 4, 1.3), wave(10 * 6, 2.1));
    let mask: Vec<bool> = (0..4 * kv_len).map(|index| index % 4 != 1).collect();
    let rules = Rules {
        slopes: Some(&[0.5, 0.25, 0.125, 0.0]),
        sinks: Some(&[0.0, 1.0, -1.0, f64::NEG_INFINITY]),
        mask: Some(Broadcast {
            values: &mask,
            shape: [4, 1, 1, kv_len],
        }),
        kv_lens: Some(&[4, 5, 5, 5]),
        q_lens: Some(&[3, 3, 2, 3]),
        ..bottom_right()
    };
    let packed = AttentionInputs {
        batch: 4,
        heads,
        kv_heads: Some(2),
        q_len,
        kv_len,
        head_dim: 2,
        value_dim: Some(3),
        q: &q,
        k: &k,
        v: &v,
        rules,
    };
    let got = attention_packed(&packed, &cu_q, &cu_k).unwrap();
    assert_eq!((got.out.len(), got.lse.len()), (6 * 12, 6 * 4));
    let mut left = got.weights.clone();
    for b in 0..4 {
        let (queries, keys) = (cu_q[b]..cu_q[b + 1], cu_k[b]..cu_k[b + 1]);
        let lens = [[4, 2, 0, 3][b], [2, 0, 2, 1][b]];
        let mask = &mask[b * kv_len..][..keys.len()];
        let alone = AttentionInputs {
            batch: 1,
            q_len: queries.len(),
            kv_len: keys.len(),
            q: &q[queries.start * 8..queries.end * 8],
            k: &k[keys.start * 4..keys.end * 4],
            v: &v[keys.start * 6..keys.end * 6],
            rules: Rules {
                mask: Some(Broadcast {
                    values: mask,
                    shape: [1, 1, 1, keys.len()],
                }),
                kv_lens: Some(&lens[..1]),
                q_lens: Some(&lens[1..]),
                ..rules
            },
            ..packed
        };
        let expected = attention(&alone).unwrap();
        assert_eq!(got.out[queries.start * 12..queries.end * 12], expected.out);
        for h in 0..heads {
            for i in 0..queries.len() {
                let lse = got.lse[(queries.start + i) * heads + h];
                assert_eq!(lse, expected.lse[h * queries.len() + i]);
                let here = ((b * heads + h) * q_len + i) * kv_len..;
                let there = (h * queries.len() + i) * keys.len()..;
                let here = &mut left[here][..keys.len()];
                assert_eq!(here, &expected.weights[there][..keys.len()]);
                here.fill(0.0);
            }
        }
    }
    assert!(left.iter().all(|weight| *weight == 0.0), "past the ends");
}

#[test]
fn each_wrong_end_of_packed_sequences_is_named() {
    let v = counting(4);
    let inputs = AttentionInputs {
        batch: 2,
        ..single((2, 3, 1), &v[..3], &v, &v)
    };
    let named =
        |inputs: &AttentionInputs, q: &[usize], k: &[usize]| match attention_packed(inputs, q, k) {
            Ok(_) => String::new(),
            Err(Error::Shape { argument, .. }) => argument,
            Err(Error::Parameter { parameter, .. }) => parameter.into(),
            Err(other) => other.to_string(),
        };
    assert_eq!(named(&inputs, &[0, 1, 3], &[0, 1, 4]), "");
    for wrong in [
        &[][..],
        &[0],
        &[0, 3],
        &[0, 1, 3, 3],
        &[1, 1, 3],
        &[0, 3, 3],
        &[0, 2, 1],
        &[0, usize::MAX, 3],
    ] {
        assert_eq!(named(&inputs, wrong, &[0, 1, 4]), "cu_seqlens_q");
    }
    assert_eq!(named(&inputs, &[0, 1, 3], &[0, 0, 4]), "cu_seqlens_k");
    assert_eq!(named(&inputs, &[0, 1, 2], &[0, 1, 4]), "q");
    assert_eq!(named(&inputs, &[0, 1, 3], &[0, 1, 3]), "k");
    let causal = AttentionInputs {
        rules: Rules {
            causal: true,
            ..Default::default()
        },
        ..inputs
    };
    assert_eq!(named(&causal, &[0, 1, 3], &[0, 1, 4]), "alignment");
    // No sequences; no heads of any number of tokens.
    let none = AttentionInputs::default();
    let none = AttentionInputs {
        head_dim: 1,
        ..none
    };
    assert_eq!(named(&none, &[0], &[0]), "");
    let max = usize::MAX;
    let tokens = AttentionInputs {
        batch: 1,
        q_len: max,
        kv_len: max,
        ..none
    };
    assert_eq!(named(&tokens, &[0, max], &[0, max]), "");
    let huge = AttentionInputs { batch: max, ..none };
    assert_eq!(named(&huge, &[0], &[0]), "cu_seqlens_q");
}

//! Each rule, with numbers worked out by hand, and where the rules meet.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::reference::testing::{assert_close, counting, single, wave};
use crate::reference::{AttentionInputs, Stage, attention, attention_row, scores};

const NONE: f64 = f64::NEG_INFINITY;

/// What equal scores give: the mean of the positions that each row sees, 0 where it sees none.
fn means(q_len: usize, kv_len: usize, rules: Rules) -> Vec<f64> {
    let (q, k, v) = (vec![0.0; q_len], vec![1.0; kv_len], counting(kv_len));
    let inputs = AttentionInputs {
        rules,
        ..single((q_len, kv_len, 1), &q, &k, &v)
    };
    attention(&inputs).unwrap().out
}

/// What one row of no query gives: the rules' own part of its scores.
fn own_scores(q_len: usize, kv_len: usize, rules: Rules) -> Vec<f64> {
    let (q, k) = (vec![0.0; q_len], vec![1.0; kv_len]);
    let inputs = AttentionInputs {
        rules,
        ..single((q_len, kv_len, 1), &q, &k, &[])
    };
    scores(&inputs, Stage::Masked).unwrap()
}

fn aligned<'a>(alignment: Alignment) -> Rules<'a> {
    Rules {
        alignment: Some(alignment),
        ..Default::default()
    }
}

#[test]
fn a_mask_of_keys_longer_than_a_tile_is_a_mean_of_the_rest() {
    let mask: Vec<bool> = (0..192).map(|key| key >= 130).collect();
    let mask = Some(Broadcast {
        values: &mask,
        shape: [1, 1, 1, 192],
    });
    let rules = Rules {
        mask,
        ..Default::default()
    };
    assert_close(&means(2, 192, rules), &[160.5; 2], 1e-12);
}

#[test]
fn masks_and_biases_broadcast_along_axes_of_1() {
    let (batch, heads, q_len, kv_len) = (2, 3, 2, 4);
    let (q, k) = ([0.0; 12], [0.0; 24]);
    let inputs = AttentionInputs {
        batch,
        heads,
        q_len,
        kv_len,
        head_dim: 1,
        q: &q,
        k: &k,
        ..Default::default()
    };
    let full = [batch, heads, q_len, kv_len];
    for set in 0..16 {
        let shape = [0, 1, 2, 3].map(|axis| if set >> axis & 1 == 1 { full[axis] } else { 1 });
        let values = counting(shape.iter().product());
        let hides: Vec<bool> = values.iter().map(|value| value % 3.0 != 0.0).collect();
        let rules = Rules {
            bias: Some(Broadcast {
                values: &values,
                shape,
            }),
            mask: Some(Broadcast {
                values: &hides,
                shape,
            }),
            ..Default::default()
        };
        let got = scores(&AttentionInputs { rules, ..inputs }, Stage::Masked).unwrap();
        for (flat, got) in got.iter().enumerate() {
            let index = [flat / 24, flat / 8 % 3, flat / 4 % 2, flat % 4];
            let [b, h, i, j] = [0, 1, 2, 3].map(|axis| index[axis] % shape[axis]);
            let at = ((b * shape[1] + h) * shape[2] + i) * shape[3] + j;
            let expected = if at % 3 == 0 { NONE } else { at as f64 };
            assert_eq!(*got, expected, "{shape:?} {index:?}");
        }
    }
}

#[test]
fn a_bias_of_the_lowest_number_everywhere_changes_nothing() {
    for lowest in [f64::from(f32::MIN), f64::MIN, -1e4] {
        let bias = Some(Broadcast {
            values: &[lowest],
            shape: [1; 4],
        });
        let rules = Rules {
            bias,
            ..Default::default()
        };
        assert_close(&means(1, 5, rules), &[2.0], 1e-15);
    }
}

#[test]
fn windows_count_from_the_own_key() {
    use Alignment::{BottomRight, TopLeft};
    let window = |alignment, window_left, window_right| Rules {
        window_left,
        window_right,
        ..aligned(alignment)
    };
    let causal = Rules {
        causal: true,
        window_left: Some(3),
        ..Default::default()
    };
    assert_close(&means(6, 6, causal), &[0.0, 0.5, 1.0, 1.5, 2.5, 3.5], 1e-15);
    for (q_len, kv_len, rules, expected) in [
        (
            3,
            3,
            window(TopLeft, Some(0), Some(0)),
            &[0.0, 1.0, 2.0][..],
        ),
        (3, 3, window(TopLeft, None, Some(1)), &[0.5, 1.0, 1.0]),
        (3, 3, window(TopLeft, Some(1), None), &[1.0, 1.0, 1.5]),
        (2, 5, window(BottomRight, Some(1), Some(0)), &[2.5, 3.5]),
        (2, 5, window(TopLeft, Some(1), Some(0)), &[0.0, 0.5]),
        // Own keys -2, -1, 0, and 0, 1, 2 of one key: windows that lie outside the keys see none.
        (3, 1, window(BottomRight, None, Some(0)), &[0.0; 3]),
        (3, 1, window(TopLeft, Some(0), None), &[0.0; 3]),
        (
            2,
            4,
            window(TopLeft, Some(usize::MAX), Some(usize::MAX)),
            &[1.5; 2],
        ),
        (
            4,
            2,
            window(BottomRight, Some(usize::MAX), Some(usize::MAX)),
            &[0.5; 4],
        ),
    ] {
        assert_close(&means(q_len, kv_len, rules), expected, 1e-15);
    }
    let seen = |rules| -> Vec<bool> { own_scores(3, 1, rules).iter().map(|s| *s == 0.0).collect() };
    assert_eq!(
        seen(window(BottomRight, None, Some(0))),
        [false, false, true]
    );
    assert_eq!(
        seen(window(BottomRight, None, Some(1))),
        [false, true, true]
    );
    assert_eq!(seen(window(TopLeft, Some(0), None)), [true, false, false]);
    // A window to the right does not bring back what the causal rule hides.
    let both = Rules {
        causal: true,
        ..window(TopLeft, None, Some(5))
    };
    assert_close(&means(3, 3, both), &[0.0, 0.5, 1.0], 1e-15);
}

#[test]
fn slopes_count_from_the_own_key_to_both_sides() {
    let rules = |alignment| Rules {
        slopes: Some(&[0.5]),
        ..aligned(alignment)
    };
    assert_eq!(
        own_scores(2, 4, rules(Alignment::BottomRight)),
        [-1.0, -0.5, 0.0, -0.5, -1.5, -1.0, -0.5, 0.0]
    );
    assert_eq!(
        own_scores(2, 4, rules(Alignment::TopLeft)),
        [0.0, -0.5, -1.0, -1.5, -0.5, 0.0, -0.5, -1.0]
    );
    // The offset is that of the sequence's own lengths: one query, three keys.
    let shorter = Rules {
        q_lens: Some(&[1]),
        kv_lens: Some(&[3]),
        ..rules(Alignment::BottomRight)
    };
    assert_eq!(
        own_scores(2, 4, shorter),
        [-1.0, -0.5, 0.0, NONE, NONE, NONE, NONE, NONE]
    );

    let own = |slopes| {
        let inputs = AttentionInputs {
            batch: 2,
            heads: 2,
            q: &[0.0; 8],
            k: &[0.0; 8],
            rules: Rules {
                slopes: Some(slopes),
                ..Default::default()
            },
            ..single((2, 2, 1), &[], &[], &[])
        };
        let scores = scores(&inputs, Stage::Masked).unwrap();
        [1, 5, 9, 13].map(|index| -scores[index])
    };
    assert_eq!(own(&[1.0, 2.0]), [1.0, 2.0, 1.0, 2.0]);
    assert_eq!(own(&[1.0, 2.0, 3.0, 4.0]), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_sink_takes_weight_and_gives_no_value() {
    let sinks = |sinks| Rules {
        sinks: Some(sinks),
        ..Default::default()
    };
    let k = [0.0; 3];
    let run = |rules| {
        let inputs = single((2, 3, 1), &[0.0; 2], &k, &[4.0; 3]);
        attention(&AttentionInputs { rules, ..inputs }).unwrap()
    };
    let outputs = run(sinks(&[0.0]));
    assert_close(&outputs.out, &[3.0; 2], 1e-15);
    assert_close(&outputs.lse, &[4.0_f64.ln(); 2], 1e-15);
    assert_close(&outputs.weights, &[0.25; 6], 1e-15);
    assert_eq!(run(sinks(&[1e6])).out, [0.0; 2]);
    assert_eq!(run(sinks(&[1e6])).lse, [1e6; 2]);
    assert_eq!(run(sinks(&[NONE])), run(Rules::default()));
    assert!(run(sinks(&[f64::NAN])).out[0].is_nan());

    // A row that sees no key gives the sink; one that is not there nothing.
    let outputs = run(Rules {
        kv_lens: Some(&[0]),
        q_lens: Some(&[1]),
        ..sinks(&[2.5])
    });
    assert_eq!(outputs.lse, [2.5, NONE]);
    assert!(
        [outputs.out, outputs.weights]
            .concat()
            .iter()
            .all(|x| *x == 0.0)
    );
}

#[test]
fn the_softcap_comes_before_the_bias_and_the_users_score_last() {
    let bias = Some(Broadcast {
        values: &[0.0, 2.0, 1.0],
        shape: [1, 1, 1, 3],
    });
    let rules = Rules {
        scale: Some(10.0),
        softcap: Some(2.0),
        bias,
        ..Default::default()
    };
    let inputs = AttentionInputs {
        rules,
        ..single(
            (1, 3, 1),
            &[1.0],
            &[1e3, 0.0, f64::NEG_INFINITY],
            &[1.0, 3.0, 0.0],
        )
    };
    let at = |stage, rules| scores(&AttentionInputs { rules, ..inputs }, stage).unwrap();
    assert_eq!(at(Stage::Products, rules), [1e4, 0.0, NONE]);
    assert_eq!(at(Stage::Capped, rules), [2.0, 0.0, -2.0]);
    assert_eq!(at(Stage::Masked, rules), [2.0, 2.0, -1.0]);
    assert_close(
        &scores(
            &AttentionInputs {
                rules: Rules {
                    scale: None,
                    ..rules
                },
                ..single((1, 3, 1), &[1.0], &[0.5, 1.0, -3.0], &[])
            },
            Stage::Capped,
        )
        .unwrap(),
        &[0.48983732480741826, 0.9242343145200195, -1.8102965072897328],
        1e-15,
    );
    let own = |score: f64, batch, head, query, key| {
        assert_eq!((batch, head, query), (0, 0, 0));
        score * 10.0 + key as f64
    };
    let rules = Rules {
        score: Some(&own),
        ..rules
    };
    assert_eq!(at(Stage::Capped, rules), [2.0, 0.0, -2.0]);
    assert_eq!(at(Stage::Masked, rules), [20.0, 21.0, -8.0]);
}

#[test]
fn the_users_rules_get_every_index() {
    let (q, k) = ([0.0; 12], [0.0; 24]);
    let code = |b, h, i, j| ((b * 3 + h) * 2 + i) * 4 + j;
    let score = |score: f64, b, h, i, j| score + code(b, h, i, j) as f64;
    let may_attend = |b, h, i, j| code(b, h, i, j) % 5 != 0;
    let inputs = AttentionInputs {
        batch: 2,
        heads: 3,
        q: &q,
        k: &k,
        rules: Rules {
            score: Some(&score),
            may_attend: Some(&may_attend),
            ..Default::default()
        },
        ..single((2, 4, 1), &[], &[], &[])
    };
    let got = scores(&inputs, Stage::Masked).unwrap();
    for (index, got) in got.iter().enumerate() {
        assert_eq!(*got, if index % 5 == 0 { NONE } else { index as f64 });
    }
}

#[test]
fn nothing_shows_of_a_key_that_any_rule_hides() {
    let (mask, bias) = ([true, true, false], [0.0, 0.0, NONE]);
    let may_attend = |_, _, _, key| key < 2;
    let score = |score: f64, _, _, _, key| if key < 2 { score } else { NONE };
    let none = Rules::default();
    let hiding = [
        Rules {
            kv_lens: Some(&[2]),
            ..none
        },
        Rules {
            keys: Some((0, 2)),
            ..none
        },
        Rules {
            may_attend: Some(&may_attend),
            ..none
        },
        Rules {
            score: Some(&score),
            ..none
        },
        Rules {
            mask: Some(Broadcast {
                values: &mask,
                shape: [1, 1, 1, 3],
            }),
            ..none
        },
        Rules {
            bias: Some(Broadcast {
                values: &bias,
                shape: [1, 1, 1, 3],
            }),
            ..none
        },
        Rules {
            window_right: Some(1),
            ..aligned(Alignment::TopLeft)
        },
        Rules {
            causal: true,
            window_right: Some(9),
            ..none
        },
    ];
    let expected = attention(&single((1, 2, 1), &[1.0], &[1.0, 2.0], &[3.0, 4.0])).unwrap();
    for rules in hiding {
        for poison in [f64::NAN, f64::INFINITY, NONE] {
            let (k, v) = ([1.0, 2.0, poison], [3.0, 4.0, poison]);
            // The row that is like the one above: the second of three where positions count.
            let (q_len, row) = if rules.causal { (3, 1) } else { (1, 0) };
            let inputs = AttentionInputs {
                rules,
                ..single((q_len, 3, 1), &[1.0; 3][..q_len], &k, &v)
            };
            let got = attention_row(&inputs, 0, 0, row).unwrap();
            assert_eq!(
                (&got.out, got.lse),
                (&expected.out, expected.lse[0]),
                "{rules:?}"
            );
            assert_eq!(got.weights[..2], expected.weights, "{rules:?}");
            assert_eq!(got.weights[2], 0.0, "{rules:?}");
        }
    }
}

#[test]
fn lengths_of_sequences_hide_what_lies_behind_them() {
    let (q, v) = ([0.0; 6], [counting(3), counting(3), counting(3)].concat());
    let inputs = AttentionInputs {
        batch: 3,
        q: &q,
        k: &[1.0; 9],
        v: &v,
        rules: Rules {
            causal: true,
            kv_lens: Some(&[0, 2, 3]),
            q_lens: Some(&[2, 1, 0]),
            ..aligned(Alignment::BottomRight)
        },
        ..single((2, 3, 1), &[], &[], &[])
    };
    let outputs = attention(&inputs).unwrap();
    // Sequence 1: one query on two keys, which sees both.
    assert_eq!(outputs.out, [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]);
    assert_close(
        &outputs.lse,
        &[NONE, NONE, 2.0_f64.ln(), NONE, NONE, NONE],
        1e-15,
    );
}

#[test]
fn parts_of_the_keys_keep_their_positions() {
    let rules = Rules {
        causal: true,
        keys: Some((1, 3)),
        slopes: Some(&[1.0]),
        ..aligned(Alignment::BottomRight)
    };
    assert_eq!(
        own_scores(2, 4, rules),
        [NONE, -1.0, 0.0, NONE, NONE, -2.0, -1.0, NONE]
    );
    let empty = Rules {
        keys: Some((4, 4)),
        ..Default::default()
    };
    assert_eq!(means(1, 4, empty), [0.0]);
}

#[test]
fn positions_need_an_alignment_where_lengths_can_differ() {
    let (q, k) = (wave(2, 1.0), wave(3, 1.0));
    let refused = |q_len, rules| {
        let inputs = AttentionInputs {
            rules,
            ..single((q_len, 2, 1), &q[..q_len], &k[..2], &k[..2])
        };
        let error = attention(&inputs).err().map(|error| error.to_string());
        error.is_some_and(|error| error.starts_with("alignment = none: "))
    };
    let none = Rules::default();
    for rules in [
        Rules {
            causal: true,
            ..none
        },
        Rules {
            window_left: Some(1),
            ..none
        },
        Rules {
            window_right: Some(1),
            ..none
        },
        Rules {
            slopes: Some(&[1.0]),
            ..none
        },
    ] {
        assert!(!refused(2, rules));
        assert!(refused(1, rules));
        assert!(refused(
            2,
            Rules {
                kv_lens: Some(&[2]),
                ..rules
            }
        ));
        assert!(refused(
            2,
            Rules {
                q_lens: Some(&[2]),
                ..rules
            }
        ));
        let given = aligned(Alignment::TopLeft).alignment;
        assert!(!refused(
            1,
            Rules {
                alignment: given,
                ..rules
            }
        ));
    }
    assert!(!refused(
        1,
        Rules {
            kv_lens: Some(&[1]),
            ..none
        }
    ));
}

#[test]
fn each_wrong_rule_is_named() {
    let named = |rules: Rules| {
        let inputs = AttentionInputs {
            rules,
            ..single((2, 3, 1), &[0.0; 2], &[0.0; 3], &[0.0; 3])
        };
        match attention(&inputs) {
            Err(Error::Shape { argument, .. }) => argument,
            Err(Error::Parameter { parameter, .. }) => parameter.into(),
            other => format!("{other:?}"),
        }
    };
    let none = aligned(Alignment::TopLeft);
    for cap in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(
            named(Rules {
                softcap: Some(cap),
                ..none
            }),
            "softcap"
        );
    }
    for (values, shape) in [
        (3, [1, 1, 2, 3]),
        (2, [1, 1, 1, 2]),
        (6, [2, 1, 1, 3]),
        (0, [1, 1, 0, 3]),
    ] {
        let (mask, bias) = (vec![true; values], vec![0.0; values]);
        let mask = Some(Broadcast {
            values: &mask,
            shape,
        });
        let bias = Some(Broadcast {
            values: &bias,
            shape,
        });
        assert_eq!(named(Rules { mask, ..none }), "mask");
        assert_eq!(named(Rules { bias, ..none }), "bias");
    }
    for lens in [&[][..], &[1, 1], &[4], &[usize::MAX]] {
        assert_eq!(
            named(Rules {
                kv_lens: Some(lens),
                ..none
            }),
            "kv_lens"
        );
        assert_eq!(
            named(Rules {
                q_lens: Some(lens),
                ..none
            }),
            "q_lens"
        );
    }
    for keys in [(2, 1), (0, 4), (usize::MAX, usize::MAX)] {
        assert_eq!(
            named(Rules {
                keys: Some(keys),
                ..none
            }),
            "keys"
        );
    }
    let two = Some(&[0.0; 2][..]);
    assert_eq!(
        named(Rules {
            slopes: two,
            ..none
        }),
        "slopes"
    );
    assert_eq!(named(Rules { sinks: two, ..none }), "sinks");
    let error = attention(&AttentionInputs {
        rules: Rules {
            keys: Some((0, 4)),
            ..none
        },
        ..single((2, 3, 1), &[0.0; 2], &[0.0; 3], &[0.0; 3])
    });
    assert_eq!(
        error.unwrap_err().to_string(),
        "keys = 0..4: must begin before it ends and lie within 0..3"
    );
}

#[test]
fn rules_can_be_shown() {
    let score = |score: f64, _, _, _, _| score;
    let rules = Rules {
        score: Some(&score),
        causal: true,
        ..Default::default()
    };
    let shown = format!("{rules:?}");
    assert!(
        shown.contains("causal: true") && shown.contains("score: Some(\"a closure\")"),
        "{shown}"
    );
}

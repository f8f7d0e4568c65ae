//! What the tests of the reference share.

use super::AttentionInputs;

/// One sequence, one head.
pub(super) fn single<'a>(
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

/// `n` values that differ.
pub(super) fn wave(n: usize, frequency: f64) -> Vec<f64> {
    (0..n).map(|i| (i as f64 * frequency).sin()).collect()
}

/// 0, 1, 2, and so on.
pub(super) fn counting(n: usize) -> Vec<f64> {
    (0..n).map(|i| i as f64).collect()
}

pub(super) fn assert_close(got: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(got.len(), expected.len(), "{got:?} {expected:?}");
    for (g, e) in got.iter().zip(expected) {
        assert!(
            g == e || (g - e).abs() <= allowed,
            "{got:?} is not {expected:?}"
        );
    }
}

//! The attention core: scores, softmax over the keys that a row may see, values.
//!
//! Two functions hold every rule: `may_attend` says which keys a row sees, `score` what a pair scores.

use super::{Axis, check_length, zeros};
use crate::error::{Error, Result};

/// Where the diagonal of a causal mask lies when there are not as many queries as keys.
///
/// `#` is a pair that may attend; rows are queries, columns are keys. The two agree where Tq = Tk.
///
/// ```text
///              TopLeft                BottomRight
///
/// Tq = 2       # . . .                # # # .
/// Tk = 4       # # . .                # # # #
///
/// Tq = 4       # .                    . .   (sees no key)
/// Tk = 2       # #                    . .   (sees no key)
///              # #                    # .
///              # #                    # #
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Row i sees keys `0..=i`.
    TopLeft,
    /// Row i sees keys `0..=i + Tk - Tq`: the last query sees every key. The one decoding wants.
    BottomRight,
}

/// What attention is computed from. Axes: batch B, queries Tq, keys Tk, heads H, head dimension D.
///
/// End a literal with `..Default::default()`, which is no mask and the default scale.
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionInputs<'a> {
    /// B.
    pub batch: usize,
    /// H.
    pub heads: usize,
    /// Tq.
    pub q_len: usize,
    /// Tk.
    pub kv_len: usize,
    /// D, at least 1.
    pub head_dim: usize,
    /// Queries, `(B, Tq, H, D)` contiguous.
    pub q: &'a [f64],
    /// Keys, `(B, Tk, H, D)` contiguous.
    pub k: &'a [f64],
    /// Values, `(B, Tk, H, D)` contiguous.
    pub v: &'a [f64],
    /// What `q·k` is multiplied with: `1/sqrt(D)` where `None`; 0 and negative values are used as given.
    pub scale: Option<f64>,
    /// A causal mask and where its diagonal lies.
    pub causal: Option<Alignment>,
    /// Which keys may be seen, `(B, Tk)`, true = may attend.
    pub key_mask: Option<&'a [bool]>,
}

/// What [`attention`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionOutputs {
    /// `(B, Tq, H, D)`.
    pub out: Vec<f64>,
    /// Natural-log log-sum-exp of each row's scores, `(B, H, Tq)`; -inf for a row that sees no key.
    pub lse: Vec<f64>,
    /// The probabilities, `(B, H, Tq, Tk)`; empty from [`attention_without_weights`].
    pub weights: Vec<f64>,
}

/// What [`attention_row`] gives: one query of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRow {
    /// `(D)`.
    pub out: Vec<f64>,
    /// Natural-log log-sum-exp of the row's scores; -inf for a row that sees no key.
    pub lse: f64,
    /// The probabilities, `(Tk)`.
    pub weights: Vec<f64>,
}

/// `out_i = sum_j softmax_j(scale * q_i·k_j) v_j` over the keys j that row i may see.
///
/// Shapes stand at [`AttentionInputs`] and [`AttentionOutputs`].
///
/// - A key that is not seen adds nothing, whatever lies there (NaN and infinity included).
/// - A row that sees no key gives output 0, `lse` -inf, weights 0.
/// - The softmax subtracts the row's maximum first, so that no score is too large. A NaN or +inf score at a
///   key that *is* seen makes that row NaN, and no other.
/// - A score of -inf has weight 0; a row that has no other score is as one that sees no key.
/// - Any of B, H, Tq, Tk may be 0.
///
/// # Errors
///
/// [`Error::Shape`] where a length is not what the shapes call for or a result cannot be allocated (the
/// weights grow with `Tq * Tk`); [`Error::Parameter`] where `scale` is NaN or infinite, or `head_dim` is 0.
///
/// ```
/// use wgpu_attention::reference::{Alignment, AttentionInputs, attention};
///
/// // All scores are 0: each row is the mean of the values that it sees.
/// let outputs = attention(&AttentionInputs {
///     batch: 1, heads: 1, q_len: 3, kv_len: 3, head_dim: 1,
///     q: &[0.0; 3], k: &[1.0; 3], v: &[0.0, 1.0, 2.0],
///     causal: Some(Alignment::TopLeft),
///     ..Default::default()
/// })?;
/// assert_eq!(outputs.out, [0.0, 0.5, 1.0]);
/// assert_eq!(outputs.lse[0], 0.0);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn attention(inputs: &AttentionInputs) -> Result<AttentionOutputs> {
    attend(inputs, true)
}

/// [`attention`] in memory that grows with Tq + Tk: `weights` is left empty.
///
/// # Errors
///
/// As [`attention`].
pub fn attention_without_weights(inputs: &AttentionInputs) -> Result<AttentionOutputs> {
    attend(inputs, false)
}

/// One row of [`attention`]: query `query` of head `head` of sequence `batch`.
///
/// # Errors
///
/// As [`attention`]; [`Error::Parameter`] where one of the three indices is out of range.
///
/// ```
/// use wgpu_attention::reference::{AttentionInputs, attention_row};
///
/// let row = attention_row(
///     &AttentionInputs {
///         batch: 1, heads: 1, q_len: 1, kv_len: 2, head_dim: 1,
///         q: &[1.0], k: &[0.0, 3.0_f64.ln()], v: &[0.0, 8.0],
///         ..Default::default()
///     },
///     0, 0, 0,
/// )?;
/// assert!((row.weights[1] - 0.75).abs() < 1e-15);
/// assert!((row.out[0] - 6.0).abs() < 1e-14);
/// assert!((row.lse - 4.0_f64.ln()).abs() < 1e-15);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn attention_row(
    inputs: &AttentionInputs,
    batch: usize,
    head: usize,
    query: usize,
) -> Result<AttentionRow> {
    let scale = check(inputs)?;
    check_index("batch", batch, inputs.batch)?;
    check_index("head", head, inputs.heads)?;
    check_index("query", query, inputs.q_len)?;

    let mut out = zeros("out", &[("head_dim", inputs.head_dim)])?;
    let mut weights = zeros("weights", &[("kv_len", inputs.kv_len)])?;
    let row = Row { batch, head, query };
    let lse = attend_row(inputs, scale, row, &mut out, &mut weights);
    Ok(AttentionRow { out, lse, weights })
}

/// Which row of the problem: one query of one head of one sequence.
#[derive(Clone, Copy)]
struct Row {
    batch: usize,
    head: usize,
    query: usize,
}

/// Whether `row` may see `key`: only if every rule allows it.
fn may_attend(inputs: &AttentionInputs, row: Row, key: usize) -> bool {
    let causal = match inputs.causal {
        None => true,
        Some(alignment) => {
            // Lengths of slices that exist, so far below i64::MAX.
            let offset = match alignment {
                Alignment::TopLeft => 0,
                Alignment::BottomRight => inputs.kv_len as i64 - inputs.q_len as i64,
            };
            key as i64 <= row.query as i64 + offset
        }
    };
    let unmasked = inputs
        .key_mask
        .is_none_or(|mask| mask[row.batch * inputs.kv_len + key]);
    causal && unmasked
}

/// What `row` and `key` score: `scale * q·k`.
fn score(inputs: &AttentionInputs, scale: f64, row: Row, key: usize) -> f64 {
    let q = token(
        inputs,
        inputs.q,
        inputs.q_len,
        row.batch,
        row.query,
        row.head,
    );
    let k = token(inputs, inputs.k, inputs.kv_len, row.batch, key, row.head);
    let mut dot = 0.0;
    for (a, b) in q.iter().zip(k) {
        dot += a * b;
    }
    scale * dot
}

/// The D values of one head of one token of a `(B, length, H, D)` tensor.
fn token<'a>(
    inputs: &AttentionInputs,
    tensor: &'a [f64],
    length: usize,
    batch: usize,
    token: usize,
    head: usize,
) -> &'a [f64] {
    let start = ((batch * length + token) * inputs.heads + head) * inputs.head_dim;
    &tensor[start..start + inputs.head_dim]
}

/// One row into `out` (D) and `weights` (Tk), whatever they held; returns the row's log-sum-exp.
fn attend_row(
    inputs: &AttentionInputs,
    scale: f64,
    row: Row,
    out: &mut [f64],
    weights: &mut [f64],
) -> f64 {
    out.fill(0.0);
    weights.fill(0.0);

    let seen: Vec<(usize, f64)> = (0..inputs.kv_len)
        .filter(|&key| may_attend(inputs, row, key))
        .map(|key| (key, score(inputs, scale, row, key)))
        .collect();
    // A score of -inf has weight 0, and where there is no other the row is as an empty one.
    if seen.iter().all(|(_, score)| *score == f64::NEG_INFINITY) {
        return f64::NEG_INFINITY;
    }

    // `max` passes a NaN over; the exponentials below bring it back into the sum.
    let mut maximum = f64::NEG_INFINITY;
    for &(_, score) in &seen {
        maximum = maximum.max(score);
    }
    let mut sum = 0.0;
    for &(key, score) in &seen {
        weights[key] = (score - maximum).exp();
        sum += weights[key];
    }
    for &(key, _) in &seen {
        weights[key] /= sum;
        let v = token(inputs, inputs.v, inputs.kv_len, row.batch, key, row.head);
        for (o, v) in out.iter_mut().zip(v) {
            *o += weights[key] * v;
        }
    }
    maximum + sum.ln()
}

/// Every row.
fn attend(inputs: &AttentionInputs, keep_weights: bool) -> Result<AttentionOutputs> {
    let scale = check(inputs)?;
    let AttentionInputs {
        batch,
        heads,
        q_len,
        kv_len,
        head_dim,
        ..
    } = *inputs;

    let mut out = zeros("out", &q_axes(inputs))?;
    let row_axes = [("batch", batch), ("heads", heads), ("q_len", q_len)];
    let mut lse = zeros("lse", &row_axes)?;
    let mut weights = Vec::new();
    let mut one_row = Vec::new();
    if keep_weights {
        let [b, h, q] = row_axes;
        weights = zeros("weights", &[b, h, q, ("kv_len", kv_len)])?;
    } else if !lse.is_empty() {
        one_row = zeros("weights", &[("kv_len", kv_len)])?;
    }

    for (index, lse) in lse.iter_mut().enumerate() {
        let row = Row {
            batch: index / (heads * q_len),
            head: index / q_len % heads,
            query: index % q_len,
        };
        let start = ((row.batch * q_len + row.query) * heads + row.head) * head_dim;
        let weights = if keep_weights {
            &mut weights[index * kv_len..(index + 1) * kv_len]
        } else {
            &mut one_row
        };
        *lse = attend_row(
            inputs,
            scale,
            row,
            &mut out[start..start + head_dim],
            weights,
        );
    }
    Ok(AttentionOutputs { out, lse, weights })
}

/// Checks everything before anything is read; returns the scale to use.
fn check(inputs: &AttentionInputs) -> Result<f64> {
    if inputs.head_dim == 0 {
        return Err(Error::parameter("head_dim", 0, "must be at least 1"));
    }
    let scale = inputs
        .scale
        .unwrap_or_else(|| 1.0 / (inputs.head_dim as f64).sqrt());
    if !scale.is_finite() {
        return Err(Error::parameter(
            "scale",
            scale,
            "must be finite; leave it unset for 1/sqrt(head_dim)",
        ));
    }
    check_length("q", &q_axes(inputs), inputs.q.len())?;
    check_length("k", &kv_axes(inputs), inputs.k.len())?;
    check_length("v", &kv_axes(inputs), inputs.v.len())?;
    if let Some(mask) = inputs.key_mask {
        let axes = [("batch", inputs.batch), ("kv_len", inputs.kv_len)];
        check_length("key_mask", &axes, mask.len())?;
    }
    Ok(scale)
}

fn check_index(parameter: &'static str, index: usize, length: usize) -> Result<()> {
    if index < length {
        Ok(())
    } else {
        Err(Error::parameter(
            parameter,
            index,
            format!("must be less than {length}, the length of that axis"),
        ))
    }
}

fn q_axes(inputs: &AttentionInputs) -> [Axis; 4] {
    [
        ("batch", inputs.batch),
        ("q_len", inputs.q_len),
        ("heads", inputs.heads),
        ("head_dim", inputs.head_dim),
    ]
}

fn kv_axes(inputs: &AttentionInputs) -> [Axis; 4] {
    [
        ("batch", inputs.batch),
        ("kv_len", inputs.kv_len),
        ("heads", inputs.heads),
        ("head_dim", inputs.head_dim),
    ]
}

#[cfg(test)]
mod tests;

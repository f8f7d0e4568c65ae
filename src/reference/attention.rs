//! The attention core: scores, softmax over the keys that a row may see, values.
//!
//! What happens to a score, and which pairs are hidden, stands in `rules.rs`.

use super::rules::{Row, Sequence};
use super::{Axis, Rules, check_length, zeros};
use crate::error::{Error, Result};

/// What attention is computed from. Axes: batch B, queries Tq, keys Tk, heads H, heads of keys and values
/// Hkv, head dimension D, value dimension Dv.
///
/// End a literal with `..Default::default()`: as many heads of keys and values as of queries, Dv = D, and the
/// default [`Rules`].
#[derive(Debug, Clone, Copy, Default)]
pub struct AttentionInputs<'a> {
    /// B.
    pub batch: usize,
    /// H.
    pub heads: usize,
    /// Hkv, H where `None`. H must be a multiple of it: query head h reads head `h / (H / Hkv)`.
    pub kv_heads: Option<usize>,
    /// Tq.
    pub q_len: usize,
    /// Tk.
    pub kv_len: usize,
    /// D, at least 1.
    pub head_dim: usize,
    /// Dv, at least 1; D where `None`.
    pub value_dim: Option<usize>,
    /// Queries, `(B, Tq, H, D)` contiguous.
    pub q: &'a [f64],
    /// Keys, `(B, Tk, Hkv, D)` contiguous.
    pub k: &'a [f64],
    /// Values, `(B, Tk, Hkv, Dv)` contiguous.
    pub v: &'a [f64],
    /// What happens to the scores, and which pairs are hidden.
    pub rules: Rules<'a>,
}

/// What [`attention`] gives.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionOutputs {
    /// `(B, Tq, H, Dv)`.
    pub out: Vec<f64>,
    /// Natural-log log-sum-exp of each row's scores and its sink, `(B, H, Tq)`; -inf for a row that sees no
    /// key and has no sink.
    pub lse: Vec<f64>,
    /// The probabilities, `(B, H, Tq, Tk)`; empty from [`attention_without_weights`].
    pub weights: Vec<f64>,
}

/// What [`attention_row`] gives: one query of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRow {
    /// `(Dv)`.
    pub out: Vec<f64>,
    /// Natural-log log-sum-exp of the row's scores and its sink; -inf for a row that sees no key and has no
    /// sink.
    pub lse: f64,
    /// The probabilities, `(Tk)`.
    pub weights: Vec<f64>,
}

/// `out_i = sum_j softmax_j(scale * q_i·k_j) v_j` over the keys j that row i may see, with the scores as
/// [`Rules`] make them.
///
/// Shapes stand at [`AttentionInputs`] and [`AttentionOutputs`].
///
/// - A key that is not seen adds nothing, whatever lies there (NaN and infinity included).
/// - A row that sees no key gives output 0 and weights 0, and for `lse` its sink, or -inf where it has none.
/// - The softmax subtracts the row's maximum first, so that no score is too large. A NaN or +inf score at a
///   key that *is* seen makes that row NaN, and no other.
/// - A score of -inf has weight 0; a row that has no other score is as one that sees no key.
/// - Any of B, H, Tq, Tk may be 0.
///
/// # Errors
///
/// [`Error::Shape`] where a length is not what the shapes call for or a result cannot be allocated (the
/// weights grow with `Tq * Tk`); [`Error::Parameter`] where `scale` is NaN or infinite, `head_dim` or
/// `value_dim` is 0, `heads` is no multiple of `kv_heads`, or a rule is not what [`Rules`] say it may be.
///
/// ```
/// use wgpu_attention::reference::{AttentionInputs, Rules, attention};
///
/// // All scores are 0: each row is the mean of the values that it sees.
/// let outputs = attention(&AttentionInputs {
///     batch: 1, heads: 1, q_len: 3, kv_len: 3, head_dim: 1,
///     q: &[0.0; 3], k: &[1.0; 3], v: &[0.0, 1.0, 2.0],
///     rules: Rules { causal: true, ..Default::default() },
///     ..Default::default()
/// })?;
/// assert_eq!(outputs.out, [0.0, 0.5, 1.0]);
/// assert_eq!(outputs.lse[0], 0.0);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn attention(inputs: &AttentionInputs) -> Result<AttentionOutputs> {
    Problem::new(inputs, None)?.attend(true)
}

/// [`attention`] in memory that grows with Tq + Tk: `weights` is left empty.
///
/// # Errors
///
/// As [`attention`].
pub fn attention_without_weights(inputs: &AttentionInputs) -> Result<AttentionOutputs> {
    Problem::new(inputs, None)?.attend(false)
}

/// [`attention`] of sequences that lie one after the other without gaps: sequence b's queries are
/// `cu_seqlens_q[b]..cu_seqlens_q[b + 1]` of all, its keys and values `cu_seqlens_k[b]..cu_seqlens_k[b + 1]`.
///
/// With B sequences, q is `(total_q, H, D)`, k `(total_k, Hkv, D)`, v `(total_k, Hkv, Dv)`; `q_len` and
/// `kv_len` are what the longest may have. [`Rules`] count within a sequence: their shapes and indices are
/// (sequence, head, position, position), Lq and Lk are the sequence's own lengths, or less where `q_lens` or
/// `kv_lens` say so.
///
/// Gives `out` `(total_q, H, Dv)`, `lse` `(total_q, H)`, `weights` `(B, H, q_len, kv_len)` with 0 past the
/// ends.
///
/// # Errors
///
/// As [`attention`]; [`Error::Shape`] where a `cu_seqlens` has not B + 1 values; [`Error::Parameter`] where
/// one does not begin at 0, falls, or has a sequence longer than `q_len` or `kv_len`.
///
/// ```
/// use wgpu_attention::reference::{AttentionInputs, attention_packed};
///
/// // One query on one key, then one on three.
/// let outputs = attention_packed(
///     &AttentionInputs {
///         batch: 2, heads: 1, q_len: 1, kv_len: 3, head_dim: 1,
///         q: &[0.0; 2], k: &[1.0; 4], v: &[7.0, 1.0, 2.0, 6.0],
///         ..Default::default()
///     },
///     &[0, 1, 2],
///     &[0, 1, 4],
/// )?;
/// assert!((outputs.out[0] - 7.0).abs() < 1e-14 && (outputs.out[1] - 3.0).abs() < 1e-14);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn attention_packed(
    inputs: &AttentionInputs,
    cu_seqlens_q: &[usize],
    cu_seqlens_k: &[usize],
) -> Result<AttentionOutputs> {
    Problem::new(inputs, Some([cu_seqlens_q, cu_seqlens_k]))?.attend(true)
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
    let problem = Problem::new(inputs, None)?;
    problem.check_values()?;
    check_index("batch", batch, inputs.batch)?;
    check_index("head", head, inputs.heads)?;
    check_index("query", query, inputs.q_len)?;

    let mut out = zeros("out", &[("value_dim", problem.value_dim)])?;
    let mut weights = zeros("weights", &[("kv_len", inputs.kv_len)])?;
    let row = Row {
        batch,
        head,
        query,
        sequence: problem.sequence(batch),
    };
    let lse = problem.attend_row(row, &mut out, &mut weights);
    Ok(AttentionRow { out, lse, weights })
}

/// How far [`scores`] takes the scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// `scale * q·k` of every pair, hidden or not.
    Products,
    /// After the softcap.
    Capped,
    /// What the softmax takes: after every rule, -inf where a pair is hidden.
    Masked,
}

/// The scores of [`attention`], `(B, H, Tq, Tk)`, after some or all of the [`Rules`]. `v` is not read.
///
/// # Errors
///
/// As [`attention`], but for `v`.
///
/// ```
/// use wgpu_attention::reference::{AttentionInputs, Rules, Stage, scores};
///
/// let inputs = AttentionInputs {
///     batch: 1, heads: 1, q_len: 2, kv_len: 2, head_dim: 1,
///     q: &[1.0, 2.0], k: &[3.0, 5.0],
///     rules: Rules { causal: true, ..Default::default() },
///     ..Default::default()
/// };
/// assert_eq!(scores(&inputs, Stage::Products)?, [3.0, 5.0, 6.0, 10.0]);
/// assert_eq!(scores(&inputs, Stage::Masked)?, [3.0, f64::NEG_INFINITY, 6.0, 10.0]);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
pub fn scores(inputs: &AttentionInputs, stage: Stage) -> Result<Vec<f64>> {
    let problem = Problem::new(inputs, None)?;
    let mut scores = zeros("scores", &problem.pair_axes())?;
    for row in problem.rows() {
        for key in 0..inputs.kv_len {
            scores[problem.pairs_start(row) + key] = match stage {
                Stage::Products => problem.product(row, key),
                Stage::Capped => inputs.rules.cap(problem.product(row, key)),
                Stage::Masked => problem.score(row, key).unwrap_or(f64::NEG_INFINITY),
            };
        }
    }
    Ok(scores)
}

/// Inputs that were checked (but for `v`), with what they leave unsaid.
struct Problem<'a> {
    inputs: &'a AttentionInputs<'a>,
    scale: f64,
    kv_heads: usize,
    value_dim: usize,
    /// Where the sequences begin and end among the queries and among the keys; `None` where each has as many
    /// as the axis.
    packed: Option<[&'a [usize]; 2]>,
    /// What comes before the axis of heads in q and out, and in k and v.
    q_tokens: Vec<Axis>,
    kv_tokens: Vec<Axis>,
}

impl<'a> Problem<'a> {
    /// Checks everything before anything is read.
    fn new(inputs: &'a AttentionInputs, packed: Option<[&'a [usize]; 2]>) -> Result<Self> {
        let AttentionInputs {
            batch,
            heads,
            q_len,
            kv_len,
            head_dim,
            ..
        } = *inputs;
        let value_dim = inputs.value_dim.unwrap_or(head_dim);
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 {
                return Err(Error::parameter(name, 0, "must be at least 1"));
            }
        }
        let kv_heads = inputs.kv_heads.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let rule = format!("heads = {heads} must be a multiple of it");
            return Err(Error::parameter("kv_heads", kv_heads, rule));
        }
        let scale = inputs.rules.scale;
        let scale = scale.unwrap_or_else(|| 1.0 / (head_dim as f64).sqrt());
        if !scale.is_finite() {
            return Err(Error::parameter(
                "scale",
                scale,
                "must be finite; leave it unset for 1/sqrt(head_dim)",
            ));
        }

        let (b, q, k) = (("batch", batch), ("q_len", q_len), ("kv_len", kv_len));
        let (q_tokens, kv_tokens) = match packed {
            None => (vec![b, q], vec![b, k]),
            Some([queries, keys]) => {
                let total_q = check_packed("cu_seqlens_q", queries, batch, q)?;
                let total_k = check_packed("cu_seqlens_k", keys, batch, k)?;
                (vec![("total_q", total_q)], vec![("total_k", total_k)])
            }
        };
        let problem = Problem {
            inputs,
            scale,
            kv_heads,
            value_dim,
            packed,
            q_tokens,
            kv_tokens,
        };
        let dim = ("head_dim", head_dim);
        check_length("q", &problem.q_axes(dim), inputs.q.len())?;
        check_length("k", &problem.kv_axes(dim), inputs.k.len())?;
        inputs.rules.check(problem.pair_axes(), packed.is_some())?;
        Ok(problem)
    }

    fn check_values(&self) -> Result<()> {
        let axes = self.kv_axes(("value_dim", self.value_dim));
        check_length("v", &axes, self.inputs.v.len())
    }

    /// The axes of q or out.
    fn q_axes(&self, last: Axis) -> Vec<Axis> {
        [&self.q_tokens[..], &[("heads", self.inputs.heads), last]].concat()
    }

    /// The axes of k or v.
    fn kv_axes(&self, last: Axis) -> Vec<Axis> {
        [&self.kv_tokens[..], &[("kv_heads", self.kv_heads), last]].concat()
    }

    /// The axes of scores and weights.
    fn pair_axes(&self) -> [Axis; 4] {
        [
            ("batch", self.inputs.batch),
            ("heads", self.inputs.heads),
            ("q_len", self.inputs.q_len),
            ("kv_len", self.inputs.kv_len),
        ]
    }

    /// Where a row of scores or weights starts.
    fn pairs_start(&self, row: Row) -> usize {
        let AttentionInputs {
            heads,
            q_len,
            kv_len,
            ..
        } = *self.inputs;
        ((row.batch * heads + row.head) * q_len + row.query) * kv_len
    }

    /// Where sequence `batch` lies and how long it is.
    fn sequence(&self, batch: usize) -> Sequence {
        let AttentionInputs {
            q_len,
            kv_len,
            rules,
            ..
        } = *self.inputs;
        let padded = |length| (batch * length, length);
        let within = |ends: &[usize]| (ends[batch], ends[batch + 1] - ends[batch]);
        let ((q_start, rows), (kv_start, keys)) = match self.packed {
            None => (padded(q_len), padded(kv_len)),
            Some([queries, keys]) => (within(queries), within(keys)),
        };
        Sequence {
            q_start,
            kv_start,
            rows,
            q_len: rules.q_lens.map_or(rows, |lens| lens[batch].min(rows)),
            kv_len: rules.kv_lens.map_or(keys, |lens| lens[batch].min(keys)),
        }
    }

    /// Every row of every head of every sequence.
    fn rows(&self) -> impl Iterator<Item = Row> {
        let AttentionInputs {
            batch,
            heads,
            q_len,
            ..
        } = *self.inputs;
        // Of no heads or queries there may be any number of sequences.
        let batch = if heads == 0 || q_len == 0 { 0 } else { batch };
        (0..batch).flat_map(move |batch| {
            let sequence = self.sequence(batch);
            (0..heads).flat_map(move |head| {
                (0..sequence.rows).map(move |query| Row {
                    batch,
                    head,
                    query,
                    sequence,
                })
            })
        })
    }

    /// The row's query, D values.
    fn query(&self, row: Row) -> &[f64] {
        let token = row.sequence.q_start + row.query;
        let start = (token * self.inputs.heads + row.head) * self.inputs.head_dim;
        &self.inputs.q[start..start + self.inputs.head_dim]
    }

    /// What k or v, of `dim` values for each head of each token, hold for `row` at `key`.
    fn at_key(&self, tensor: &'a [f64], dim: usize, row: Row, key: usize) -> &'a [f64] {
        let token = row.sequence.kv_start + key;
        let head = row.head / (self.inputs.heads / self.kv_heads);
        let start = (token * self.kv_heads + head) * dim;
        &tensor[start..start + dim]
    }

    /// `scale * q·k`.
    fn product(&self, row: Row, key: usize) -> f64 {
        let k = self.at_key(self.inputs.k, self.inputs.head_dim, row, key);
        let mut dot = 0.0;
        for (a, b) in self.query(row).iter().zip(k) {
            dot += a * b;
        }
        self.scale * dot
    }

    /// What `row` and `key` score after all rules; `None` where a rule hides the pair.
    fn score(&self, row: Row, key: usize) -> Option<f64> {
        let AttentionInputs { heads, rules, .. } = *self.inputs;
        if !rules.shows(row, key) {
            return None;
        }
        let score = rules.adjust(heads, row, key, rules.cap(self.product(row, key)));
        let hidden = rules.score.is_some() && score == f64::NEG_INFINITY;
        (!hidden).then_some(score)
    }

    /// One row into `out` (Dv) and `weights` (Tk), whatever they held; returns the row's log-sum-exp.
    fn attend_row(&self, row: Row, out: &mut [f64], weights: &mut [f64]) -> f64 {
        out.fill(0.0);
        weights.fill(0.0);
        if row.query >= row.sequence.q_len {
            return f64::NEG_INFINITY;
        }

        let seen: Vec<(usize, f64)> = (0..row.sequence.kv_len)
            .filter_map(|key| Some((key, self.score(row, key)?)))
            .collect();
        let sink = self.inputs.rules.sink(row);
        // A score of -inf has weight 0, and where there is no other the row is as an empty one.
        if seen.iter().all(|(_, score)| *score == f64::NEG_INFINITY) {
            return sink;
        }

        // `max` passes a NaN over; the exponentials below bring it back into the sum.
        let mut maximum = sink;
        for &(_, score) in &seen {
            maximum = maximum.max(score);
        }
        let mut sum = (sink - maximum).exp();
        for &(key, score) in &seen {
            weights[key] = (score - maximum).exp();
            sum += weights[key];
        }
        for &(key, _) in &seen {
            weights[key] /= sum;
            let v = self.at_key(self.inputs.v, self.value_dim, row, key);
            for (o, v) in out.iter_mut().zip(v) {
                *o += weights[key] * v;
            }
        }
        maximum + sum.ln()
    }

    /// Every row.
    fn attend(&self, keep_weights: bool) -> Result<AttentionOutputs> {
        self.check_values()?;
        let AttentionInputs {
            heads,
            q_len,
            kv_len,
            ..
        } = *self.inputs;
        let [b, h, q, _] = self.pair_axes();

        let mut out = zeros("out", &self.q_axes(("value_dim", self.value_dim)))?;
        let mut lse = match self.packed {
            None => zeros("lse", &[b, h, q])?,
            Some(_) => zeros("lse", &[self.q_tokens[0], h])?,
        };
        let mut weights = Vec::new();
        let mut one_row = Vec::new();
        if keep_weights {
            weights = zeros("weights", &self.pair_axes())?;
        } else if !lse.is_empty() {
            one_row = zeros("weights", &[("kv_len", kv_len)])?;
        }

        for row in self.rows() {
            let in_tokens = (row.sequence.q_start + row.query) * heads + row.head;
            let in_heads = (row.batch * heads + row.head) * q_len + row.query;
            let out = &mut out[in_tokens * self.value_dim..][..self.value_dim];
            let weights = if keep_weights {
                &mut weights[self.pairs_start(row)..][..kv_len]
            } else {
                &mut one_row
            };
            let index = if self.packed.is_some() {
                in_tokens
            } else {
                in_heads
            };
            lse[index] = self.attend_row(row, out, weights);
        }
        Ok(AttentionOutputs { out, lse, weights })
    }
}

/// Checks where packed sequences begin and end, none longer than `longest`; returns the end of the last.
fn check_packed(
    name: &'static str,
    ends: &[usize],
    batch: usize,
    (axis, longest): Axis,
) -> Result<usize> {
    let (Some(&first), Some(&last)) = (ends.first(), ends.last()) else {
        return Err(Error::shape(name, "batch + 1 values", "none"));
    };
    if ends.len() - 1 != batch {
        return Err(Error::shape(
            name,
            format_args!("batch + 1 values for batch {batch}"),
            ends.len(),
        ));
    }
    if first != 0 {
        return Err(Error::parameter(name, first, "must begin at 0"));
    }
    for pair in ends.windows(2) {
        let length = pair[1].checked_sub(pair[0]);
        if length.is_none_or(|length| length > longest) {
            return Err(Error::parameter(
                name,
                format_args!("{}, {}", pair[0], pair[1]),
                format!("must not fall, nor rise by more than {axis} = {longest}"),
            ));
        }
    }
    Ok(last)
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

#[cfg(test)]
mod tests;

//! What the scores go through on their way from `q·k` to the softmax, and which pairs are hidden.

use std::fmt;

use super::{Axis, check_length};
use crate::error::{Error, Result};

/// Where a query's own key lies when there are not as many queries as keys: positions are counted from it.
///
/// `#` is a pair that a causal mask lets attend; rows are queries, columns are keys. The two agree where
/// Lq = Lk.
///
/// ```text
///              TopLeft                BottomRight
///
/// Lq = 2       # . . .                # # # .
/// Lk = 4       # # . .                # # # #
///
/// Lq = 4       # .                    . .   (sees no key)
/// Lk = 2       # #                    . .   (sees no key)
///              # #                    # .
///              # #                    # #
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// Key i is query i's own.
    TopLeft,
    /// Key `i + Lk - Lq` is query i's own: the last query's is the last key. The one decoding wants.
    BottomRight,
}

/// One value for each pair of a query and a key, or for many pairs at once.
#[derive(Debug, Clone, Copy)]
pub struct Broadcast<'a, T> {
    /// As many as `shape` calls for, contiguous.
    pub values: &'a [T],
    /// `(B, H, Tq, Tk)`, where each axis may be 1 instead: the same values all along it. A mask of keys is
    /// `[B, 1, 1, Tk]`.
    pub shape: [usize; 4],
}

impl<T: Copy> Broadcast<'_, T> {
    /// The value at `(batch, head, query, key)`.
    fn at(&self, index: [usize; 4]) -> T {
        let mut flat = 0;
        for (length, index) in self.shape.into_iter().zip(index) {
            flat = flat * length + if length == 1 { 0 } else { index };
        }
        self.values[flat]
    }

    /// An error unless each axis is `full`'s or 1 and there are as many values as that makes.
    fn check(&self, argument: &str, full: [Axis; 4]) -> Result<()> {
        let mut axes = full;
        for ((_, length), own) in axes.iter_mut().zip(self.shape) {
            if own != *length && own != 1 {
                let lengths: Vec<String> =
                    full.iter().map(|(name, n)| format!("{name} {n}")).collect();
                return Err(Error::shape(
                    argument,
                    format_args!("the shape ({}), any axis of it 1", lengths.join(", ")),
                    format_args!("{:?}", self.shape),
                ));
            }
            *length = own;
        }
        check_length(argument, &axes, self.values.len())
    }
}

/// The rules of attention. Axes: batch B, heads H, queries Tq, keys Tk; of sequence b only Lq of the queries
/// and Lk of the keys are there (all of them without `q_lens` and `kv_lens`).
///
/// A score goes through them in this order:
///
/// 1. `scale`
/// 2. `softcap`
/// 3. `slopes` and `bias`
/// 4. `score`
/// 5. -inf where the pair is hidden: by `causal`, `window_left`, `window_right`, `mask`, `kv_lens`, `q_lens`,
///    `keys`, `may_attend`, a `bias` of -inf, or a `score` that gave -inf. One is enough.
///
/// The default is none of them and a scale of `1/sqrt(D)`.
#[derive(Clone, Copy, Default)]
pub struct Rules<'a> {
    /// What `q·k` is multiplied with: `1/sqrt(D)` where `None`; 0 and negative values are used as given.
    pub scale: Option<f64>,
    /// A score x becomes `softcap * tanh(x / softcap)`. Finite and above 0.
    pub softcap: Option<f64>,
    /// Whether keys after a query's own are hidden.
    pub causal: bool,
    /// Where a query's own key lies: key i ([`TopLeft`](Alignment::TopLeft)) or `i + Lk - Lq`
    /// ([`BottomRight`](Alignment::BottomRight)). `causal`, the windows and `slopes` count from it; with one
    /// of them it must be given where Lq and Lk can differ: Tq is not Tk, `kv_lens` or `q_lens` are given, or
    /// the sequences are packed.
    pub alignment: Option<Alignment>,
    /// How many keys before the own one may be seen besides it; all where `None`.
    pub window_left: Option<usize>,
    /// How many keys after the own one may be seen besides it; all where `None`.
    pub window_right: Option<usize>,
    /// Which pairs may attend, broadcast over `(B, H, Tq, Tk)`: true = may.
    pub mask: Option<Broadcast<'a, bool>>,
    /// Added to the scores, broadcast over `(B, H, Tq, Tk)`; -inf hides the pair, whatever its key holds.
    pub bias: Option<Broadcast<'a, f64>>,
    /// Lk of each sequence, `(B)`, at most Tk: keys from there on are hidden.
    pub kv_lens: Option<&'a [usize]>,
    /// Lq of each sequence, `(B)`, at most Tq: rows from there on give output 0, `lse` -inf (even with a
    /// sink) and weights 0.
    pub q_lens: Option<&'a [usize]>,
    /// Only keys `start..end` are seen, for computing a part of the keys: nothing else counts from it. Within
    /// `0..Tk`.
    pub keys: Option<(usize, usize)>,
    /// ALiBi, `(H)` or `(B, H)`: a score falls by the slope times the distance of the key to the own one,
    /// before or after.
    pub slopes: Option<&'a [f64]>,
    /// `(H)`: a score in the denominator of the softmax that belongs to no key. -inf is none.
    pub sinks: Option<&'a [f64]>,
    /// Whether (batch, head, query, key) may attend.
    pub may_attend: Option<&'a dyn Fn(usize, usize, usize, usize) -> bool>,
    /// The score to use instead, from the score so far and (batch, head, query, key); -inf hides the pair.
    /// Not called where another rule hides it.
    pub score: Option<&'a dyn Fn(f64, usize, usize, usize, usize) -> f64>,
}

impl fmt::Debug for Rules<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Rules")
            .field("scale", &self.scale)
            .field("softcap", &self.softcap)
            .field("causal", &self.causal)
            .field("alignment", &self.alignment)
            .field("window_left", &self.window_left)
            .field("window_right", &self.window_right)
            .field("mask", &self.mask)
            .field("bias", &self.bias)
            .field("kv_lens", &self.kv_lens)
            .field("q_lens", &self.q_lens)
            .field("keys", &self.keys)
            .field("slopes", &self.slopes)
            .field("sinks", &self.sinks)
            .field("may_attend", &self.may_attend.map(|_| "a closure"))
            .field("score", &self.score.map(|_| "a closure"))
            .finish()
    }
}

/// One query of one head of one sequence, and how long that sequence is.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) query: usize,
    pub(super) sequence: Sequence,
}

/// Where one sequence lies among the tokens, and how much of it is there.
#[derive(Clone, Copy)]
pub(super) struct Sequence {
    /// The first of its queries, of all.
    pub(super) q_start: usize,
    /// The first of its keys, of all.
    pub(super) kv_start: usize,
    /// How many rows it has, those from Lq on included.
    pub(super) rows: usize,
    /// Lq.
    pub(super) q_len: usize,
    /// Lk.
    pub(super) kv_len: usize,
}

impl Rules<'_> {
    /// Whether no rule hides `key` from `row`, but for `score`.
    pub(super) fn shows(&self, row: Row, key: usize) -> bool {
        let Row {
            batch, head, query, ..
        } = row;
        let index = [batch, head, query, key];
        let distance = self.distance(row, key);
        query < row.sequence.q_len
            && key < row.sequence.kv_len
            && self
                .keys
                .is_none_or(|(start, end)| start <= key && key < end)
            && (!self.causal || distance <= 0)
            && self.window_left.is_none_or(|n| -distance <= n as i128)
            && self.window_right.is_none_or(|n| distance <= n as i128)
            && self.mask.is_none_or(|mask| mask.at(index))
            && self
                .bias
                .is_none_or(|bias| bias.at(index) != f64::NEG_INFINITY)
            && self
                .may_attend
                .is_none_or(|may| may(batch, head, query, key))
    }

    /// How far `key` lies after the row's own key. No two lengths overflow an `i128`.
    fn distance(&self, row: Row, key: usize) -> i128 {
        let offset = match self.alignment {
            // Where it matters the lengths are the same.
            None | Some(Alignment::TopLeft) => 0,
            Some(Alignment::BottomRight) => {
                row.sequence.kv_len as i128 - row.sequence.q_len as i128
            }
        };
        key as i128 - (row.query as i128 + offset)
    }

    /// A scaled score after `softcap`.
    pub(super) fn cap(&self, score: f64) -> f64 {
        self.softcap.map_or(score, |cap| cap * (score / cap).tanh())
    }

    /// A capped score after `slopes`, `bias` and `score`, for a pair that is shown.
    pub(super) fn adjust(&self, heads: usize, row: Row, key: usize, mut score: f64) -> f64 {
        let Row {
            batch, head, query, ..
        } = row;
        if let Some(slopes) = self.slopes {
            let each_batch = slopes.len() != heads;
            let slope = slopes[if each_batch {
                batch * heads + head
            } else {
                head
            }];
            score -= slope * self.distance(row, key).abs() as f64;
        }
        if let Some(bias) = self.bias {
            score += bias.at([batch, head, query, key]);
        }
        match self.score {
            None => score,
            Some(own) => own(score, batch, head, query, key),
        }
    }

    /// The score of the row's sink, -inf where there is none.
    pub(super) fn sink(&self, row: Row) -> f64 {
        self.sinks
            .map_or(f64::NEG_INFINITY, |sinks| sinks[row.head])
    }

    /// Checks all but `scale`, for problems of these `(B, H, Tq, Tk)`.
    pub(super) fn check(&self, axes: [Axis; 4], packed: bool) -> Result<()> {
        let [batch, heads, q_len, kv_len] = axes;
        if let Some(cap) = self.softcap
            && !(cap.is_finite() && cap > 0.0)
        {
            return Err(Error::parameter(
                "softcap",
                cap,
                "must be finite and above 0; leave it unset for none",
            ));
        }
        if let Some(mask) = self.mask {
            mask.check("mask", axes)?;
        }
        if let Some(bias) = self.bias {
            bias.check("bias", axes)?;
        }
        for (name, lens, (axis, most)) in [
            ("kv_lens", self.kv_lens, kv_len),
            ("q_lens", self.q_lens, q_len),
        ] {
            let Some(lens) = lens else { continue };
            check_length(name, &[batch], lens.len())?;
            if let Some(len) = lens.iter().find(|len| **len > most) {
                let rule = format!("must be at most {axis} = {most}");
                return Err(Error::parameter(name, len, rule));
            }
        }
        if let Some((start, end)) = self.keys
            && !(start <= end && end <= kv_len.1)
        {
            return Err(Error::parameter(
                "keys",
                format_args!("{start}..{end}"),
                format!("must begin before it ends and lie within 0..{}", kv_len.1),
            ));
        }
        if let Some(slopes) = self.slopes
            && check_length("slopes", &[heads], slopes.len()).is_err()
        {
            check_length("slopes", &[batch, heads], slopes.len())?;
        }
        if let Some(sinks) = self.sinks {
            check_length("sinks", &[heads], sinks.len())?;
        }

        let windowed = self.window_left.is_some() || self.window_right.is_some();
        let positional = self.causal || windowed || self.slopes.is_some();
        let lens = self.kv_lens.is_some() || self.q_lens.is_some();
        let may_differ = q_len.1 != kv_len.1 || lens || packed;
        if positional && may_differ && self.alignment.is_none() {
            return Err(Error::parameter(
                "alignment",
                "none",
                "must be given with causal, a window or slopes where there may be more keys than queries or fewer",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

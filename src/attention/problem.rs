//! What is asked: shapes, types, rules.

use super::{Alignment, AttentionRules};
use crate::element::ElementType;
use crate::kernels::{Form, Tier};
use crate::plan::size;
use crate::{Error, Result};
use std::ops::Range;

/// Attention over given shapes with given rules. Plain data: start from [`AttentionProblem::new`] and change fields.
///
/// ```
/// use wgpu_attention::{Alignment, AttentionProblem, AttentionRules};
///
/// // One new token of 32 query heads that share 8 KV heads, against a cache of 4096.
/// let decode = AttentionProblem {
///     kv_heads: 8,
///     kv_len: 4096,
///     rules: AttentionRules::causal(Alignment::BottomRight),
///     ..AttentionProblem::new(1, 32, 1, 128)
/// };
/// assert_eq!(decode.pairs(), 32 * 4096);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionProblem {
    /// Batch items (B); of a packed problem the sequences.
    pub batch: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Heads of k and v (Hkv), a divisor of `heads`: query head h reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Queries of a batch item (Tq); of a packed problem the most that a sequence may have.
    pub q_len: usize,
    /// Keys of a batch item (Tk); of a packed problem the most that a sequence may have.
    pub kv_len: usize,
    /// Channels of a head of q and k (D), 1 to any number.
    pub head_dim: usize,
    /// Channels of a head of v and of the output (Dv), 1 to 256.
    pub value_dim: usize,
    /// Whether sequences of different lengths are packed one behind the other, without a batch axis; where each
    /// begins comes with the call. (What a sequence has beyond `q_len` and `kv_len` is not computed and not seen.)
    ///
    /// ```no_run
    /// # use wgpu_attention::*;
    /// # fn packed(gpu: &Gpu, q: &TensorView, k: &TensorView, v: &TensorView, out: &TensorView) -> Result<()> {
    /// // Three sequences of 5, 0 and 2 tokens: q, k, v and out are (7, 8, 64).
    /// let problem = AttentionProblem {
    ///     packed: true,
    ///     rules: AttentionRules::causal(Alignment::TopLeft),
    ///     ..AttentionProblem::new(3, 8, 5, 64) // 3 sequences, 8 heads, 5 tokens at most
    /// };
    /// let attention = Attention::new(gpu, problem)?;
    /// let starts = Tensor::from_slice(gpu, &[4], &[0u32, 5, 5, 7])?.view();
    /// let mut arguments = AttentionArguments::new(q, k, v, out);
    /// arguments.rules.cu_seqlens_q = Some(&starts);
    /// arguments.rules.cu_seqlens_k = Some(&starts);
    /// let mut encoder = gpu.device().create_command_encoder(&Default::default());
    /// attention.encode(&mut encoder, arguments)?;
    /// # Ok(())
    /// # }
    /// ```
    pub packed: bool,
    /// Whether k and v lie in pages of that many tokens, `(P, page_size, Hkv, D)`, as caches do: each batch item's row of
    /// [`RuleArguments::block_table`](crate::RuleArguments::block_table) names its pages in order. At least 1; not
    /// together with `packed`.
    pub page_size: Option<usize>,
    /// Who may attend, and what a score becomes.
    pub rules: AttentionRules,
    /// Only these keys are seen; indices and rules stay those of the whole. Several such parts, each with its
    /// log-sum-exp, are put together by [`Merge`](crate::Merge). (A sink belongs into one of the parts.)
    pub keys: Option<Range<usize>>,
    /// The type of q: f32, f16 or bf16. Arithmetic is f32.
    pub q_type: ElementType,
    /// The type of k and v.
    pub kv_type: ElementType,
    /// The type of the output.
    pub out_type: ElementType,
    /// The form of the kernel; `None` leaves it to the planner.
    pub form: Option<Form>,
    /// The arithmetic; `None` leaves it to the planner, which takes the fastest tier that has qualified itself on the device and suits the
    /// problem, and [`Tier::Plain`] forbids all others.
    pub tier: Option<Tier>,
    /// Whether the kernels for few queries compute it, which split the keys; `None` leaves it to the planner, which takes
    /// them for up to 8 queries.
    pub decode: Option<bool>,
}

/// Tokens along one axis at most: positions and their differences are 32-bit numbers with a sign.
const MOST_TOKENS: usize = 1 << 29;

impl AttentionProblem {
    /// Full self-attention in f32: every query sees every key.
    pub fn new(batch: usize, heads: usize, tokens: usize, head_dim: usize) -> Self {
        AttentionProblem {
            batch,
            heads,
            kv_heads: heads,
            q_len: tokens,
            kv_len: tokens,
            head_dim,
            value_dim: head_dim,
            packed: false,
            page_size: None,
            rules: AttentionRules::default(),
            keys: None,
            q_type: ElementType::F32,
            kv_type: ElementType::F32,
            out_type: ElementType::F32,
            form: None,
            tier: None,
            decode: None,
        }
    }

    /// With all of q, k, v and the output stored in that type.
    #[must_use]
    pub fn stored_as(self, element_type: ElementType) -> Self {
        AttentionProblem {
            q_type: element_type,
            kv_type: element_type,
            out_type: element_type,
            ..self
        }
    }

    /// The scale in force.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if it is NaN or infinite.
    pub fn effective_scale(&self) -> Result<f32> {
        self.rules.check()?;
        match self.rules.scale {
            None if self.head_dim == 0 => {
                Err(Error::parameter("head_dim", 0, "must be at least 1"))
            }
            None => Ok((1.0 / (self.head_dim as f64).sqrt()) as f32),
            Some(scale) => Ok(scale),
        }
    }

    /// What must hold of every number, whatever the device.
    pub(super) fn check(&self) -> Result<()> {
        for (name, value) in [
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ] {
            if value == 0 {
                return Err(Error::parameter(name, 0, "must be at least 1"));
            }
            size(name, value)?;
        }
        size("batch", self.batch)?;
        for (name, value) in [("q_len", self.q_len), ("kv_len", self.kv_len)] {
            if value > MOST_TOKENS {
                return Err(Error::LimitExceeded {
                    what: name.into(),
                    limit: "tokens of one axis".into(),
                    needed: value as u64,
                    available: MOST_TOKENS as u64,
                    unit: "tokens",
                });
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::parameter(
                "heads",
                self.heads,
                format!("must be a multiple of kv_heads = {}", self.kv_heads),
            ));
        }
        self.effective_scale()?;
        let rules = &self.rules;
        let lengths_vary =
            self.q_len != self.kv_len || self.packed || rules.q_lens || rules.kv_lens;
        if rules.is_positional() && rules.alignment.is_none() && lengths_vary {
            return Err(Error::parameter(
                "alignment",
                "none",
                "must be TopLeft or BottomRight, since causal, windows and ALiBi count from a query's own key and there may be more keys than queries, or fewer",
            ));
        }
        if let Some(page_size) = self.page_size {
            if page_size == 0 {
                return Err(Error::parameter("page_size", 0, "must be at least 1"));
            }
            size("page_size", page_size)?;
            if self.packed {
                let rule = "must be none where sequences are packed: a block table has a row for each batch item";
                return Err(Error::parameter("page_size", page_size, rule));
            }
        }
        if let Some(keys) = &self.keys
            && (keys.start > keys.end || keys.end > self.kv_len)
        {
            return Err(Error::parameter(
                "keys",
                format!("{keys:?}"),
                format!("must lie within 0..{} (kv_len)", self.kv_len),
            ));
        }
        for (name, element_type) in [
            ("q_type", self.q_type),
            ("kv_type", self.kv_type),
            ("out_type", self.out_type),
        ] {
            if element_type.float_number().is_none() {
                return Err(Error::parameter(
                    name,
                    element_type,
                    "must be f32, f16 or bf16",
                ));
            }
        }
        Ok(())
    }

    /// The window as kernels take it: keys before and after the own one, -1 for all.
    pub(super) fn window(&self) -> (i32, i32) {
        // Past all tokens there is nothing to hide; below 2^30 it can be added to any position.
        let all = self.q_len + self.kv_len;
        let side = |window: Option<usize>| match window {
            Some(keys) if keys < all => keys as i32,
            _ => -1,
        };
        let right = if self.rules.causal {
            Some(0)
        } else {
            self.rules.window_right
        };
        (side(self.rules.window_left), side(right))
    }

    /// Entries of a batch item's row of the block table.
    pub(super) fn pages(&self) -> usize {
        self.page_size
            .map_or(0, |size| self.kv_len.div_ceil(size.max(1)))
    }

    /// The keys that are seen at all.
    pub(crate) fn key_range(&self) -> Range<usize> {
        self.keys.clone().unwrap_or(0..self.kv_len)
    }

    /// Pairs of a query and a key that its position lets it see, over all heads and batch items; `u64::MAX`
    /// if there are more. What single lengths, masks and rules hide is counted all the same.
    pub fn pairs(&self) -> u64 {
        // In 128 bits: the lengths are a caller's, and need not have been planned.
        let count = |length: usize| (length as i128).min(1 << 62);
        let (q_len, kv_len) = (count(self.q_len), count(self.kv_len));
        let keys = self.key_range();
        let (begin, end) = (count(keys.start), count(keys.end).min(kv_len));
        if begin >= end {
            return 0;
        }
        let own = match self.rules.alignment {
            Some(Alignment::BottomRight) => kv_len - q_len,
            _ => 0,
        };
        // The keys below i + bound, of those in the range, summed over all queries i.
        let below = |bound: i128| -> i128 {
            let (low, high) = (begin - bound, end - bound);
            let rising = low.clamp(0, q_len)..high.clamp(0, q_len);
            let count = rising.end - rising.start;
            let ramp = count * (rising.start + bound - begin)
                + count.saturating_mul((count - 1).max(0)) / 2;
            ramp + (q_len - rising.end) * (end - begin)
        };
        let right = if self.rules.causal {
            Some(0)
        } else {
            self.rules.window_right
        };
        let to = right.map_or(q_len * (end - begin), |right| {
            below(own + right as i128 + 1)
        });
        let from = self
            .rules
            .window_left
            .map_or(0, |left| below(own - left as i128));
        let all = ((to - from).max(0) as u128)
            .saturating_mul(self.heads as u128)
            .saturating_mul(self.batch as u128);
        u64::try_from(all).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gpu::Capabilities;

    #[test]
    fn pairs_are_counted_once() {
        let mut checked = 0;
        for q_len in 0..6usize {
            for kv_len in 0..6usize {
                for alignment in [Alignment::TopLeft, Alignment::BottomRight] {
                    for window_left in [None, Some(0), Some(2), Some(usize::MAX)] {
                        for (causal, window_right) in
                            [(true, None), (false, None), (false, Some(1))]
                        {
                            for keys in [None, Some(kv_len / 3..kv_len / 2 + 1)] {
                                if keys.as_ref().is_some_and(|keys| keys.end > kv_len) {
                                    continue;
                                }
                                let problem = AttentionProblem {
                                    kv_len,
                                    keys: keys.clone(),
                                    rules: AttentionRules {
                                        causal,
                                        alignment: Some(alignment),
                                        window_left,
                                        window_right,
                                        ..Default::default()
                                    },
                                    ..AttentionProblem::new(2, 3, q_len, 4)
                                };
                                let mut expected = 0;
                                for i in 0..q_len as i128 {
                                    for j in 0..kv_len {
                                        let own = match alignment {
                                            Alignment::TopLeft => i,
                                            Alignment::BottomRight => {
                                                i + kv_len as i128 - q_len as i128
                                            }
                                        };
                                        let key = j as i128;
                                        let seen = (!causal || key <= own)
                                            && window_left.is_none_or(|w| own - key <= w as i128)
                                            && window_right.is_none_or(|w| key - own <= w as i128)
                                            && keys.as_ref().is_none_or(|keys| keys.contains(&j));
                                        expected += u64::from(seen);
                                    }
                                }
                                assert_eq!(problem.pairs(), 6 * expected, "{problem:?}");
                                checked += 1;
                            }
                        }
                    }
                }
            }
        }
        assert!(checked > 1000, "{checked}");
    }

    /// modular/modular#5557: causal work counted as full.
    #[test]
    fn causal_flops_are_counted_once() {
        let capabilities = Capabilities::webgpu_defaults(wgpu::DeviceType::Cpu);
        let full = AttentionProblem::new(1, 8, 1024, 64);
        let causal = AttentionProblem {
            rules: AttentionRules::causal(Alignment::TopLeft),
            ..full.clone()
        };
        let flops = |problem: AttentionProblem| problem.plan(&capabilities).unwrap().flops;
        assert_eq!(flops(full), 2_147_483_648);
        assert_eq!(flops(causal), 1_074_790_400);
    }
}

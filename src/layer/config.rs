//! What a layer is: its widths and its rules.

use crate::attention::{Alignment, AttentionProblem, AttentionRules};
use crate::kernels::Form;
use crate::{Error, Result};

/// What a layer is. Plain data: start from [`LayerConfig::new`] and change fields.
///
/// ```
/// use wgpu_attention::{AttentionRules, LayerConfig};
///
/// // 32 query heads that share 8 heads of keys and values, a window of 512 tokens and the own one.
/// let config = LayerConfig::new(4096, 4096, 32).kv_heads(8).rules(AttentionRules {
///     causal: true,
///     window_left: Some(512),
///     ..Default::default()
/// });
/// assert_eq!(config.qkv_width()?, (32 + 8 + 8) * 128);
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Channels of x.
    pub d_in: usize,
    /// Channels of what keys and values are made of. Other than `d_in` for cross-attention only.
    pub d_source: usize,
    /// Channels of y. Without an output projection it is `heads * value_dim`.
    pub d_out: usize,
    /// Query heads (H).
    pub heads: usize,
    /// Heads of keys and values (Hkv), a divisor of `heads`: query head h reads KV head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Channels of a head of queries and keys (D); `None` is `d_out / heads`, which must come out even.
    pub head_dim: Option<usize>,
    /// Channels of a head of values (Dv); `None` is as `head_dim`.
    pub value_dim: Option<usize>,
    /// Who may attend, and what a score becomes. In self-attention an alignment of `None` is
    /// [`Alignment::TopLeft`]: a token's own key is its own. Cross-attention must say it where a rule counts from it.
    pub rules: AttentionRules,
    /// The form of the kernels; `None` leaves it to the planner.
    pub form: Option<Form>,
}

/// The channels that follow from a configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Widths {
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    /// Queries of all heads.
    pub(crate) q: usize,
    /// Keys of all heads of keys.
    pub(crate) k: usize,
    /// Keys, and behind them values.
    pub(crate) kv: usize,
    /// Queries, keys and values.
    pub(crate) qkv: usize,
    /// What the attention gives, heads side by side.
    pub(crate) context: usize,
}

impl LayerConfig {
    /// Full self-attention with a KV head for every query head, `d_out / heads` channels each, and no rule.
    pub fn new(d_in: usize, d_out: usize, heads: usize) -> Self {
        LayerConfig {
            d_in,
            d_source: d_in,
            d_out,
            heads,
            kv_heads: heads,
            head_dim: None,
            value_dim: None,
            rules: AttentionRules::default(),
            form: None,
        }
    }

    /// Causal or not.
    #[must_use]
    pub fn causal(mut self, causal: bool) -> Self {
        self.rules.causal = causal;
        self
    }

    /// With that many heads of keys and values: fewer than `heads` is grouped-query attention, 1 is multi-query attention.
    #[must_use]
    pub fn kv_heads(self, kv_heads: usize) -> Self {
        LayerConfig { kv_heads, ..self }
    }

    /// With keys and values made of something that has that many channels.
    #[must_use]
    pub fn source(self, d_source: usize) -> Self {
        LayerConfig { d_source, ..self }
    }

    /// With these rules in place of all that were set before.
    #[must_use]
    pub fn rules(self, rules: AttentionRules) -> Self {
        LayerConfig { rules, ..self }
    }

    /// Channels of a head of queries and keys (D).
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] if a size is 0 or too large to count, `kv_heads` do not divide `heads`, `heads` do not
    /// divide `d_out` where they must, or a number of the rules is not what it may be.
    pub fn head_dim(&self) -> Result<usize> {
        Ok(self.widths()?.head_dim)
    }

    /// Channels of a head of values (Dv).
    ///
    /// # Errors
    ///
    /// As [`head_dim`](Self::head_dim).
    pub fn value_dim(&self) -> Result<usize> {
        Ok(self.widths()?.value_dim)
    }

    /// Channels of q, k and v together, `H * D + Hkv * D + Hkv * Dv`: the rows of the fused weight.
    ///
    /// # Errors
    ///
    /// As [`head_dim`](Self::head_dim).
    pub fn qkv_width(&self) -> Result<usize> {
        Ok(self.widths()?.qkv)
    }

    pub(crate) fn widths(&self) -> Result<Widths> {
        let LayerConfig {
            d_out,
            heads,
            kv_heads,
            ..
        } = *self;
        for (name, value) in [
            ("d_in", Some(self.d_in)),
            ("d_source", Some(self.d_source)),
            ("d_out", Some(d_out)),
            ("heads", Some(heads)),
            ("kv_heads", Some(kv_heads)),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ] {
            if value == Some(0) {
                return Err(Error::parameter(name, 0, "must be at least 1"));
            }
        }
        let multiple = |name, value: usize, of_name, of: usize| {
            if value.is_multiple_of(of) {
                return Ok(value / of);
            }
            let rule = format!("must be a multiple of {of_name} = {of}");
            Err(Error::parameter(name, value, rule))
        };
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => multiple("d_out", d_out, "heads", heads)?,
        };
        multiple("heads", heads, "kv_heads", kv_heads)?;
        self.rules.check()?;
        let value_dim = self.value_dim.unwrap_or(head_dim);
        let widths = || {
            let (q, k) = (
                heads.checked_mul(head_dim)?,
                kv_heads.checked_mul(head_dim)?,
            );
            let kv = k.checked_add(kv_heads.checked_mul(value_dim)?)?;
            Some(Widths {
                head_dim,
                value_dim,
                q,
                k,
                kv,
                qkv: q.checked_add(kv)?,
                context: heads.checked_mul(value_dim)?,
            })
        };
        widths().ok_or_else(|| {
            let rule = "q, k and v of all heads together must fit a machine word";
            Error::parameter("heads", heads, rule)
        })
    }

    /// The attention of a self-attention layer of that size.
    pub(super) fn attention(&self, batch: usize, tokens: usize) -> Result<AttentionProblem> {
        let Widths {
            head_dim,
            value_dim,
            ..
        } = self.widths()?;
        Ok(AttentionProblem {
            kv_heads: self.kv_heads,
            value_dim,
            rules: AttentionRules {
                alignment: self.rules.alignment.or(Some(Alignment::TopLeft)),
                ..self.rules.clone()
            },
            form: self.form,
            ..AttentionProblem::new(batch, self.heads, tokens, head_dim)
        })
    }
}

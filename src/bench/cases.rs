//! What is measured: the table, and what each case asks for in operations and bytes.

use crate::attention::{Alignment, AttentionProblem, AttentionRules};
use crate::element::ElementType;
use crate::linear::LinearProblem;
use crate::{Error, Result};
use std::str::FromStr;

/// A line of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// What is computed.
    pub work: Work,
    /// Whether it belongs to the quick set.
    pub quick: bool,
    /// Whether an adapter that is a CPU underneath runs it: one call within a second or so.
    pub software: bool,
}

/// How q, k and v of an attention lie in memory. (The output is token-major.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Each in a tensor of its own, `(B, H, T, D)`: how libraries for training and caches keep them.
    HeadMajor,
    /// Side by side in one, `(B, T, q | k | v)`: how a fused projection leaves them.
    Fused,
}

/// What is computed, of a batch of one unless said otherwise. Sizes alone: operands are made by
/// [`Prepared`](super::Prepared).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Attention of as many queries as keys.
    Attention {
        /// Whether a query sees only keys up to its own.
        causal: bool,
        /// Queries and keys (T).
        tokens: usize,
        /// Query heads (H).
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
        /// Channels of a head (D), of values too.
        head_dim: usize,
        /// What q, k, v and the output are stored as; arithmetic is f32.
        element: ElementType,
        /// How q, k and v lie.
        layout: Layout,
    },
    /// Attention of one new query to the keys and values so far.
    Decode {
        /// Keys (Tk).
        keys: usize,
        /// Query heads (H).
        heads: usize,
        /// Heads of keys and values.
        kv_heads: usize,
        /// Channels of a head (D), of values too.
        head_dim: usize,
        /// What q, k, v and the output are stored as; arithmetic is f32.
        element: ElementType,
    },
    /// A projection, f32, without a bias.
    Linear {
        /// Rows of x.
        rows: usize,
        /// Channels of x.
        d_in: usize,
        /// Channels of y.
        d_out: usize,
    },
    /// The causal layer, f32: fused projection, attention, output projection, no bias.
    Layer {
        /// Batch items.
        batch: usize,
        /// Tokens of each.
        tokens: usize,
        /// Channels of x.
        d_in: usize,
        /// Channels of y, and of all heads together.
        d_out: usize,
        /// Heads.
        heads: usize,
    },
}

/// What takes more than a second or so on an adapter that is a CPU is for GPUs.
const GPU: Case = Case {
    work: Work::Linear {
        rows: 0,
        d_in: 0,
        d_out: 0,
    },
    quick: false,
    software: false,
};
const ALL: Case = Case {
    software: true,
    ..GPU
};
const QUICK: Case = Case { quick: true, ..ALL };
const QUICK_GPU: Case = Case { quick: true, ..GPU };

impl Case {
    const fn of(self, work: Work) -> Self {
        Case { work, ..self }
    }
}

const fn causal(tokens: usize, heads: usize, head_dim: usize) -> Work {
    Work::Attention {
        causal: true,
        tokens,
        heads,
        kv_heads: heads,
        head_dim,
        element: ElementType::F32,
        layout: Layout::HeadMajor,
    }
}

/// 12 heads of 64 channels and 1024 tokens, but for what differs.
const fn gpt2(causal: bool, element: ElementType, layout: Layout) -> Work {
    Work::Attention {
        causal,
        tokens: 1024,
        heads: 12,
        kv_heads: 12,
        head_dim: 64,
        element,
        layout,
    }
}

const fn decode(keys: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Work {
    Work::Decode {
        keys,
        heads,
        kv_heads,
        head_dim,
        element: ElementType::F32,
    }
}

const fn linear(rows: usize, d_in: usize, d_out: usize) -> Work {
    Work::Linear { rows, d_in, d_out }
}

const fn layer(tokens: usize) -> Work {
    Work::Layer {
        batch: 1,
        tokens,
        d_in: 768,
        d_out: 768,
        heads: 12,
    }
}

/// Every case. (One head of 768 channels is not among the head counts: values have up to 256.)
pub static CASES: &[Case] = &[
    QUICK.of(causal(128, 12, 64)),
    QUICK.of(causal(1024, 12, 64)),
    ALL.of(causal(4096, 12, 64)),
    QUICK_GPU.of(causal(4096, 32, 128)),
    QUICK_GPU.of(Work::Attention {
        causal: true,
        tokens: 4096,
        heads: 32,
        kv_heads: 32,
        head_dim: 128,
        element: ElementType::F16,
        layout: Layout::HeadMajor,
    }),
    GPU.of(causal(16384, 12, 64)),
    QUICK.of(gpt2(false, ElementType::F32, Layout::HeadMajor)),
    ALL.of(gpt2(true, ElementType::F32, Layout::Fused)),
    QUICK.of(gpt2(true, ElementType::F16, Layout::HeadMajor)),
    ALL.of(gpt2(true, ElementType::BF16, Layout::HeadMajor)),
    ALL.of(causal(1024, 8, 128)),
    ALL.of(causal(1024, 3, 256)),
    ALL.of(causal(1024, 4, 192)),
    ALL.of(causal(1024, 48, 16)),
    ALL.of(Work::Attention {
        causal: true,
        tokens: 512,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        element: ElementType::F32,
        layout: Layout::HeadMajor,
    }),
    ALL.of(decode(1024, 12, 12, 64)),
    QUICK.of(decode(4096, 12, 12, 64)),
    ALL.of(decode(16384, 12, 12, 64)),
    ALL.of(decode(1024, 32, 8, 128)),
    QUICK.of(decode(4096, 32, 8, 128)),
    ALL.of(decode(16384, 32, 8, 128)),
    ALL.of(Work::Decode {
        keys: 4096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        element: ElementType::F16,
    }),
    QUICK.of(linear(128, 768, 2304)),
    QUICK.of(linear(1024, 768, 2304)),
    // One head's queries: 36 of these are what the fused projection above does at once.
    ALL.of(linear(128, 768, 64)),
    ALL.of(linear(1024, 768, 64)),
    QUICK_GPU.of(linear(4096, 4096, 4096)),
    QUICK.of(Work::Layer {
        batch: 5,
        tokens: 6,
        d_in: 3,
        d_out: 18,
        heads: 2,
    }),
    QUICK.of(layer(128)),
    ALL.of(layer(1024)),
];

/// The cases to measure, and those that are left out because they are too long for an adapter that is a CPU.
///
/// `words`: cases whose names hold one of them; all where there is none. A case whose whole name is given is measured in any
/// case.
pub fn select(
    words: &[String],
    quick: bool,
    software: bool,
) -> (Vec<&'static Case>, Vec<&'static Case>) {
    let named = |case: &&Case| {
        let name = case.work.name();
        words.is_empty() || words.iter().any(|word| name.contains(word.as_str()))
    };
    let by_name = |case: &Case| words.contains(&case.work.name());
    CASES
        .iter()
        .filter(named)
        .filter(|case| case.quick || !quick || by_name(case))
        .partition(|case| case.software || !software || by_name(case))
}

impl Work {
    /// A word that stays the same as long as the sizes do: `attention-causal-t1024-h12-d64-f32`.
    pub fn name(&self) -> String {
        let grouped = |heads: usize, kv_heads: usize| match heads == kv_heads {
            true => format!("h{heads}"),
            false => format!("h{heads}kv{kv_heads}"),
        };
        match *self {
            Work::Attention {
                causal,
                tokens,
                heads,
                kv_heads,
                head_dim,
                element,
                layout,
            } => format!(
                "attention-{}-t{tokens}-{}-d{head_dim}-{element}{}",
                if causal { "causal" } else { "full" },
                grouped(heads, kv_heads),
                match layout {
                    Layout::HeadMajor => "",
                    Layout::Fused => "-fused",
                }
            ),
            Work::Decode {
                keys,
                heads,
                kv_heads,
                head_dim,
                element,
            } => format!(
                "decode-k{keys}-{}-d{head_dim}-{element}",
                grouped(heads, kv_heads)
            ),
            Work::Linear { rows, d_in, d_out } => format!("linear-r{rows}-{d_in}x{d_out}-f32"),
            Work::Layer {
                batch,
                tokens,
                d_in,
                d_out,
                heads,
            } => format!("layer-causal-b{batch}-t{tokens}-{d_in}x{d_out}-h{heads}-f32"),
        }
    }

    /// The sizes under their names in result files; those that it has.
    pub fn sizes(&self) -> Vec<(&'static str, usize)> {
        match *self {
            Work::Attention {
                tokens,
                heads,
                kv_heads,
                head_dim,
                ..
            } => vec![
                ("batch", 1),
                ("heads", heads),
                ("kv_heads", kv_heads),
                ("q_len", tokens),
                ("kv_len", tokens),
                ("head_dim", head_dim),
            ],
            Work::Decode {
                keys,
                heads,
                kv_heads,
                head_dim,
                ..
            } => vec![
                ("batch", 1),
                ("heads", heads),
                ("kv_heads", kv_heads),
                ("q_len", 1),
                ("kv_len", keys),
                ("head_dim", head_dim),
            ],
            Work::Linear { rows, d_in, d_out } => {
                vec![("rows", rows), ("d_in", d_in), ("d_out", d_out)]
            }
            Work::Layer {
                batch,
                tokens,
                d_in,
                d_out,
                heads,
            } => vec![
                ("batch", batch),
                ("q_len", tokens),
                ("kv_len", tokens),
                ("d_in", d_in),
                ("d_out", d_out),
                ("heads", heads),
            ],
        }
    }

    /// Whether a query sees only keys up to its own; `None` where there are no queries.
    pub fn causal(&self) -> Option<bool> {
        match *self {
            Work::Attention { causal, .. } => Some(causal),
            Work::Decode { .. } | Work::Layer { .. } => Some(true),
            Work::Linear { .. } => None,
        }
    }

    /// `attention`, `decode`, `linear` or `layer`.
    pub fn kind(&self) -> &'static str {
        match self {
            Work::Attention { .. } => "attention",
            Work::Decode { .. } => "decode",
            Work::Linear { .. } => "linear",
            Work::Layer { .. } => "layer",
        }
    }

    /// What q, k, v and the output, or x, weights and y, are stored as.
    pub fn element(&self) -> ElementType {
        match *self {
            Work::Attention { element, .. } | Work::Decode { element, .. } => element,
            Work::Linear { .. } | Work::Layer { .. } => ElementType::F32,
        }
    }

    /// Useful floating-point operations: a multiply-add is two, a pair of a query and a key that the causal mask hides none.
    pub fn flops(&self) -> u64 {
        match *self {
            Work::Attention {
                causal,
                tokens,
                heads,
                head_dim,
                ..
            } => {
                let pairs = match causal {
                    // T * (T + 1) / 2, halved first: one of the two is even.
                    true => product(&[tokens.div_ceil(2), tokens | 1]),
                    false => product(&[tokens, tokens]),
                };
                // A product with the key and one with the value.
                product(&[4, heads, head_dim]).saturating_mul(pairs)
            }
            Work::Decode {
                keys,
                heads,
                head_dim,
                ..
            } => product(&[4, heads, head_dim, keys]),
            Work::Linear { rows, d_in, d_out } => product(&[2, rows, d_in, d_out]),
            Work::Layer {
                batch,
                tokens,
                d_in,
                d_out,
                heads,
            } => {
                let attention = causal(tokens, heads, d_out / heads.max(1)).flops();
                let qkv = product(&[2, batch, tokens, d_out, 3, d_in]);
                let output = product(&[2, batch, tokens, d_out, d_out]);
                qkv.saturating_add(output)
                    .saturating_add(product(&[batch]).saturating_mul(attention))
            }
        }
    }

    /// Bytes that have to be moved at least: every operand read once, the result written once, nothing in between.
    pub fn bytes(&self) -> u64 {
        let elements: &[u64] = match *self {
            Work::Attention {
                tokens,
                heads,
                kv_heads,
                head_dim,
                ..
            } => &[
                product(&[2, tokens, heads, head_dim]),
                product(&[2, tokens, kv_heads, head_dim]),
            ],
            Work::Decode {
                keys,
                heads,
                kv_heads,
                head_dim,
                ..
            } => &[
                product(&[2, heads, head_dim]),
                product(&[2, keys, kv_heads, head_dim]),
            ],
            Work::Linear { rows, d_in, d_out } => &[
                product(&[rows, d_in]),
                product(&[rows, d_out]),
                product(&[d_in, d_out]),
            ],
            Work::Layer {
                batch,
                tokens,
                d_in,
                d_out,
                ..
            } => &[
                product(&[batch, tokens, d_in]),
                product(&[batch, tokens, d_out]),
                product(&[3, d_in, d_out]),
                product(&[d_out, d_out]),
            ],
        };
        let elements = elements.iter().copied().fold(0, u64::saturating_add);
        elements.saturating_mul(self.element().size())
    }

    /// Whether moving bytes is most of the work, so that operands which stay in a cache would flatter it.
    pub fn moves_memory(&self) -> bool {
        matches!(self, Work::Decode { .. })
    }

    /// The same at sizes that the whole reference is computed of at once: for tests.
    #[must_use]
    pub fn reduced(self) -> Self {
        match self {
            Work::Attention {
                causal,
                tokens,
                heads,
                kv_heads,
                head_dim,
                element,
                layout,
            } => {
                let group = heads / kv_heads.max(1);
                Work::Attention {
                    causal,
                    // Past the edge of every tile.
                    tokens: tokens.min(97),
                    heads: heads.min(group.saturating_mul(2)),
                    kv_heads: kv_heads.min(2),
                    head_dim,
                    element,
                    layout,
                }
            }
            Work::Decode {
                keys,
                heads,
                kv_heads,
                head_dim,
                element,
            } => Work::Decode {
                keys: keys.min(517),
                heads: heads.min((heads / kv_heads.max(1)).saturating_mul(2)),
                kv_heads: kv_heads.min(2),
                head_dim,
                element,
            },
            Work::Linear { rows, d_in, d_out } => Work::Linear {
                rows: rows.min(97),
                d_in: d_in.min(192),
                d_out: d_out.min(200),
            },
            Work::Layer {
                batch,
                tokens,
                d_in,
                d_out,
                heads,
            } => {
                let head_dim = d_out / heads.max(1);
                let heads = heads.min(3);
                Work::Layer {
                    batch,
                    tokens: tokens.min(50),
                    d_in: d_in.min(100),
                    d_out: heads * head_dim,
                    heads,
                }
            }
        }
    }

    /// The attention problem of an attention or a decode case.
    pub(super) fn attention_problem(&self) -> Option<AttentionProblem> {
        match *self {
            Work::Attention {
                causal,
                tokens,
                heads,
                kv_heads,
                head_dim,
                element,
                ..
            } => Some(AttentionProblem {
                kv_heads,
                rules: AttentionRules {
                    causal,
                    ..Default::default()
                },
                ..AttentionProblem::new(1, heads, tokens, head_dim).stored_as(element)
            }),
            Work::Decode {
                keys,
                heads,
                kv_heads,
                head_dim,
                element,
            } => Some(AttentionProblem {
                kv_heads,
                kv_len: keys,
                rules: AttentionRules::causal(Alignment::BottomRight),
                ..AttentionProblem::new(1, heads, 1, head_dim).stored_as(element)
            }),
            Work::Linear { .. } | Work::Layer { .. } => None,
        }
    }

    /// The problem of a projection.
    pub(super) fn linear_problem(&self) -> Option<LinearProblem> {
        match *self {
            Work::Linear { rows, d_in, d_out } => Some(LinearProblem {
                batch: 1,
                tokens: rows,
                d_in,
                d_out,
                form: None,
                few: None,
            }),
            _ => None,
        }
    }
}

/// The reverse of [`Work::name`]: shapes beside the table are given by their names.
///
/// ```
/// use wgpu_attention::bench::Work;
///
/// let work: Work = "decode-k300-h32kv8-d128-f16".parse()?;
/// assert_eq!(work.name(), "decode-k300-h32kv8-d128-f16");
/// # Ok::<(), wgpu_attention::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Parameter`] if it is no such name, or a size is 0.
impl FromStr for Work {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        parse(name).filter(|work| work.name() == name).ok_or_else(|| {
            let rule = "expected a name like attention-causal-t1024-h12-d64-f32 (or -full-; grouped heads: h32kv8; f16, bf16; \
                -fused), decode-k4096-h32kv8-d128-f16, linear-r128-768x2304-f32 or layer-causal-b1-t128-768x768-h12-f32, \
                every size from 1 on";
            Error::parameter("shape", format!("{name:?}"), rule)
        })
    }
}

/// The work of that name, if it is a name. (Numbers may still be written in another way.)
fn parse(name: &str) -> Option<Work> {
    let words: Vec<&str> = name.split('-').collect();
    let number = |digits: &str| digits.parse().ok().filter(|number| *number > 0);
    let after = |word: &str, letter: &str| number(word.strip_prefix(letter)?);
    let pair = |word: &str| {
        let (a, b) = word.split_once('x')?;
        Some((number(a)?, number(b)?))
    };
    let heads = |word: &str| {
        let heads = word.strip_prefix('h')?;
        let (heads, kv_heads) = heads.split_once("kv").unwrap_or((heads, heads));
        Some((number(heads)?, number(kv_heads)?))
    };
    let element = |word: &str| {
        let all = [ElementType::F32, ElementType::F16, ElementType::BF16];
        all.into_iter().find(|element| element.to_string() == word)
    };
    Some(match words[..] {
        [
            "attention",
            rule,
            tokens,
            of,
            head_dim,
            stored,
            ref layout @ ..,
        ] => Work::Attention {
            causal: match rule {
                "causal" => true,
                "full" => false,
                _ => return None,
            },
            tokens: after(tokens, "t")?,
            heads: heads(of)?.0,
            kv_heads: heads(of)?.1,
            head_dim: after(head_dim, "d")?,
            element: element(stored)?,
            layout: match layout {
                [] => Layout::HeadMajor,
                ["fused"] => Layout::Fused,
                _ => return None,
            },
        },
        ["decode", keys, of, head_dim, stored] => Work::Decode {
            keys: after(keys, "k")?,
            heads: heads(of)?.0,
            kv_heads: heads(of)?.1,
            head_dim: after(head_dim, "d")?,
            element: element(stored)?,
        },
        ["linear", rows, channels, "f32"] => Work::Linear {
            rows: after(rows, "r")?,
            d_in: pair(channels)?.0,
            d_out: pair(channels)?.1,
        },
        ["layer", "causal", batch, tokens, channels, of, "f32"] => Work::Layer {
            batch: after(batch, "b")?,
            tokens: after(tokens, "t")?,
            d_in: pair(channels)?.0,
            d_out: pair(channels)?.1,
            heads: after(of, "h")?,
        },
        _ => return None,
    })
}

/// The product, or the largest number where it is larger.
fn product(sizes: &[usize]) -> u64 {
    let sizes = sizes.iter().map(|size| *size as u64);
    sizes.fold(1, u64::saturating_mul)
}

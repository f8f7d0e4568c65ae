//! Who may attend, and what a score becomes.

use super::{AttentionProblem, Rule};
use crate::element::ElementType;
use crate::gpu::Gpu;
use crate::operands::{expect_contiguous, first};
use crate::tensor::{Tensor, TensorView};
use crate::{Error, Result};

/// Where the own key of a query lies, where queries and keys differ in number. Causal masks, windows and ALiBi
/// count from it.
///
/// Causal, for 2 queries by 4 keys (left) and 4 queries by 2 keys (right); `x` may be seen, `o` is the own key:
///
/// ```text
/// TopLeft        o . . .      o .        the own key of query i is i
///                x o . .      x o
///                             x x
///                             x x
///
/// BottomRight    x x o .      . .        the own key of query i is i + Lk - Lq
///                x x x o      . .        (rows that see no key give 0)
///                             o .
///                             x o
/// ```
///
/// Lk and Lq are the batch item's own numbers of keys and queries. Both are the same where they are equal.
/// Decoding against a cache wants `BottomRight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alignment {
    /// The first query's own key is the first key.
    TopLeft,
    /// The last query's own key is the last key.
    BottomRight,
}

/// Who may attend, and what a score becomes. Plain data; the default is no rule at all.
///
/// A key is seen only if every rule allows it. A score is `softcap(scale * q.k)`, less the ALiBi slope times the
/// distance, plus the bias, and then what the caller's own rule makes of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionRules {
    /// What the products q.k are multiplied with; `None` is `1/sqrt(head_dim)`. 0 and negative values are used as given.
    pub scale: Option<f32>,
    /// `softcap * tanh(score / softcap)` keeps scores within ±softcap. From 1e-30 to 1e30.
    pub softcap: Option<f32>,
    /// Hides the keys after a query's own.
    pub causal: bool,
    /// Where a query's own key lies. It must be said wherever causal, a window or ALiBi is asked for and the numbers of
    /// queries and keys may differ: `q_len` is not `kv_len`, or the problem is packed, or has `q_lens` or `kv_lens`.
    pub alignment: Option<Alignment>,
    /// Keys before the own one that may be seen, besides it. `Some(0)`: none.
    pub window_left: Option<usize>,
    /// Keys after the own one that may be seen, besides it.
    pub window_right: Option<usize>,
    /// Whether a bool mask of pairs will be given.
    pub mask: bool,
    /// Whether a bias of pairs will be given, added to the scores; -infinity hides a key.
    pub bias: bool,
    /// Whether the number of keys of each batch item will be given.
    pub kv_lens: bool,
    /// Whether the number of queries of each batch item will be given; rows from there on give 0.
    pub q_lens: bool,
    /// Whether ALiBi slopes will be given: a score loses `slope * |own key - key|`.
    pub alibi: bool,
    /// Whether attention sinks will be given: a logit per head that stands in the softmax's denominator alone.
    pub sinks: bool,
    /// A rule of the caller's own.
    pub rule: Option<Rule>,
}

impl AttentionRules {
    /// Causal attention with the own keys at that corner.
    pub fn causal(alignment: Alignment) -> Self {
        AttentionRules {
            causal: true,
            alignment: Some(alignment),
            ..Default::default()
        }
    }

    /// Whether a rule counts from a query's own key.
    pub(crate) fn is_positional(&self) -> bool {
        self.causal || self.alibi || self.window_left.is_some() || self.window_right.is_some()
    }

    /// Whether a rule changes scores.
    pub(crate) fn changes_scores(&self) -> bool {
        self.softcap.is_some() || self.alibi || self.bias
    }

    /// What must hold of the numbers.
    pub(crate) fn check(&self) -> Result<()> {
        if let Some(scale) = self.scale
            && !scale.is_finite()
        {
            return Err(Error::parameter("scale", scale, "must be finite"));
        }
        if let Some(softcap) = self.softcap
            // Beyond, quotients leave the range of f32 that every adapter computes with.
            && !(1e-30..=1e30).contains(&softcap)
        {
            return Err(Error::parameter(
                "softcap",
                softcap,
                "must be from 1e-30 to 1e30; leave it unset for none",
            ));
        }
        Ok(())
    }
}

/// The tensors that the rules take: each given exactly if the rules say so. Start from `Default::default()`.
///
/// Of a packed problem B is the number of sequences, and Tq and Tk are its `q_len` and `kv_len`: masks and biases count
/// from each sequence's first token. Small operands (lengths, starts, slopes, sinks) that lie in several buffers are
/// gathered by copies, as the plan says: their buffers need the usage `COPY_SRC`, which tensors made by this crate have.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuleArguments<'a> {
    /// Bool, true = may attend: any shape that broadcasts to `(B, H, Tq, Tk)`, aligned at the last axis as numpy
    /// does. A padding mask `(B, Tk)` is given as `(B, 1, 1, Tk)`.
    pub mask: Option<&'a TensorView>,
    /// f32, added to the scores: any shape that broadcasts to `(B, H, Tq, Tk)`.
    pub bias: Option<&'a TensorView>,
    /// `(B)`, u32: keys from there on are hidden. (More than there are count as all.)
    pub kv_lens: Option<&'a TensorView>,
    /// `(B)`, u32: rows from there on give output 0 and log-sum-exp -infinity.
    pub q_lens: Option<&'a TensorView>,
    /// `(H)` or `(B, H)`, f32.
    pub slopes: Option<&'a TensorView>,
    /// `(H)`, f32.
    pub sinks: Option<&'a TensorView>,
    /// f32, contiguous: what `rule_data(i)` reads in the caller's own rule. Given exactly if the rule calls it.
    pub rule_data: Option<&'a TensorView>,
    /// Packed problems only: `(B + 1)`, u32: where each sequence begins along the tokens of q, and where the last ends.
    pub cu_seqlens_q: Option<&'a TensorView>,
    /// The same for k and v.
    pub cu_seqlens_k: Option<&'a TensorView>,
    /// Problems with pages only: `(B, ceil(kv_len / page_size))`, u32, contiguous: which pages a batch item's keys lie in,
    /// in order. (A number past the last page counts as the last one; entries past an item's `kv_lens` may be anything.)
    pub block_table: Option<&'a TensorView>,
}

/// A small operand: kernels find all of them in one buffer.
struct Table<'a> {
    name: &'static str,
    view: Option<&'a TensorView>,
}

/// Where each small operand begins in the buffer of tables, in words; `NONE` where there is none.
#[derive(Clone, Copy)]
pub(super) struct TablePlaces {
    pub(super) q_lens: u32,
    pub(super) kv_lens: u32,
    pub(super) cu_seqlens_q: u32,
    pub(super) cu_seqlens_k: u32,
    pub(super) slopes: u32,
    pub(super) slopes_batch_stride: u32,
    pub(super) sinks: u32,
    pub(super) block_table: u32,
}

/// Twin of `NONE` in shaders/shared/item.wgsl.
const NONE: u32 = u32::MAX;

/// Words of the small operands that a problem takes, and how many such operands there are.
pub(super) fn table_words(problem: &AttentionProblem) -> (u64, usize) {
    let AttentionProblem {
        batch,
        heads,
        packed,
        ref rules,
        ..
    } = *problem;
    let (batch, heads) = (batch as u64, heads as u64);
    let starts = batch.saturating_add(1);
    let sizes = [
        (rules.q_lens, batch),
        (rules.kv_lens, batch),
        (packed, starts),
        (packed, starts),
        // (B, H) at most
        (rules.alibi, batch.max(1).saturating_mul(heads)),
        (rules.sinks, heads),
        (
            problem.page_size.is_some(),
            batch.saturating_mul(problem.pages() as u64),
        ),
    ];
    sizes
        .into_iter()
        .filter(|(there, _)| *there)
        .fold((0, 0), |(words, count), (_, size)| {
            (size.saturating_add(words), count + 1)
        })
}

impl<'a> RuleArguments<'a> {
    /// Holds every tensor against the problem; returns mask and bias as views of `(B, H, Tq, Tk)`.
    pub(crate) fn check(
        &self,
        problem: &AttentionProblem,
    ) -> Result<(Option<TensorView>, Option<TensorView>)> {
        let rules = &problem.rules;
        let given = [
            ("mask", rules.mask, self.mask),
            ("bias", rules.bias, self.bias),
            ("kv_lens", rules.kv_lens, self.kv_lens),
            ("q_lens", rules.q_lens, self.q_lens),
            ("slopes", rules.alibi, self.slopes),
            ("sinks", rules.sinks, self.sinks),
            ("cu_seqlens_q", problem.packed, self.cu_seqlens_q),
            ("cu_seqlens_k", problem.packed, self.cu_seqlens_k),
            ("block_table", problem.page_size.is_some(), self.block_table),
            (
                "rule_data",
                rules.rule.as_ref().is_some_and(Rule::reads_data),
                self.rule_data,
            ),
        ];
        for (name, wanted, view) in given {
            if wanted != view.is_some() {
                let word = |there| if there { "a tensor" } else { "none" };
                return Err(Error::shape(
                    name,
                    match name {
                        "cu_seqlens_q" | "cu_seqlens_k" if wanted => {
                            "a tensor, since the problem is packed".into()
                        }
                        "cu_seqlens_q" | "cu_seqlens_k" => {
                            "none, since the problem is not packed".to_string()
                        }
                        "block_table" if wanted => {
                            "a tensor, since k and v lie in pages (the problem has a page_size)"
                                .into()
                        }
                        "block_table" => "none, since the problem has no page_size".to_string(),
                        _ => format!("{} as the problem's rules say", word(wanted)),
                    },
                    word(!wanted),
                ));
            }
        }
        let AttentionProblem {
            batch,
            heads,
            q_len,
            kv_len,
            ..
        } = *problem;
        let pairs = [batch, heads, q_len, kv_len];
        let broadcast = |name: &str, view: Option<&TensorView>, element_type| {
            view.map(|view| {
                view.expect_type(name, element_type)?;
                view.broadcast_as(name, &pairs)
            })
            .transpose()
        };
        let mask = broadcast("mask", self.mask, ElementType::Bool)?;
        let bias = broadcast("bias", self.bias, ElementType::F32)?;
        let expect = |name: &str, view: Option<&TensorView>, shape: &[usize], element_type| {
            let Some(view) = view else { return Ok(()) };
            view.expect_shape(name, shape)?;
            view.expect_type(name, element_type)?;
            expect_contiguous(name, view)
        };
        expect("kv_lens", self.kv_lens, &[batch], ElementType::U32)?;
        expect("q_lens", self.q_lens, &[batch], ElementType::U32)?;
        let starts = [batch.saturating_add(1)];
        expect("cu_seqlens_q", self.cu_seqlens_q, &starts, ElementType::U32)?;
        expect("cu_seqlens_k", self.cu_seqlens_k, &starts, ElementType::U32)?;
        let table = [batch, problem.pages()];
        expect("block_table", self.block_table, &table, ElementType::U32)?;
        match self.slopes {
            Some(slopes) if slopes.shape().len() == 2 => {
                expect("slopes", Some(slopes), &[batch, heads], ElementType::F32)?;
            }
            slopes => expect("slopes", slopes, &[heads], ElementType::F32)?,
        }
        expect("sinks", self.sinks, &[heads], ElementType::F32)?;
        if let Some(data) = self.rule_data {
            data.expect_type("rule_data", ElementType::F32)?;
            expect_contiguous("rule_data", data)?;
            data.bind("rule_data")?;
        }
        for (name, view) in [("mask", &mask), ("bias", &bias)] {
            if let Some(view) = view {
                view.bind(name)?;
            }
        }
        self.check_tables()?;
        Ok((mask, bias))
    }

    /// All of them by name, for the checks that every operand goes through.
    pub(super) fn named(&self) -> [(&'static str, Option<&'a TensorView>); 10] {
        [
            ("mask", self.mask),
            ("bias", self.bias),
            ("rule_data", self.rule_data),
            ("kv_lens", self.kv_lens),
            ("q_lens", self.q_lens),
            ("slopes", self.slopes),
            ("sinks", self.sinks),
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("cu_seqlens_k", self.cu_seqlens_k),
            ("block_table", self.block_table),
        ]
    }

    fn tables(&self) -> [Table<'a>; 7] {
        let table = |name, view| Table { name, view };
        [
            table("q_lens", self.q_lens),
            table("kv_lens", self.kv_lens),
            table("cu_seqlens_q", self.cu_seqlens_q),
            table("cu_seqlens_k", self.cu_seqlens_k),
            table("slopes", self.slopes),
            table("sinks", self.sinks),
            table("block_table", self.block_table),
        ]
    }

    /// The small operands as one window of the buffer that all of them lie in; `None` if there are several buffers, or
    /// the window is larger than can be bound.
    fn one_window(&self) -> Option<TensorView> {
        let tables = self.tables();
        let views = || {
            let present = tables.iter().filter_map(|table| table.view);
            present.filter(|view| view.elements() > 0)
        };
        let one = views().next()?;
        // From the first element of the first to the last of the last.
        let begin = views().map(TensorView::offset).min()?;
        let end = views()
            .map(|view| view.offset() + view.elements() as usize)
            .max()?;
        let window = one.words(begin, end - begin);
        let whole = views().all(|view| view.buffer() == one.buffer());
        (whole && window.bind("tables").is_ok()).then_some(window)
    }

    /// Whether the small operands can be gathered, where they must be.
    fn check_tables(&self) -> Result<()> {
        if self.one_window().is_some() {
            return Ok(());
        }
        let single = self.tables().iter().flat_map(|table| table.view).count() == 1;
        for Table { name, view } in self.tables() {
            if let (true, Some(view)) = (single, view) {
                view.bind(name)?;
            }
            let copied = |view: &TensorView| {
                let usage = view.buffer().usage();
                usage.contains(wgpu::BufferUsages::COPY_SRC) || view.elements() == 0
            };
            if !view.is_none_or(copied) {
                return Err(Error::Layout {
                    argument: name.into(),
                    problem: "its buffer lacks the usage COPY_SRC".into(),
                    remedy: "small operands in several buffers are gathered by copies: create it with COPY_SRC, or keep them in one buffer".into(),
                });
            }
        }
        Ok(())
    }

    /// The small operands in one buffer: as they lie where they are in one already, else copied into `workspace`
    /// (the copies that the plan names). Returns that buffer's view and the places.
    pub(super) fn bind_tables(
        &self,
        gpu: &Gpu,
        encoder: &mut wgpu::CommandEncoder,
        workspace: Option<&Tensor>,
    ) -> Result<(Option<TensorView>, TablePlaces)> {
        let tables = self.tables();
        let mut places = [NONE; 7];
        let whole = match (self.one_window(), workspace) {
            (Some(window), _) => {
                let bound = first(window.bind("tables")?);
                for (place, table) in places.iter_mut().zip(&tables) {
                    if let Some(view) = table.view {
                        *place = bound + view.offset().saturating_sub(window.offset()) as u32;
                    }
                }
                Some(window)
            }
            (None, Some(workspace)) => {
                let mut at = 0;
                for (place, table) in places.iter_mut().zip(&tables) {
                    let Some(view) = table.view else { continue };
                    let bytes = 4 * view.elements();
                    if bytes > 0 {
                        let (from, to) = (view.buffer(), workspace.buffer());
                        gpu.record_copy(encoder, from, 4 * view.offset() as u64, to, at, bytes)?;
                    }
                    *place = (at / 4) as u32;
                    at += bytes;
                }
                Some(workspace.view())
            }
            // There is none.
            (None, None) => None,
        };
        let [
            q_lens,
            kv_lens,
            cu_seqlens_q,
            cu_seqlens_k,
            slopes,
            sinks,
            block_table,
        ] = places;
        let slopes_batch_stride = match self.slopes.map(TensorView::shape) {
            Some([_, heads]) => *heads as u32,
            _ => 0,
        };
        let places = TablePlaces {
            q_lens,
            kv_lens,
            cu_seqlens_q,
            cu_seqlens_k,
            slopes,
            slopes_batch_stride,
            sinks,
            block_table,
        };
        Ok((whole, places))
    }
}

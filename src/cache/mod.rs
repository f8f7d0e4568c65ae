//! The KV cache: keys and values of the tokens so far, on the GPU.
//!
//! Each batch item is a *sequence* with a length of its own. Keys and values lie in one buffer each, either with room for
//! the capacity of every sequence, or in *pages* of a fixed number of tokens in one pool, which each sequence's *block table*
//! names in order (Kwon and others 2023, "PagedAttention", [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)).
//!
//! In memory the tokens of a head follow one another, `(B, Hkv, capacity, D)` and `(Hkv, pages, page size, D)`: attention reads
//! a head's keys from the first to the last. The views that are given out have the axes of all other tensors.
//!
//! The host knows lengths and block tables; the GPU's copy of them is brought up to date in the encoder of the
//! call that changes them, by copies of single words out of a buffer of numbers that never changes. So calls that are
//! recorded before one submit cannot see each other's lengths, and a call makes no buffer and no bind group.

mod append;
mod pages;

pub(crate) use append::{Append, Moves, Place};

use crate::attention::{Alignment, AttentionProblem, AttentionRules};
use crate::element::ElementType;
use crate::gpu::{Capabilities, Gpu};
use crate::kernels::Kernel;
use crate::plan::size;
use crate::rotary::Rotary;
use crate::tensor::{Tensor, TensorView, elements, shape_text};
use crate::{Error, Result};
use pages::{PageUse, Pool};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// The pages of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageConfig {
    /// Tokens of a page.
    pub size: usize,
    /// Pages of the pool, for all sequences together.
    pub count: usize,
}

/// What a [`KvCache`] is. Plain data: start from [`KvCacheConfig::new`] and change fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvCacheConfig {
    /// Sequences (B).
    pub batch: usize,
    /// The most tokens of a sequence.
    pub capacity: usize,
    /// Heads of keys and values (Hkv).
    pub kv_heads: usize,
    /// Channels of a head of keys (D).
    pub head_dim: usize,
    /// Channels of a head of values (Dv).
    pub value_dim: usize,
    /// What they are stored as: f32, f16 or bf16.
    pub element_type: ElementType,
    /// In pages of one pool; `None`: room for the capacity of every sequence.
    pub pages: Option<PageConfig>,
}

impl KvCacheConfig {
    /// f32, values as wide as keys, room for the capacity of every sequence.
    pub fn new(batch: usize, capacity: usize, kv_heads: usize, head_dim: usize) -> Self {
        KvCacheConfig {
            batch,
            capacity,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            element_type: ElementType::F32,
            pages: None,
        }
    }

    /// Stored in that type.
    #[must_use]
    pub fn stored_as(self, element_type: ElementType) -> Self {
        KvCacheConfig {
            element_type,
            ..self
        }
    }

    /// In `count` pages of `size` tokens each.
    #[must_use]
    pub fn paged(self, size: usize, count: usize) -> Self {
        KvCacheConfig {
            pages: Some(PageConfig { size, count }),
            ..self
        }
    }

    /// Causal attention of the last `q_len` tokens of every sequence to all that it has: with the lengths that come with
    /// a call ([`KvCache::lengths_view`]), and the block table where there are pages.
    pub fn attention(&self, heads: usize, q_len: usize) -> AttentionProblem {
        AttentionProblem {
            kv_heads: self.kv_heads,
            kv_len: self.capacity,
            value_dim: self.value_dim,
            kv_type: self.element_type,
            page_size: self.pages.map(|pages| pages.size),
            rules: AttentionRules {
                kv_lens: true,
                ..AttentionRules::causal(Alignment::BottomRight)
            },
            ..AttentionProblem::new(self.batch, heads, q_len, self.head_dim)
        }
    }

    /// Bytes of keys and values together; `u64::MAX` if they cannot be counted.
    pub fn bytes(&self) -> u64 {
        let of = |channels| self.tensor_bytes("cache", channels).unwrap_or(u64::MAX);
        of(self.head_dim).saturating_add(of(self.value_dim))
    }

    /// Entries of a sequence's block table.
    fn table_width(&self) -> usize {
        self.pages
            .map_or(0, |pages| self.capacity.div_ceil(pages.size.max(1)))
    }

    /// Tokens that there is room for, as rows of one tensor: axis 0, axis 1.
    fn token_axes(&self) -> [usize; 2] {
        match self.pages {
            None => [self.batch, self.capacity],
            Some(pages) => [pages.count, pages.size],
        }
    }

    /// Channels of a head as they are stored: rows begin on whole words.
    fn stored_channels(&self, channels: usize) -> usize {
        match self.element_type.size() {
            2 => channels.checked_next_multiple_of(2).unwrap_or(usize::MAX),
            _ => channels,
        }
    }

    /// The largest number that the state holds: a length, or a page.
    fn largest_number(&self) -> usize {
        let pages = self.pages.map_or(0, |pages| pages.count);
        pages.max(self.capacity)
    }

    fn tensor_bytes(&self, what: &str, channels: usize) -> Result<u64> {
        let [first, second] = self.token_axes();
        let shape = [first, second, self.kv_heads, self.stored_channels(channels)];
        Ok(elements(what, &shape)? * self.element_type.size())
    }

    /// What must hold before anything is allocated.
    fn check(&self, capabilities: &Capabilities) -> Result<()> {
        let pages = self.pages.unwrap_or(PageConfig { size: 1, count: 1 });
        for (name, value) in [
            ("capacity", self.capacity),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
            ("pages.size", pages.size),
            ("pages.count", pages.count),
        ] {
            if value == 0 {
                return Err(Error::parameter(name, 0, "must be at least 1"));
            }
            size(name, value)?;
        }
        size("batch", self.batch)?;
        if self.element_type.float_number().is_none() {
            let rule = "must be f32, f16 or bf16";
            return Err(Error::parameter("element_type", self.element_type, rule));
        }
        if self.pages.is_some() {
            let most = pages.size.saturating_mul(pages.count);
            if self.capacity > most {
                let rule = format!(
                    "must be at most pages.size * pages.count = {most}, all there is room for"
                );
                return Err(Error::parameter("capacity", self.capacity, rule));
            }
        }
        let tables = elements("the block tables", &[self.batch, self.table_width() + 2])? * 4;
        let numbers = 4 * (self.largest_number() as u64 + 1);
        let available = capabilities.max_binding_bytes;
        for (what, needed) in [
            (
                "the cache's keys",
                self.tensor_bytes("the cache's keys", self.head_dim)?,
            ),
            (
                "the cache's values",
                self.tensor_bytes("the cache's values", self.value_dim)?,
            ),
            ("the cache's block tables", tables),
            ("the lengths that the cache's sequences may have", numbers),
        ] {
            if needed > available {
                let limit = "max_storage_buffer_binding_size";
                return Err(Error::limit_bytes(what, limit, needed, available));
            }
        }
        Ok(())
    }
}

/// Keys and values of the tokens so far.
///
/// ```
/// # use wgpu_attention::*;
/// # fn decode(gpu: &Gpu, k: &TensorView, v: &TensorView, q: &TensorView, out: &TensorView) -> Result<()> {
/// // 2 sequences of up to 4096 tokens, 8 KV heads of 128 channels, f16, in 512 pages of 16 tokens.
/// let config = KvCacheConfig::new(2, 4096, 8, 128).stored_as(ElementType::F16).paged(16, 512);
/// let mut cache = KvCache::new(gpu, config)?;
/// let attention = Attention::new(gpu, config.attention(32, 1))?; // 32 query heads, a new token each
///
/// let mut encoder = gpu.device().create_command_encoder(&Default::default());
/// cache.append(&mut encoder, AppendArguments::new(k, v))?; // (2, 1, 8, 128) each
/// let (keys, values, table) = (cache.keys(), cache.values(), cache.block_table());
/// let lengths = cache.lengths_view();
/// let mut arguments = AttentionArguments::new(q, &keys, &values, out);
/// arguments.rules.kv_lens = Some(&lengths);
/// arguments.rules.block_table = table.as_ref();
/// attention.encode(&mut encoder, arguments)?;
/// gpu.submit(encoder.finish())?;
/// assert_eq!(cache.lengths(), [1, 1]);
/// # Ok(())
/// # }
/// ```
///
/// [`MultiHeadAttention::prefill`](crate::MultiHeadAttention::prefill) and [`step`](crate::MultiHeadAttention::step) do all that for a layer.
///
/// # What is recorded counts
///
/// The lengths that the host knows grow when a call is *recorded*. Submit encoders in the order in which they were
/// recorded. If one is dropped instead, [`truncate`](Self::truncate) each of its sequences to the length before: that
/// brings everything back in step (but for a sequence that shared its last page with one that is gone by then: reset it
/// and begin anew). A refused call changes nothing.
///
/// Lengths travel to the GPU as copies of one word, one for each sequence and call.
pub struct KvCache {
    device: Arc<CacheDevice>,
    sequences: Vec<Sequence>,
    pool: Option<Pool>,
}

/// What lies on the GPU. It does not change but in content.
pub(crate) struct CacheDevice {
    gpu: Gpu,
    config: KvCacheConfig,
    k: TensorView,
    v: TensorView,
    /// k and v with all pages as one token axis.
    rows: [TensorView; 2],
    /// `(2 B + B * W)`, u32: lengths, numbers of new tokens, block tables.
    state: TensorView,
    /// The numbers from 0 on, u32.
    numbers: Tensor,
    /// A page of keys or values, on its way to another page: one buffer cannot be copied to itself.
    scratch: Option<Tensor>,
    append: Append,
}

/// Where each of the small operands begins in the state, in words.
pub(crate) struct TablePlaces {
    pub(crate) counts: u32,
    pub(crate) block_table: u32,
    pub(crate) block_table_stride: u32,
}

#[derive(Debug, Default)]
struct Sequence {
    length: usize,
    /// The pages of its tokens, in order.
    pages: Vec<u32>,
    /// Entries of its block table that the GPU has.
    written: usize,
    /// The page, by its place among `pages`, that is a copy, and what it was copied from.
    copied: Option<(usize, PageUse)>,
    /// Whether that copy must be recorded once more: it may have been in an encoder that was dropped.
    copy_again: bool,
}

/// The operands of [`KvCache::append`].
#[derive(Clone, Copy, Debug)]
pub struct AppendArguments<'a> {
    /// `(B, T, Hkv, D)`, f32, f16 or bf16, any strides but a contiguous last axis.
    pub k: &'a TensorView,
    /// `(B, T, Hkv, Dv)`, of the same type.
    pub v: &'a TensorView,
    /// How many of the T tokens each sequence gets, its first ones; `None`: all.
    pub tokens: Option<&'a [usize]>,
    /// Turns the keys by their positions before they are stored.
    pub rotary: Option<&'a Rotary>,
}

impl<'a> AppendArguments<'a> {
    /// All tokens, as they are.
    pub fn new(k: &'a TensorView, v: &'a TensorView) -> Self {
        AppendArguments {
            k,
            v,
            tokens: None,
            rotary: None,
        }
    }
}

/// The first tokens of a sequence, to be shared with others: [`KvCache::prefix`], [`KvCache::attach`]. It holds nothing:
/// once the pages are freed it is of no use.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// Of the cache that it belongs to.
    device: std::sync::Weak<CacheDevice>,
    pages: Vec<PageUse>,
    tokens: usize,
}

impl fmt::Debug for CacheDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheDevice").finish_non_exhaustive()
    }
}

impl Prefix {
    /// Its length.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("config", &self.device.config)
            .field("lengths", &self.lengths())
            .finish_non_exhaustive()
    }
}

impl CacheDevice {
    pub(crate) fn config(&self) -> &KvCacheConfig {
        &self.config
    }

    /// Keys and values as attention takes them.
    pub(crate) fn keys_and_values(&self) -> [&TensorView; 2] {
        [&self.k, &self.v]
    }

    /// Keys and values `(B, capacity, Hkv, D)`, or `(1, rows, Hkv, D)` where there are pages.
    pub(crate) fn rows(&self) -> [&TensorView; 2] {
        [&self.rows[0], &self.rows[1]]
    }

    /// Whether a buffer is one that calls read or write.
    pub(crate) fn owns(&self, buffer: &wgpu::Buffer) -> bool {
        let own = [self.k.buffer(), self.v.buffer(), self.state.buffer()];
        own.contains(&buffer)
    }

    /// All small operands together.
    pub(crate) fn tables(&self) -> &TensorView {
        &self.state
    }

    pub(crate) fn table_places(&self) -> TablePlaces {
        TablePlaces {
            counts: self.config.batch as u32,
            block_table: 2 * self.config.batch as u32,
            block_table_stride: self.config.table_width() as u32,
        }
    }

    /// `(B)`: lengths.
    pub(crate) fn lengths_view(&self) -> TensorView {
        self.state.words(0, self.config.batch)
    }

    /// `(B)`: the number of new tokens of each sequence.
    pub(crate) fn counts_view(&self) -> TensorView {
        self.state.words(self.config.batch, self.config.batch)
    }

    pub(crate) fn block_table(&self) -> Option<TensorView> {
        self.config.pages?;
        let (batch, width) = (self.config.batch, self.config.table_width());
        let all = self.state.words(2 * batch, batch * width);
        all.split_axis(0, &[batch, width]).ok()
    }

    /// Records `state[at..at + count] = first, first + 1, ...`
    fn record_numbers(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        at: usize,
        first: usize,
        count: usize,
    ) -> Result<()> {
        self.gpu.record_copy(
            encoder,
            self.numbers.buffer(),
            4 * first as u64,
            self.state.buffer(),
            4 * at as u64,
            4 * count as u64,
        )
    }

    /// Records a copy of the first rows of one page to another: of each head, since pages lie head by head.
    fn record_page_copy(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        from: u32,
        to: u32,
        rows: usize,
    ) -> Result<()> {
        let (Some(pages), Some(scratch)) = (self.config.pages, &self.scratch) else {
            return Ok(());
        };
        for (view, channels) in [
            (&self.k, self.config.head_dim),
            (&self.v, self.config.value_dim),
        ] {
            let row =
                self.config.stored_channels(channels) as u64 * self.config.element_type.size();
            let bytes = row * rows as u64;
            let place = |head: usize, page: u32| {
                row * pages.size as u64 * (head * pages.count + page as usize) as u64
            };
            let (buffer, copy) = (view.buffer(), scratch.buffer());
            for head in 0..self.config.kv_heads {
                let (from, to) = (place(head, from), place(head, to));
                let at = bytes * head as u64;
                self.gpu
                    .record_copy(encoder, buffer, from, copy, at, bytes)?;
                self.gpu.record_copy(encoder, copy, at, buffer, to, bytes)?;
            }
        }
        Ok(())
    }
}

impl KvCache {
    /// An empty cache. Allocates all of its memory.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for sizes of 0, a capacity above what all pages hold, or a type that is no float;
    /// [`Error::LimitExceeded`] where keys or values of all tokens are more than the device can bind at once, or it has
    /// fewer than 8 storage buffers a stage, before anything is allocated; [`Error::OutOfMemory`],
    /// [`Error::Shader`].
    pub fn new(gpu: &Gpu, config: KvCacheConfig) -> Result<Self> {
        config.check(gpu.capabilities())?;
        Self::build(gpu, config, Append::new(gpu, 0)?)
    }

    /// [`new`](Self::new) with a kernel of the caller's own that takes the bindings and parameters of `append`, for
    /// experiments: of [`append`](Self::append), not of layers.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`Error::Parameter`] for a kernel of another operation.
    pub fn from_kernel(gpu: &Gpu, config: KvCacheConfig, kernel: &'static Kernel) -> Result<Self> {
        config.check(gpu.capabilities())?;
        Self::build(gpu, config, Append::from_kernel(gpu, kernel, 0)?)
    }

    fn build(gpu: &Gpu, config: KvCacheConfig, append: Append) -> Result<Self> {
        let [first, second] = config.token_axes();
        let tensor = |channels| {
            let stored = config.stored_channels(channels);
            // Where heads lie, and the order of axes that brings them behind the tokens.
            let (shape, order) = match config.pages {
                None => ([first, config.kv_heads, second, stored], [0, 2, 1, 3]),
                Some(_) => ([config.kv_heads, first, second, stored], [1, 2, 0, 3]),
            };
            let tensor = Tensor::empty(gpu, &shape, config.element_type)?;
            tensor.view().slice(3, 0..channels)?.permute(&order)
        };
        let (k, v) = (tensor(config.head_dim)?, tensor(config.value_dim)?);
        let rows = |view: &TensorView| match config.pages {
            None => Ok(view.clone()),
            Some(_) => Ok::<_, Error>(view.merge_axes(0..2)?.unsqueeze(0)),
        };
        let rows = [rows(&k)?, rows(&v)?];
        let words = config.batch * (2 + config.table_width());
        let state = Tensor::empty(gpu, &[words], ElementType::U32)?.view();
        let most = config.largest_number();
        let numbers: Vec<u32> = (0..=most as u32).collect();
        let widest = config.head_dim.max(config.value_dim);
        let scratch = config.pages.map(|pages| {
            let shape = [pages.size, config.kv_heads, config.stored_channels(widest)];
            Tensor::empty(gpu, &shape, config.element_type)
        });
        Ok(KvCache {
            sequences: (0..config.batch).map(|_| Sequence::default()).collect(),
            pool: config.pages.map(|pages| Pool::new(pages.count)),
            device: Arc::new(CacheDevice {
                gpu: gpu.clone(),
                k,
                v,
                rows,
                state,
                numbers: Tensor::from_slice(gpu, &[most + 1], &numbers)?,
                scratch: scratch.transpose()?,
                append,
                config,
            }),
        })
    }

    /// What it is.
    pub fn config(&self) -> &KvCacheConfig {
        &self.device.config
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Gpu {
        &self.device.gpu
    }

    pub(crate) fn device(&self) -> &Arc<CacheDevice> {
        &self.device
    }

    /// Tokens of each sequence, those of calls that were recorded included.
    pub fn lengths(&self) -> Vec<usize> {
        self.sequences.iter().map(|own| own.length).collect()
    }

    /// Pages that no sequence uses; `None` where there are no pages.
    pub fn free_pages(&self) -> Option<usize> {
        self.pool.as_ref().map(Pool::free_pages)
    }

    /// Keys `(B, capacity, Hkv, D)`, or `(pages, page size, Hkv, D)`. What lies behind a sequence's length is anything.
    pub fn keys(&self) -> TensorView {
        self.device.k.clone()
    }

    /// Values `(B, capacity, Hkv, Dv)`, or `(pages, page size, Hkv, Dv)`.
    pub fn values(&self) -> TensorView {
        self.device.v.clone()
    }

    /// `(B)`, u32: the lengths as the GPU has them, for [`RuleArguments::kv_lens`](crate::RuleArguments::kv_lens).
    pub fn lengths_view(&self) -> TensorView {
        self.device.lengths_view()
    }

    /// `(B)`, u32: how many tokens the last append that was told `tokens` gave each sequence, as the GPU has it, for
    /// [`RuleArguments::q_lens`](crate::RuleArguments::q_lens).
    pub fn counts_view(&self) -> TensorView {
        self.device.counts_view()
    }

    /// `(B, ceil(capacity / page size))`, u32: the pages of each sequence as the GPU has them, for
    /// [`RuleArguments::block_table`](crate::RuleArguments::block_table). `None` where there are no pages.
    pub fn block_table(&self) -> Option<TensorView> {
        self.device.block_table()
    }

    /// The pages of a sequence in order, as the host knows them; empty where there are no pages.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a sequence that there is not.
    pub fn pages(&self, sequence: usize) -> Result<&[u32]> {
        self.check_sequence(sequence)?;
        Ok(&self.sequences[sequence].pages)
    }

    /// Records new tokens into the caller's encoder: keys and values are moved behind those that each sequence has, and
    /// the GPU's lengths and block tables follow. Submits nothing, waits for nothing, allocates nothing on the GPU
    /// (unless views are laid out as never before: then one parameter buffer).
    ///
    /// A sequence whose last page is shared gets a copy of it first.
    ///
    /// # Errors
    ///
    /// [`Error::NoRoom`] past the capacity, where the pool has too few pages, or where rotary embedding has too
    /// few positions; [`Error::Shape`], [`Error::Type`], [`Error::Layout`], [`Error::OtherDevice`],
    /// [`Error::Parameter`]. Nothing was recorded then, and the cache is as it was.
    pub fn append(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        arguments: AppendArguments<'_>,
    ) -> Result<()> {
        let device = self.device.clone();
        let &[_, tokens, ..] = arguments.k.shape() else {
            let got = shape_text(arguments.k.shape());
            return Err(Error::shape("k", "(B, T, Hkv, D)", got));
        };
        let appending = self.prepare(tokens, arguments.tokens, arguments.rotary)?;
        let moves = Moves {
            q: None,
            kv: Some([arguments.k, arguments.v]),
            rotary: arguments.rotary,
            place: Place::Cache {
                cache: &device,
                counts: appending.told,
            },
        };
        let ready = device.append.prepare(&moves, device.config.batch, tokens)?;
        let before = self.lengths();
        let mut recorded = self.commit(encoder, &appending);
        if recorded.is_ok() {
            recorded = device.append.record(encoder, ready, "append", None);
        }
        if recorded.is_err() {
            self.restore(&before);
        }
        recorded
    }

    /// Back to the lengths before a call that could not be recorded to its end.
    pub(crate) fn restore(&mut self, before: &[usize]) {
        for (sequence, length) in before.iter().enumerate() {
            // There is such a sequence, and it is not shorter.
            let _ = self.truncate(sequence, *length);
        }
    }

    /// Whether so many new tokens have room. Changes nothing.
    pub(crate) fn prepare(
        &self,
        tokens: usize,
        counts: Option<&[usize]>,
        rotary: Option<&Rotary>,
    ) -> Result<Appending> {
        let KvCacheConfig {
            batch,
            capacity,
            pages,
            ..
        } = self.device.config;
        size("tokens", tokens)?;
        if let Some(counts) = counts {
            if counts.len() != batch {
                let expected = format!("{batch} numbers, one of each sequence");
                return Err(Error::shape("tokens", expected, counts.len()));
            }
            if let Some(most) = counts.iter().find(|count| **count > tokens) {
                let rule = format!("must be at most {tokens}, the tokens that there are");
                return Err(Error::parameter("tokens", most, rule));
            }
        }
        let told = counts.is_some();
        let counts = counts.map_or_else(|| vec![tokens; batch], <[usize]>::to_vec);
        let mut wanted = 0;
        // Shared last pages, and how many sequences leave each for a copy of their own.
        let mut left: HashMap<u32, u32> = HashMap::new();
        for (number, (own, new)) in self.sequences.iter().zip(&counts).enumerate() {
            let needed = own.length.saturating_add(*new);
            if needed > capacity {
                return Err(Error::NoRoom {
                    what: format!(
                        "sequence {number} of the KV cache, {} tokens and {new} new ones,",
                        own.length
                    ),
                    needed: needed as u64,
                    available: capacity as u64,
                    unit: "tokens",
                    remedy: "truncate or reset it, or make the cache with a larger capacity",
                });
            }
            if let Some(rotary) = rotary {
                rotary.expect_positions(needed)?;
            }
            if let (Some(pages), Some(pool)) = (pages, &self.pool) {
                wanted +=
                    needed.div_ceil(pages.size) - own.pages.len().min(needed.div_ceil(pages.size));
                if let Some(page) = own.partial_page(pages.size).filter(|_| *new > 0) {
                    let leaving = left.entry(page).or_default();
                    if pool.users(page) > *leaving + 1 {
                        *leaving += 1;
                        wanted += 1;
                    }
                }
            }
        }
        if let Some(pool) = self.pool.as_ref().filter(|pool| wanted > pool.free_pages()) {
            return Err(Error::NoRoom {
                what: format!(
                    "{} new tokens in the KV cache",
                    counts.iter().sum::<usize>()
                ),
                needed: wanted as u64,
                available: pool.free_pages() as u64,
                unit: "pages",
                remedy: "truncate or reset sequences, or make the cache with more pages",
            });
        }
        Ok(Appending { counts, told })
    }

    /// Takes the pages, and records lengths and block tables. The tokens themselves are written next.
    pub(crate) fn commit(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        appending: &Appending,
    ) -> Result<()> {
        let device = self.device.clone();
        for (own, new) in self.sequences.iter_mut().zip(&appending.counts) {
            if let (Some(pages), Some(pool)) = (device.config.pages, &mut self.pool) {
                if let Some(shared) = own.partial_page(pages.size)
                    && *new > 0
                    && pool.users(shared) > 1
                    && let Some(page) = pool.take()
                {
                    let last = own.length / pages.size;
                    own.pages[last] = page;
                    own.written = own.written.min(last);
                    own.copied = Some((last, pool.rows(shared, own.length % pages.size)));
                    own.copy_again = true;
                    pool.release(shared);
                }
                while own.pages.len() * pages.size < own.length + new {
                    // `prepare` has counted them.
                    let Some(page) = pool.take() else { break };
                    own.pages.push(page);
                }
                for row in own.length..own.length + new {
                    // The first row of each page that is written.
                    if (row == own.length || row.is_multiple_of(pages.size))
                        && let Some(page) = own.pages.get(row / pages.size)
                    {
                        pool.write(*page, row % pages.size);
                    }
                }
            }
            own.length += new;
        }
        if appending.told {
            for (number, new) in appending.counts.iter().enumerate() {
                device.record_numbers(encoder, device.config.batch + number, *new, 1)?;
            }
        }
        self.encode_lengths(encoder)
    }

    /// Records the lengths and block tables that the host knows into the caller's encoder. Every call that appends does so
    /// by itself: this is for attention after a [`truncate`](Self::truncate) or [`attach`](Self::attach) without a new token.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`], [`Error::Validation`].
    pub fn encode_lengths(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let recorded = self.record_lengths(encoder);
        if recorded.is_err() {
            self.sequences
                .iter_mut()
                .for_each(Sequence::forget_recorded);
        }
        recorded
    }

    fn record_lengths(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let device = self.device.clone();
        let (batch, width) = (device.config.batch, device.config.table_width());
        for (number, own) in self.sequences.iter_mut().enumerate() {
            if let (Some((page, source)), true) = (own.copied, own.copy_again)
                && let (Some(pool), Some(to)) = (&self.pool, own.pages.get(page))
            {
                if pool.holds(source) {
                    device.record_page_copy(encoder, source.page, *to, source.rows)?;
                }
                own.copy_again = false;
            }
            device.record_numbers(encoder, number, own.length, 1)?;
            // Pages that follow one another are one copy.
            while own.written < own.pages.len() {
                let rest = &own.pages[own.written..];
                let run = rest
                    .windows(2)
                    .take_while(|two| two[1] == two[0] + 1)
                    .count()
                    + 1;
                let at = 2 * batch + number * width + own.written;
                device.record_numbers(encoder, at, rest[0] as usize, run)?;
                own.written += run;
            }
        }
        Ok(())
    }

    /// Forgets the tokens of a sequence from `length` on. Pages that nobody uses any more are free.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a sequence that there is not, or a length above the one that it has. The cache is as it
    /// was then.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let own = &mut self.sequences[sequence];
        if length > own.length {
            let rule = format!(
                "must be at most {}, the tokens that sequence {sequence} has",
                own.length
            );
            return Err(Error::parameter("length", length, rule));
        }
        own.length = length;
        own.forget_recorded();
        if let (Some(pages), Some(pool)) = (self.device.config.pages, &mut self.pool) {
            let kept = length.div_ceil(pages.size).min(own.pages.len());
            for page in own.pages.drain(kept..) {
                pool.release(page);
            }
            own.copied = own.copied.filter(|(page, _)| *page < kept);
            // Rows from there on are nobody's.
            if let Some(page) = own.partial_page(pages.size)
                && pool.users(page) == 1
            {
                pool.write(page, length % pages.size);
            }
        }
        Ok(())
    }

    /// Forgets all tokens of a sequence.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a sequence that there is not.
    pub fn reset_sequence(&mut self, sequence: usize) -> Result<()> {
        self.truncate(sequence, 0)
    }

    /// Forgets all tokens of all sequences.
    pub fn reset(&mut self) {
        for sequence in 0..self.sequences.len() {
            // There is such a sequence, and 0 is not above its length.
            let _ = self.truncate(sequence, 0);
        }
    }

    /// The first `tokens` tokens of a sequence, to be shared with others. Holds no page.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where there are no pages; [`Error::Parameter`] for a sequence that there is not, or more
    /// tokens than it has.
    pub fn prefix(&self, sequence: usize, tokens: usize) -> Result<Prefix> {
        let (Some(pages), Some(pool)) = (self.device.config.pages, &self.pool) else {
            return Err(Error::Unsupported {
                what: "sharing a prefix".into(),
                reason: "this cache has no pages: make it with KvCacheConfig::paged".into(),
            });
        };
        self.check_sequence(sequence)?;
        let own = &self.sequences[sequence];
        if tokens > own.length {
            let rule = format!(
                "must be at most {}, the tokens that sequence {sequence} has",
                own.length
            );
            return Err(Error::parameter("tokens", tokens, rule));
        }
        let shared = &own.pages[..tokens.div_ceil(pages.size)];
        Ok(Prefix {
            device: Arc::downgrade(&self.device),
            pages: shared
                .iter()
                .enumerate()
                .map(|(number, page)| {
                    let rows = (tokens - number * pages.size).min(pages.size);
                    pool.rows(*page, rows)
                })
                .collect(),
            tokens,
        })
    }

    /// Lets an empty sequence begin with the tokens of a prefix, without a copy. The last page, if it is not full, is
    /// copied when one of its sequences gets a token.
    ///
    /// # Errors
    ///
    /// [`Error::Parameter`] for a sequence that there is not or that has tokens, a prefix of another cache, and one of
    /// whose pages some were freed or overwritten meanwhile. The cache is as it was then.
    pub fn attach(&mut self, sequence: usize, prefix: &Prefix) -> Result<()> {
        self.check_sequence(sequence)?;
        if !std::ptr::eq(prefix.device.as_ptr(), Arc::as_ptr(&self.device)) {
            return Err(Error::parameter(
                "prefix",
                "of another cache",
                "must be of this cache",
            ));
        }
        let own = &mut self.sequences[sequence];
        if own.length > 0 {
            let got = format!("{sequence}, which has {} tokens", own.length);
            return Err(Error::parameter(
                "sequence",
                got,
                "must be empty: reset it first",
            ));
        }
        let Some(pool) = &mut self.pool else {
            return Ok(());
        };
        if let Some(freed) = prefix.pages.iter().find(|page| !pool.holds(**page)) {
            return Err(Error::parameter(
                "prefix",
                format!("with page {}, which was freed or overwritten", freed.page),
                "must be of tokens that a sequence still has: take a new prefix, and keep a sequence that has it",
            ));
        }
        own.pages = prefix.pages.iter().map(|page| page.page).collect();
        own.pages.iter().for_each(|page| pool.share(*page));
        own.length = prefix.tokens;
        own.copied = None;
        own.forget_recorded();
        Ok(())
    }

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        if sequence < self.sequences.len() {
            return Ok(());
        }
        let rule = format!("must be below {}, the batch", self.sequences.len());
        Err(Error::parameter("sequence", sequence, rule))
    }
}

/// New tokens that have room.
pub(crate) struct Appending {
    counts: Vec<usize>,
    /// Whether each sequence's number was told, so that the GPU must know it.
    pub(crate) told: bool,
}

impl Sequence {
    /// Whatever was recorded before may have been dropped: the GPU is told all of it again.
    fn forget_recorded(&mut self) {
        self.written = 0;
        self.copy_again = self.copied.is_some();
    }

    /// The page that its next token goes to, if it has tokens already.
    fn partial_page(&self, page_size: usize) -> Option<u32> {
        if self.length.is_multiple_of(page_size) {
            return None;
        }
        self.pages.get(self.length / page_size).copied()
    }
}

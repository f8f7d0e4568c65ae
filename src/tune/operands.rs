//! Operands to measure on: numbers between -1 and 1, rules that hide nothing.

use crate::element::ElementType;
use crate::gpu::Gpu;
use crate::tensor::{Tensor, TensorView, elements};
use crate::{AttentionArguments, AttentionProblem, Result, RuleArguments};

/// A tensor of numbers between -1 and 1, the same every time.
pub(super) fn noise(gpu: &Gpu, shape: &[usize], element_type: ElementType) -> Result<Tensor> {
    let tensor = Tensor::empty(gpu, shape, element_type)?;
    // Tables of a few thousand numbers are repeated: what they are does not matter, and a host takes long for many.
    let mut state = 1u32;
    let table: Vec<f32> = std::iter::repeat_with(|| {
        // Numerical Recipes' generator; its upper bits are random enough to look at.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    })
    .take(4099)
    .collect();
    let count = usize::try_from(elements("operands", shape)?).unwrap_or(0);
    let values = table.into_iter().cycle().take(count);
    match element_type {
        ElementType::F16 => tensor.write(&values.map(half::f16::from_f32).collect::<Vec<_>>())?,
        ElementType::BF16 => tensor.write(&values.map(half::bf16::from_f32).collect::<Vec<_>>())?,
        _ => tensor.write(&values.collect::<Vec<f32>>())?,
    }
    Ok(tensor)
}

/// What an attention problem takes.
pub(super) struct AttentionOperands {
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: Tensor,
    out_view: TensorView,
    mask: Option<TensorView>,
    bias: Option<TensorView>,
    kv_lens: Option<TensorView>,
    q_lens: Option<TensorView>,
    slopes: Option<TensorView>,
    sinks: Option<TensorView>,
    rule_data: Option<TensorView>,
    starts_q: Option<TensorView>,
    starts_k: Option<TensorView>,
    block_table: Option<TensorView>,
}

/// Numbers that a caller's own rule may read.
const RULE_DATA: usize = 1 << 16;

/// Operands of a problem: full lengths, a mask that allows all, a bias and slopes of 0, pages in order.
pub(super) fn of_attention(gpu: &Gpu, problem: &AttentionProblem) -> Result<AttentionOperands> {
    let &AttentionProblem {
        batch,
        heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        value_dim,
        packed,
        page_size,
        ref rules,
        q_type,
        kv_type,
        out_type,
        ..
    } = problem;
    // For the errors of a problem that cannot be.
    problem.plan(gpu.capabilities())?;
    let tokens = |count: usize| batch.saturating_mul(count);
    let pages = page_size.map(|size| (kv_len.div_ceil(size), size));
    let rows = |count: usize, heads: usize, channels: usize| match packed {
        true => vec![tokens(count), heads, channels],
        false => vec![batch, count, heads, channels],
    };
    let keys = |channels: usize| match pages {
        Some((pages, size)) => vec![tokens(pages), size, kv_heads, channels],
        None => rows(kv_len, kv_heads, channels),
    };
    let view = |tensor: Result<Tensor>| tensor.map(|tensor| tensor.view());
    let given = |there: bool, tensor: &dyn Fn() -> Result<Tensor>| {
        there.then(|| view(tensor())).transpose()
    };
    let lengths = |count: usize| {
        let lengths = vec![u32::try_from(count).unwrap_or(u32::MAX); batch];
        Tensor::from_slice(gpu, &[batch], &lengths)
    };
    let starts = |count: usize| {
        let starts: Vec<u32> = (0..=batch).map(|item| (item * count) as u32).collect();
        Tensor::from_slice(gpu, &[batch + 1], &starts)
    };
    let zeros = |count: usize| Tensor::from_slice(gpu, &[count], &vec![0f32; count]);
    // (Rows of 16 bits begin on whole words.)
    let out = Tensor::empty(
        gpu,
        &rows(q_len, heads, value_dim.next_multiple_of(2)),
        out_type,
    )?;
    let channels = out.shape().len() - 1;
    Ok(AttentionOperands {
        q: view(noise(gpu, &rows(q_len, heads, head_dim), q_type))?,
        k: view(noise(gpu, &keys(head_dim), kv_type))?,
        v: view(noise(gpu, &keys(value_dim), kv_type))?,
        out_view: out.view().slice(channels, 0..value_dim)?,
        out,
        mask: given(rules.mask, &|| {
            Tensor::from_slice(gpu, &[1, 1, 1, kv_len], &vec![true; kv_len])
        })?,
        bias: given(rules.bias, &|| {
            Tensor::from_slice(gpu, &[1, 1, 1, kv_len], &vec![0f32; kv_len])
        })?,
        kv_lens: given(rules.kv_lens, &|| lengths(kv_len))?,
        q_lens: given(rules.q_lens, &|| lengths(q_len))?,
        slopes: given(rules.alibi, &|| zeros(heads))?,
        sinks: given(rules.sinks, &|| zeros(heads))?,
        rule_data: given(
            rules.rule.as_ref().is_some_and(|rule| rule.reads_data()),
            &|| zeros(RULE_DATA),
        )?,
        starts_q: given(packed, &|| starts(q_len))?,
        starts_k: given(packed, &|| starts(kv_len))?,
        block_table: match pages {
            Some((pages, _)) => {
                let table: Vec<u32> = (0..tokens(pages)).map(|page| page as u32).collect();
                Some(Tensor::from_slice(gpu, &[batch, pages], &table)?.view())
            }
            None => None,
        },
    })
}

impl AttentionOperands {
    pub(super) fn arguments(&self) -> AttentionArguments<'_> {
        AttentionArguments {
            rules: RuleArguments {
                mask: self.mask.as_ref(),
                bias: self.bias.as_ref(),
                kv_lens: self.kv_lens.as_ref(),
                q_lens: self.q_lens.as_ref(),
                slopes: self.slopes.as_ref(),
                sinks: self.sinks.as_ref(),
                rule_data: self.rule_data.as_ref(),
                cu_seqlens_q: self.starts_q.as_ref(),
                cu_seqlens_k: self.starts_k.as_ref(),
                block_table: self.block_table.as_ref(),
            },
            ..AttentionArguments::new(&self.q, &self.k, &self.v, &self.out_view)
        }
    }

    /// The output, whose first word is there once the work is done.
    pub(super) fn out(&self) -> &Tensor {
        &self.out
    }
}
